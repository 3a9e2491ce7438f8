"""A real docker or podman for the tests, and an image without a registry: links, and the rest mounted from this system.

What is found installed is tried; where podman does not run with its own settings (limits that may not be raised,
control groups of both versions at once), a few others are tried. Docker without a daemon gets one of its own, if we are
root and there is a `dockerd`. Nothing of the user's storage is touched by podman: it gets one in a temporary folder.
"""

from __future__ import annotations

import io
import os
import resource
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from tuner.launch.processes import wait_until

IMAGE = f"localhost/spec-tuner-test-{os.getpid()}:1"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_TRY_S = 60


class Unusable(Exception):
    """Why a runtime cannot be used here."""


@dataclass
class Runtime:
    """A runtime that runs containers. `env` is what its commands need in their environment.

    `bridge`: it has a network of its own to publish ports from; `groups`: its containers have control groups, without
    which none can be limited or paused.
    """

    name: str
    env: dict[str, str] = field(default_factory=dict)
    bridge: bool = True
    groups: bool = True
    daemon: subprocess.Popen[bytes] | None = None
    folder: Path | None = None

    def ask(self, *arguments: str, check: bool = True) -> str:
        done = subprocess.run(
            [self.name, *arguments],
            env={**os.environ, **self.env},
            capture_output=True,
            text=True,
            timeout=_TRY_S,
            check=False,
        )
        if check and done.returncode:
            raise Unusable(f"{self.name} {' '.join(arguments[:2])}: {(done.stderr or done.stdout).strip()[-300:]}")
        return done.stdout.strip()

    def ids(self) -> list[str]:
        """The containers that carry our label."""
        return self.ask("ps", "--all", "--quiet", "--no-trunc", "--filter", "label=spec-tuner.marker").split()

    def make_image(self) -> None:
        """An image whose programs are those of this system: it only holds the links and folders that they need."""
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w") as tar:
            for name in ("usr", "sbin", "etc", "tmp", "proc", "sys", "dev", "run", "var"):
                entry = tarfile.TarInfo(name)
                entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
                tar.addfile(entry)
            for name in _links():
                entry = tarfile.TarInfo(name)
                entry.type, entry.linkname = tarfile.SYMTYPE, os.readlink(f"/{name}")
                tar.addfile(entry)
        made = subprocess.run(
            [self.name, "import", "--change", "ENV FROM_IMAGE=1", "--change", f"ENV PATH={PATH}", "-", IMAGE],
            env={**os.environ, **self.env},
            input=data.getvalue(),
            capture_output=True,
            timeout=_TRY_S,
            check=False,
        )
        if made.returncode:
            raise Unusable(f"{self.name} import: {made.stderr.decode(errors='replace').strip()[-300:]}")

    def end(self) -> None:
        """Removes what the tests have made of it."""
        for name in self.ids() if self.folder or self.daemon else ():
            self.ask("rm", "--force", name, check=False)
        self.ask("image", "rm", "--force", IMAGE, check=False)
        if self.daemon is not None:
            self.daemon.terminate()
            self.daemon.wait(20)
        if self.folder is not None:
            for row in Path("/proc/mounts").read_text().splitlines():
                if row.split()[1].startswith(f"{self.folder}/"):
                    subprocess.run(["umount", row.split()[1]], check=False)
            shutil.rmtree(self.folder, ignore_errors=True)


def mounts() -> list[str]:
    """What the image lacks, from this system: its libraries, the interpreter, and the tests."""
    folders = ["/usr", *(f"/{name}" for name in ("lib", "lib64") if name not in _links() and Path(f"/{name}").is_dir())]
    wanted = [os.path.realpath(sys.base_prefix), str(Path(__file__).parent)]
    folders += [folder for folder in wanted if not folder.startswith("/usr/")]
    return [f"{folder}:{folder}:ro" for folder in folders]


def interpreter() -> str:
    """This interpreter, by a path that is mounted."""
    return os.path.realpath(sys.executable)


def find(name: str) -> Runtime:
    """A runtime that has run a container.

    Raises:
        Unusable: there is none.
    """
    if shutil.which(name) is None:
        raise Unusable(f"{name} is not installed")
    return _docker() if name == "docker" else _podman()


def _links() -> list[str]:
    return [name for name in ("bin", "lib", "lib32", "lib64") if os.path.islink(f"/{name}")]


def _tried(runtime: Runtime) -> Runtime:
    runtime.make_image()
    volume = [word for mount in mounts() for word in ("--volume", mount)]
    said = runtime.ask("run", "--rm", "--init", "--network", "host", *volume, IMAGE, interpreter(), "-ISc", "print(42)")
    if said != "42":
        raise Unusable(f"a container of {runtime.name} said {said!r}")
    return runtime


def _docker() -> Runtime:
    runtime = Runtime("docker")
    try:
        runtime.ask("version", "--format", "{{.Server.Version}}")
    except Unusable as error:
        if os.geteuid() or shutil.which("dockerd") is None:
            raise Unusable(f"{error}; no daemon of our own: that takes root and dockerd") from error
        runtime = _own_daemon()
    try:
        return _tried(runtime)
    except Unusable:
        runtime.end()
        raise


def _own_daemon() -> Runtime:
    folder = Path(tempfile.mkdtemp(prefix="dockerd-"))
    address = f"unix://{folder}/docker.sock"
    options = ["--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec", "--pidfile", f"{folder}/pid"]
    options += ["--storage-driver", "vfs", "--bridge", "none", "--iptables=false", "--ip6tables=false"]
    with open(folder / "log", "wb") as log:
        daemon = subprocess.Popen(["dockerd", "--host", address, *options], stdout=log, stderr=log)
    runtime = Runtime("docker", {"DOCKER_HOST": address}, bridge=False, daemon=daemon, folder=folder)
    if not wait_until((folder / "docker.sock").exists, 20) or daemon.poll() is not None:
        said = (folder / "log").read_text(errors="replace").strip().splitlines()[-1:]
        runtime.end()
        raise Unusable(f"dockerd does not come up: {said}")
    return runtime


def _rootless(runtime: Runtime) -> Runtime:
    """What podman lacks where it does not run as root."""
    rootless, groups = runtime.ask("info", "--format", "{{.Host.Security.Rootless}} {{.Host.CgroupsVersion}}").split()
    if rootless == "true":
        runtime.bridge = os.access("/dev/net/tun", os.R_OK | os.W_OK)
        runtime.groups = groups == "v2"
    return runtime


def _podman() -> Runtime:
    folder = Path(tempfile.mkdtemp(prefix="podman-"))
    storage = folder / "storage.conf"
    storage.write_text(f'[storage]\ndriver = "vfs"\ngraphroot = "{folder}/data"\nrunroot = "{folder}/run"\n')
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    limits = f'default_ulimits = ["nofile={files}:{files}", "nproc=4096:4096"]\n'
    runc = '[engine]\nruntime = "runc"\n'
    trials = ["", f"[containers]\n{limits}", f"[containers]\n{limits}{runc}", runc]
    problems = []
    for i, text in enumerate(trials):
        env = {"CONTAINERS_STORAGE_CONF": str(storage)}
        if text:
            config = folder / f"containers-{i}.conf"
            config.write_text(text)
            env["CONTAINERS_CONF"] = str(config)
        try:
            return _rootless(_tried(Runtime("podman", env, folder=folder)))
        except Unusable as error:
            problems.append(str(error))
    Runtime("podman", env, folder=folder).end()
    raise Unusable("; ".join(dict.fromkeys(problems)))
