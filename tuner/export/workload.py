"""A launch record as what runs in a container: the same for Compose, Kubernetes and Helm."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from tuner.errors import UsageError
from tuner.export.head import Options, label, plain, released, tensor_parallel
from tuner.export.secrets import secret_env
from tuner.export.words import Hole, Word, refuse, words
from tuner.records import LaunchRecord
from tuner.secrets import find, is_secret

EVERYWHERE = "0.0.0.0"
"""Where a server in a container listens; who may reach it is the deployment's to say."""

SHARED_MEMORY = "16g"
"""For tensor parallelism, whose processes exchange through /dev/shm; a container's own has 64 MiB."""

ULIMITS = (("memlock", "-1"), ("stack", "67108864"), ("nofile", "1048576"))
"""For tensor parallelism: pinned memory, and what NCCL's authors ask of a container."""

_IMAGES = {"vllm": "vllm/vllm-openai:v{}", "sglang": "lmsysorg/sglang:v{}"}
"""The engines' own images, by version."""

_CPU_IMAGES = {"vllm": "public.ecr.aws/q9t5s3a7/vllm-cpu-release-repo:v{}"}
"""The same of a build for (x86) CPUs."""

_GPU_ENGINES = ("vllm", "sglang")


@dataclass(frozen=True)
class Mount:
    """A path of the machine, and where the container has it."""

    source: str
    target: str
    readonly: bool


@dataclass
class Workload:
    """What runs in a container.

    Args:
        name: of the service, a DNS label.
        image: with its tag or digest.
        program: what takes the place of the image's own entry point; empty: that stays.
        arguments: behind it.
        env: variables that are set; a word with a hole is a secret.
        files: path → text, present before the start.
        shm_size: docker's spelling; None: the runtime's default.
        gpus: None, "all", how many, or indices.
        notes: what a person must know before it starts.
    """

    name: str
    image: str
    port: int
    program: list[Word] = field(default_factory=list)
    arguments: list[Word] = field(default_factory=list)
    env: dict[str, Word] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    mounts: list[Mount] = field(default_factory=list)
    devices: list[str] = field(default_factory=list)
    gpus: str | int | list[int] | None = None
    shm_size: str | None = None
    ulimits: dict[str, str] = field(default_factory=dict)
    ipc_host: bool = False
    host_network: bool = False
    init: bool = True
    privileged: bool = False
    user: str = ""
    workdir: str = ""
    cap_add: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def secrets(self) -> list[str]:
        """Variables that a deployment must be given, sorted."""
        all_words = [*self.program, *self.arguments, *self.env.values()]
        return sorted({part.name for word in all_words for part in word if isinstance(part, Hole) and part.name})


def workload(record: LaunchRecord, study: str, options: Options, *, own_network: bool = False) -> Workload:
    """The workload of a record.

    A server that listened on loopback listens everywhere within its container; that is the one difference. With
    `own_network` that is so for a container of the host's network too, as a pod has a network of its own.

    Raises:
        UsageError: the record cannot be said in a container's format.
    """
    refuse(record)
    contained = record.container is not None
    made = _contained(record, study, own_network) if contained else _host(record, study, options)
    if tensor_parallel(record) > 1:
        made.shm_size = made.shm_size or (None if made.ipc_host else SHARED_MEMORY)
        made.ulimits = dict(ULIMITS) | made.ulimits
    bad = [name for name in made.env if not re.fullmatch(r"[-._a-zA-Z][-._a-zA-Z0-9]*", name)]
    if bad:
        raise UsageError(
            f"the launch record sets {bad[0]!r}, a name that a container's environment cannot have; "
            "--format shell can express it. Nothing was written."
        )
    return made


def _host(record: LaunchRecord, study: str, options: Options) -> Workload:
    """A launch that ran on the host: an image must be named that holds its program."""
    name = label(study)
    made = Workload(name, options.image or _image(record), record.port)
    said = _resolved(words(record), EVERYWHERE, record.port)
    removed = [variable for variable, value in record.env.items() if value is None]
    unset: list[Word] = [(word,) for variable in removed for word in ("-u", variable)]
    if record.engine in _IMAGES and "/" in record.argv[0]:
        program = record.argv[0].rpartition("/")[2]
        made.notes.append(f"It starts {program} of the image's PATH; the launch ran {plain(record.argv[0])}.")
        said[0] = (program,)
    made.program = [*([("env",), *unset] if unset else []), said[0]]
    made.arguments = said[1:]
    hidden = secret_env(record)
    for variable, value in record.env.items():
        if value is not None:
            made.env[variable] = (Hole("secret", hidden[variable]),) if variable in hidden else (value,)
    made.files = dict(record.files)
    made.mounts = [Mount(path, path, True) for path in options.mounts]
    made.workdir = record.cwd
    on_gpu = record.engine in _GPU_ENGINES and record.expected.get("device", "gpu") == "gpu"
    if on_gpu or (tensor_parallel(record) > 1 and record.engine == "command"):
        made.gpus = tensor_parallel(record)
    if options.image is None and record.engine not in _IMAGES:
        made.notes.append(
            f"The launch ran on the host, and no image of it is published: build {made.image} so that it holds "
            f"{plain(record.argv[0])}, or name yours with --image."
        )
    elif options.image is None:
        made.notes.append(f"The launch ran on the host; {made.image} is the engine's own image of the same version.")
    if made.mounts:
        made.notes.append(f"From this machine it mounts {', '.join(mount.source for mount in made.mounts)}.")
    return made


