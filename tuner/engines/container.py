"""A server in a container: the whole `docker run …` command around its own, and what cannot be in it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from tuner.records import ContainerRef, LaunchRecord
from tuner.secrets import is_secret

EVERYWHERE = "0.0.0.0"
"""Where a server listens that is reached through a published port."""

OURS = {
    "--cidfile": "the tuner finds its containers by it",
    "--name": "the tuner finds its containers by their id, and a second one of the name could not start",
    "--rm": "how a container ended is read after its end, and then the tuner removes it",
    "--restart": "a server that ends must stay ended",
    "--detach": "the log comes through the attached client",
    "-d": "the log comes through the attached client",
    "--log-driver": "the log comes through the attached client, and is kept once",
    "--pull": "an image is pulled before a study, not within it",
    "--network": "it is container.network",
    "--net": "it is container.network",
    "--init": "it is container.init",
    "--shm-size": "it is container.shm_size",
    "--gpus": "it is container.gpus",
    "--publish": "the tuner publishes the port of the server",
    "-p": "the tuner publishes the port of the server",
    "--publish-all": "the tuner publishes the port of the server",
    "-P": "the tuner publishes the port of the server",
    "--sig-proxy": "the tuner ends its containers itself",
    "--tty": "there is no terminal",
    "-t": "there is no terminal",
    "--interactive": "there is no terminal",
    "-i": "there is no terminal",
}
"""Arguments of `docker run` that are the tuner's, and why."""

_TOGETHER = re.compile(r"-[ditqP]{2,}")
"""Short arguments without a value, written as one."""

_SIZE = re.compile(r"[1-9]\d*[bkmg]?", re.IGNORECASE)


class Container(Protocol):
    """What a space file says of a container; `tuner.space.schema.ContainerSection` documents it."""

    @property
    def runtime(self) -> str:
        """docker or podman."""

    @property
    def image(self) -> str:
        """Its name."""

    @property
    def mounts(self) -> list[str]:
        """HOST:CONTAINER or HOST:CONTAINER:ro."""

    @property
    def gpus(self) -> str | list[int] | None:
        """All, or indices."""

    @property
    def devices(self) -> list[str]:
        """Paths of device files."""

    @property
    def shm_size(self) -> str | None:
        """Size of its /dev/shm."""

    @property
    def network(self) -> str:
        """host or bridge."""

    @property
    def init(self) -> bool:
        """Whether an init process passes signals on and reaps."""

    @property
    def run_args(self) -> list[str]:
        """Further arguments of the user's."""


def container_problems(kind: str, container: Container) -> list[tuple[tuple[str | int, ...], str]]:
    """What is wrong with a container section: (where in it, a sentence)."""
    return [*_problems(kind, container)]


def _problems(kind: str, container: Container) -> Iterator[tuple[tuple[str | int, ...], str]]:
    if kind == "bundled":
        yield (), "the bundled engine runs on the interpreter of the tuner; in a container, it is a kind: command"
    if not container.image.strip() or container.image.startswith("-") or re.search(r"\s", container.image):
        yield ("image",), f"'{container.image}' is not the name of an image"
    for i, mount in enumerate(container.mounts):
        if problem := _mount_problem(mount):
            yield ("mounts", i), problem
    if isinstance(container.gpus, list):
        if not container.gpus:
            yield ("gpus",), "lists none; give indices, or all, or leave it out"
        if any(index < 0 for index in container.gpus) or len(set(container.gpus)) < len(container.gpus):
            yield ("gpus",), f"{container.gpus} are not indices of GPUs, each once"
    for i, device in enumerate(container.devices):
        if not device.startswith("/"):
            yield ("devices", i), f"'{device}' is not the path of a device, which begins with '/'"
    if container.shm_size is not None and not _SIZE.fullmatch(container.shm_size):
        yield ("shm_size",), f"'{container.shm_size}' is not a size; a number with k, m or g, such as 32g"
    yield from _run_arg_problems(container)


def _mount_problem(mount: str) -> str | None:
    host, _, rest = mount.partition(":")
    inside, _, mode = rest.partition(":")
    if not host.startswith("/") or not inside.startswith("/") or mode not in ("", "ro", "rw"):
        return f"'{mount}' is not HOST:CONTAINER or HOST:CONTAINER:ro, with whole paths on both sides"
    if "," in mount or '"' in mount:
        return f"'{mount}' holds a comma or a quote, which a mount cannot"
    return None if os.path.exists(host) else f"{host} does not exist; nothing would be mounted"