def _image(record: LaunchRecord) -> str:
    version, cpu = released(record.engine_version)
    images = _CPU_IMAGES if cpu else _IMAGES
    if record.engine in images and version:
        return images[record.engine].format(version)
    tag = re.sub(r"[^A-Za-z0-9_.-]+", "-", record.engine_version).strip("-.")[:128] or "unknown"
    return f"spec-tuner-{re.sub(r'[^a-z0-9]+', '-', record.engine.lower())}:{tag}"


def _resolved(said: list[Word], host: str, port: int) -> list[Word]:
    """The words with this address in their holes; those of secrets stay."""
    address = {"host": host, "port": str(port)}
    return [tuple(address.get(part.kind, part) if isinstance(part, Hole) else part for part in word) for word in said]


def _contained(record: LaunchRecord, study: str, own_network: bool) -> Workload:
    """A launch whose command is `docker run …`: the parts of that command, one by one."""
    assert record.container is not None
    made = Workload(label(study), record.container.image, record.port, init=False)
    at = record.argv.index(record.container.image, 2)
    on_host = record.container.network == "host"
    made.host_network = on_host and not own_network
    inner = replace(record, argv=("program", *record.argv[at + 1 :]), host=record.host if on_host else EVERYWHERE)
    made.arguments = _resolved(words(inner)[1:], record.host if made.host_network else EVERYWHERE, record.port)
    for flag, value in _flags(record.argv[2:at]):
        _apply(made, record, flag, value)
    made.files |= record.files
    own = set(record.files)
    made.mounts = [mount for mount in made.mounts if mount.target not in own]
    return made


_ALONE = frozenset(("--init", "--privileged"))
_NOT_OURS = frozenset(("--log-driver", "--pull", "--network", "--publish"))
_SHORT = {"-e": "--env", "-v": "--volume", "-u": "--user", "-w": "--workdir", "-m": "--memory", "-l": "--label"}


def _flags(arguments: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    rest = iter(arguments)
    for argument in rest:
        flag, equals, value = argument.partition("=")
        flag = _SHORT.get(flag, flag)
        yield flag, value if equals else "" if flag in _ALONE else next(rest, "")


def _apply(made: Workload, record: LaunchRecord, flag: str, value: str) -> None:
    if flag in _NOT_OURS:
        return
    if flag == "--env":
        name, equals, text = value.partition("=")
        if equals and text and (is_secret(name) or find(text)):
            made.env[name] = (Hole("secret", name),)
        elif equals:
            made.env[name] = (text,)
        elif name not in record.trial_env:
            made.env[name] = (Hole("secret", name),)
    elif flag == "--mount":
        made.mounts.append(_mount(value))
    elif flag == "--volume":
        source, target, *mode = value.split(":")
        made.mounts.append(Mount(source, target, mode == ["ro"]))
    elif flag == "--device" and value.startswith("nvidia.com/gpu="):
        name = value.partition("=")[2]
        made.gpus = name if name == "all" else [*(made.gpus if isinstance(made.gpus, list) else []), int(name)]
    elif flag == "--device":
        made.devices.append(value)
    elif flag == "--gpus":
        found = re.fullmatch(r'"device=([\d,]+)"', value)
        made.gpus = [int(index) for index in found[1].split(",")] if found else value
    elif flag == "--shm-size":
        made.shm_size = value
    elif flag == "--ulimit":
        name, _, limit = value.partition("=")
        made.ulimits[name] = limit
    elif flag == "--ipc" and value == "host":
        made.ipc_host = True
    elif flag == "--init":
        made.init = True
    elif flag == "--privileged":
        made.privileged = True
    elif flag == "--cap-add":
        made.cap_add.append(value)
    elif flag == "--user":
        made.user = value
    elif flag == "--workdir":
        made.workdir = value
    elif flag == "--entrypoint":
        made.program = [(value,)]
    else:
        raise UsageError(
            f"{flag} of container.run_args cannot be said in this format; --format shell keeps the whole command. "
            "Nothing was written."
        )


def _mount(value: str) -> Mount:
    parts = dict(part.partition("=")[::2] for part in value.split(","))
    return Mount(parts.get("source", ""), parts.get("target", ""), "readonly" in parts)


PROBE = """\
if command -v curl >/dev/null 2>&1; then
  exec curl -fsS -m 25 -o /dev/null -H 'content-type: application/json' ${4:+-H "authorization: Bearer $4"} -d "$3" "$2"
fi
exec "$(command -v python3 || command -v python)" -c '
import sys, urllib.request as u
url, body, *key = sys.argv[1:]
head = {"content-type": "application/json", **({"authorization": "Bearer " + key[0]} if key and key[0] else {})}
u.urlopen(u.Request(url, body.encode(), head), timeout=25).read()' "$2" "$3" "${4-}"
"""
"""A real completion of one token, by curl or else by Python. Its words: a name, URL, body, and a key or nothing."""


def probe(record: LaunchRecord, port: int, key: str | None) -> list[str]:
    """The command of a probe that makes a token; `key` is a variable of the container that holds the API key."""
    body = json.dumps({"model": record.served_model, "prompt": "1 2 3", "max_tokens": 1}, ensure_ascii=False)
    url = f"http://127.0.0.1:{port}/v1/completions"
    script = PROBE if key is None else f'set -- "$1" "$2" "$3" "${{{key}-}}"\n{PROBE}'
    return ["sh", "-c", script, "sh", "probe", url, body]


def key_variable(made: Workload) -> str | None:
    """The variable that holds the key of the server's API, where the deployment has one."""
    named = [name for name in made.secrets if re.search(r"(?:^|_)API_KEY$", name)]
    return named[0] if len(named) == 1 else None