def _run_arg_problems(container: Container) -> Iterator[tuple[tuple[str | int, ...], str]]:
    for i, argument in enumerate(container.run_args):
        flag = argument.partition("=")[0]
        where = ("run_args", i)
        before = container.run_args[i - 1] if i else ""
        letters = [f"-{letter}" for letter in argument[1:]] if _TOGETHER.fullmatch(argument) else [flag]
        if ours := next((letter for letter in letters if letter in OURS), None):
            yield where, f"{ours} is the tuner's own: {OURS[ours]}"
        elif i == 0 and not argument.startswith("-"):
            yield where, f"'{argument}' would be taken for the image; further arguments begin with '-'"
        if container.shm_size is not None and (argument == "--ipc=host" or (before, argument) == ("--ipc", "host")):
            yield where, "with --ipc host there is one /dev/shm, that of this machine: shm_size would change nothing"
        text = argument.partition("=")[2] if flag in ("--env", "-e") else argument
        name, given, _ = text.partition("=")
        if given and re.fullmatch(r"[A-Za-z_]\w*", name) and is_secret(name):
            yield (
                where,
                f"{name} looks like a secret, and a study keeps what it is given; give its name alone: -e {name}",
            )


def contained(record: LaunchRecord, container: Container, image: str, pass_on: Sequence[str] = ()) -> LaunchRecord:
    """The record of the same server in a container.

    Args:
        record: whose command is that within the image, for the host that `listens_on` gives.
        image: named by digest, so that a tag that moves changes nothing.
        pass_on: variables that the container gets from the tuner's environment, by name: their values stand nowhere.
    """
    argv = [container.runtime, "run", "--log-driver", "none", "--pull=never"]
    argv += ["--init"] if container.init else []
    argv += ["--network", container.network]
    host = record.host
    if container.network == "bridge":
        host = "127.0.0.1"
        argv += ["--publish", f"{host}:{record.port}:{record.port}"]
    argv += ["--shm-size", container.shm_size] if container.shm_size else []
    argv += _gpus(container)
    for device in container.devices:
        argv += ["--device", device]
    for mount in container.mounts:
        argv += ["--mount", _mount(mount)]
    argv += _variables(record.env, container.runtime)
    for path in record.files:
        argv += ["--mount", f"type=bind,source={path},target={path},readonly"]
    # By name alone: the value comes with the launch, so that an export of the command does not carry it.
    for name in (*pass_on, *record.trial_env):
        argv += ["--env", name]
    argv += [*container.run_args, image, *record.argv]
    ref = ContainerRef(container.runtime, image, container.network)
    return replace(record, argv=tuple(argv), env={}, host=host, container=ref)


def asking(container: Container, image: str, command: Sequence[str]) -> list[str]:
    """The arguments of `run` with which a command of the image is asked something, as a server in it is started."""
    argv = _gpus(container)
    for device in container.devices:
        argv += ["--device", device]
    for mount in container.mounts:
        argv += ["--mount", _mount(mount)]
    return [*argv, *container.run_args, image, *command]


def listens_on(container: Container | None, host: str) -> str:
    """The address that a server is told to listen on, to be reached at `host`."""
    return EVERYWHERE if container is not None and container.network == "bridge" else host


def _gpus(container: Container) -> list[str]:
    if container.gpus is None:
        return []
    if container.runtime == "podman":
        names = [container.gpus] if isinstance(container.gpus, str) else container.gpus
        return [word for name in names for word in ("--device", f"nvidia.com/gpu={name}")]
    if isinstance(container.gpus, str):
        return ["--gpus", container.gpus]
    # The value is a CSV row: without quotes the second index would be another field.
    return ["--gpus", f'"device={",".join(map(str, container.gpus))}"']


def _mount(mount: str) -> str:
    host, inside, *mode = mount.split(":")
    return f"type=bind,source={host},target={inside}" + (",readonly" if mode == ["ro"] else "")


def _variables(env: Mapping[str, str | None], runtime: str) -> list[str]:
    """Only what is named reaches a container; what the image sets can be removed by podman alone."""
    argv: list[str] = []
    for name, value in env.items():
        if value is not None:
            argv += ["--env", f"{name}={value}"]
        elif runtime == "podman":
            argv += ["--unsetenv", name]
    return argv
