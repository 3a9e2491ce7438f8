"""Containers: asking docker or podman, and the one container of a launch from its start to its removal.

A container is known by the id that its runtime gives it and by the label that carries our marker, never by a name. Its
processes are children of the runtime: they are looked at (for progress, and for who listens on the port), and never
signalled by us.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from tuner.errors import EnvironmentBroken
from tuner.launch.processes import TICKS, Process, descendants, snapshot, wait_until
from tuner.records import ContainerRef, LaunchRecord

LABEL = "spec-tuner.marker"
RUNTIMES = ("docker", "podman")
_ASK_S = 20.0
_STARTED_SLACK_S = 5.0
"""How far the runtime's word for when a container started may lie from when its process did."""

_RUNTIME_STATUS = (125, 126, 127)
"""With which `docker run` ends when the container could not be made, or its command not be started."""


class Answer(NamedTuple):
    """What a runtime's command came to."""

    status: int
    out: str
    error: str

    @property
    def said(self) -> str:
        """Its first words about what went wrong."""
        return next((line.strip() for line in (self.error or self.out).splitlines() if line.strip()), "nothing")


@dataclass(frozen=True)
class State:
    """A container at one moment, by `inspect`. `pid` is that of its first process on this machine; 0: none."""

    id: str
    running: bool
    pid: int
    exit_code: int
    oom_killed: bool
    error: str
    started_at: float
    marker: str
    ports: frozenset[int]


@dataclass(frozen=True)
class Image:
    """An image that is here: its name by digest, and the variables that it sets."""

    pinned: str
    variables: frozenset[str]


def ask(runtime: str, *arguments: str, timeout_s: float = _ASK_S) -> Answer:
    """One command of a runtime; status -1 when it is not there or does not answer in time."""
    program = shutil.which(runtime)
    if program is None:
        return Answer(-1, "", f"{runtime} is not installed, or not on the PATH")
    try:
        done = subprocess.run(
            [program, *arguments], capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return Answer(-1, "", f"{runtime} {arguments[0]} did not answer in {timeout_s:g} s")
    except OSError as error:
        return Answer(-1, "", f"{runtime} cannot be started: {error.strerror}")
    return Answer(done.returncode, done.stdout, done.stderr)


def version(runtime: str) -> str:
    """Of the runtime that answers.

    Raises:
        EnvironmentBroken: it is not installed, or its daemon is not up or may not be used.
    """
    side = "Server" if runtime == "docker" else "Client"
    answer = ask(runtime, "version", "--format", f"{{{{.{side}.Version}}}}")
    if answer.status != 0:
        raise EnvironmentBroken(
            f"containers cannot be started with {runtime}: {answer.said}. Nothing was started; see to it that "
            f"`{runtime} version` works for this user"
        )
    return answer.out.strip()


def image(runtime: str, name: str) -> Image:
    """An image that is on this machine.

    Raises:
        EnvironmentBroken: it is not, or the runtime does not answer. Pulling gigabytes is left to the user.
    """
    version(runtime)
    answer = ask(runtime, "image", "inspect", name)
    try:
        found = json.loads(answer.out)[0] if answer.status == 0 else None
    except (ValueError, IndexError):
        found = None
    if found is None:
        raise EnvironmentBroken(
            f"{runtime} has no image '{name}' ({answer.said}). Nothing was started; get it with: {runtime} pull {name}"
        )
    return Image(_pinned(name, found), frozenset(entry.partition("=")[0] for entry in _variables(found)))


def said_by(runtime: str, arguments: Sequence[str], timeout_s: float) -> str:
    """What a container says that is made for this alone, without a network, and removed again.

    Args:
        runtime: docker or podman.
        arguments: of its `run`, from the image's options to the command in it.
        timeout_s: when it is ended.

    Raises:
        EnvironmentBroken: it could not be started, or did not end in time.
    """
    with tempfile.TemporaryDirectory(prefix="spec-tuner-") as folder:
        cid = Path(folder) / "cid"
        own = ("--rm", "--pull=never", "--network", "none", "--cidfile", str(cid))
        answer = ask(runtime, "run", *own, *arguments, timeout_s=timeout_s)
        if answer.status < 0 and cid.exists():
            remove(runtime, cid.read_text().strip())
    if answer.status in (-1, *_RUNTIME_STATUS):
        raise EnvironmentBroken(answer.said)
    return answer.out if answer.out.strip() else answer.error


def _pinned(name: str, found: dict[str, Any]) -> str:
    if "@" in name:
        return name
    digests = [str(digest) for digest in found.get("RepoDigests") or ()]
    colon = name.rfind(":")
    repository = name[:colon] if colon > name.rfind("/") else name
    # A registry's default may stand in front of what the user wrote.
    same = [d for d in digests if d.partition("@")[0] == repository or d.partition("@")[0].endswith(f"/{repository}")]
    return (same or digests or [str(found.get("Id", name))])[0]


def _variables(found: dict[str, Any]) -> list[str]:
    config = found.get("Config") or {}
    return [str(entry) for entry in config.get("Env") or ()]


def marked(runtime: str, marker_prefix: str) -> list[State]:
    """The containers, stopped ones too, whose label begins so; empty where the runtime does not answer.

    Raises:
        ValueError: for an empty prefix, which would match the servers of every study.
    """
    if not marker_prefix:
        raise ValueError("a marker prefix is needed: an empty one would match every study's containers")
    return [state for state in everything(runtime) if state.marker.startswith(marker_prefix)]


def everything(runtime: str) -> list[State]:
    """Every container with our label, stopped ones too; empty where the runtime does not answer."""
    listed = ask(runtime, "ps", "--all", "--quiet", "--no-trunc", "--filter", f"label={LABEL}")
    ids = listed.out.split() if listed.status == 0 else []
    return _inspected(runtime, *ids) if ids else []


def state_of(runtime: str, container: str) -> State | None:
    """A container by its id; None when there is none, or the runtime does not answer."""
    return next(iter(_inspected(runtime, container)), None)


def _inspected(runtime: str, *ids: str) -> list[State]:
    answer = ask(runtime, "container", "inspect", *ids)
    try:
        found = json.loads(answer.out or "[]")
    except ValueError:
        return []
    return [_state(entry) for entry in found if isinstance(entry, dict)]


def _state(entry: dict[str, Any]) -> State:
    state, config = entry.get("State") or {}, entry.get("Config") or {}
    published = (entry.get("NetworkSettings") or {}).get("Ports") or {}
    ports = {int(one["HostPort"]) for many in published.values() for one in many or () if one.get("HostPort")}
    return State(
        id=str(entry.get("Id", "")),
        running=bool(state.get("Running")),
        pid=int(state.get("Pid") or 0),
        exit_code=int(state.get("ExitCode") or 0),
        oom_killed=bool(state.get("OOMKilled")),
        error=str(state.get("Error") or ""),
        started_at=_seconds(str(state.get("StartedAt") or "")),
        marker=str((config.get("Labels") or {}).get(LABEL, "")),
        ports=frozenset(ports),
    )


def _seconds(text: str) -> float:
    """An RFC 3339 time as seconds since the epoch; 0 when it is none, or that of the year 1, which means never.

    Runtimes write nanoseconds.
    """
    whole, point, rest = text.partition(".")
    digits = "".join(c for c in rest if c.isdigit() or c in "+-:Z").replace("Z", "+00:00")
    if point:
        cut = min((digits.find(sign) for sign in "+-" if sign in digits), default=len(digits))
        text = f"{whole}.{digits[:cut][:6]}{digits[cut:] or '+00:00'}"
    try:
        return max(0.0, datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp())
    except ValueError:
        return 0.0


def end(runtime: str, container: str, grace_s: float, gone_s: float = 20.0) -> bool:
    """SIGTERM, SIGKILL after the grace time, removal; waits until there is no such container. Whether it is gone."""
    ask(runtime, "stop", "-t", str(max(1, round(grace_s))), container, timeout_s=grace_s + _ASK_S)
    return remove(runtime, container, gone_s)


def remove(runtime: str, container: str, gone_s: float = 20.0) -> bool:
    """Kills and removes at once. Whether it is gone."""

    def gone() -> bool:
        if runtime == "podman":
            # Its `rm` gives a container that runs the usual grace time first.
            ask(runtime, "kill", container)
        answer = ask(runtime, "rm", "--force", container)
        # Without an answer nothing is known, and a container that cannot be asked for is not gone.
        return answer.status >= 0 and _missing(runtime, container)

    return wait_until(gone, gone_s, poll_s=0.2)


def _missing(runtime: str, container: str) -> bool:
    answer = ask(runtime, "container", "inspect", container)
    return answer.status > 0 and "no such container" in answer.error.lower()


def reap(marker_prefix: str, runtimes: tuple[str, ...] = RUNTIMES, grace_s: float = 3.0) -> tuple[list[str], list[str]]:
    """Ends every container whose label begins so: ids that were found, and ids that could not be removed."""
    found, left = [], []
    for runtime in runtimes:
        for state in marked(runtime, marker_prefix):
            found.append(state.id)
            if not end(runtime, state.id, grace_s):
                left.append(state.id)
    return found, left


class LaunchContainer:
    """The container of one launch.

    Args:
        ref: of the launch record.
        marker: of the launch; its nonce makes the label unique.
        cidfile: where the runtime writes the id; replaced when it exists.
    """

    def __init__(self, ref: ContainerRef, marker: str, cidfile: Path) -> None:
        self.ref = ref
        self.marker = marker
        self._cidfile = cidfile
        self._folder = cidfile.with_suffix(".run")
        self._id = ""
        self._last: State | None = None
        cidfile.unlink(missing_ok=True)

    def command(self, record: LaunchRecord) -> tuple[str, ...]:
        """The record's command with what is of this launch alone: where its id goes, and our label."""
        mine = ("--cidfile", str(self._cidfile), "--label", f"{LABEL}={self.marker}")
        return (*record.argv[:2], *mine, *record.argv[2:])

    def folder(self, record: LaunchRecord) -> Path | None:
        """Where its client runs, None for the tuner's own folder: that of a runtime with a daemon, or of a command that
        names something there.

        podman's monitor leaves a file called `oom` where it was started when memory runs out.

        Raises:
            OSError: the folder cannot be made.
        """
        named = [part for word in record.argv[1:] for part in (word, word.partition("=")[2])]
        if self.ref.runtime != "podman" or any(
            part and not part.startswith("/") and Path(part).exists() for part in named
        ):
            return None
        self._folder.mkdir(exist_ok=True)
        return self._folder

    @property
    def id(self) -> str:
        """Its id; "" while there is none yet."""
        if not self._id:
            try:
                self._id = self._cidfile.read_text().strip()
            except OSError:
                return ""
        return self._id

    def state(self) -> State | None:
        """As it is now; the last that was known when there is no answer."""
        if self.id and (state := state_of(self.ref.runtime, self.id)) is not None:
            self._last = state
        return self._last

    def processes(self) -> list[Process]:
        """Its processes as far as they can be seen here: none where the runtime has a machine of its own."""
        state = self._last if self._last is not None and self._last.running else self.state()
        if state is None or not state.pid:
            return []
        processes = snapshot()
        first = processes.get(state.pid)
        if first is None or abs(_started(first) - state.started_at) > _STARTED_SLACK_S:
            return []  # that number is another process's, here
        found = descendants([state.pid], processes)
        return [processes[pid] for pid in sorted(found) if not processes[pid].zombie]

    def ended_by_runtime(self, exit_status: int | None) -> str:
        """What kept the container from running at all, in the runtime's words; "" when it ran."""
        state = self.state()
        if state is not None and state.error:
            return state.error
        never_ran = state is None or not state.started_at
        return "the container could not be started" if exit_status in _RUNTIME_STATUS and never_ran else ""

    def end(self, grace_s: float, gone_s: float) -> tuple[bool, tuple[str, ...]]:
        """Ends and removes it: whether it needed SIGKILL, and its id when it is still there."""
        if not self.id:
            return False, ()
        began, before = time.monotonic(), self.state()
        ask(self.ref.runtime, "stop", "-t", str(max(1, round(grace_s))), self.id, timeout_s=grace_s + _ASK_S)
        waited = time.monotonic() - began
        after = self.state()
        escalated = bool(before and before.running and after and after.exit_code == 137 and waited >= grace_s)
        return escalated, () if remove(self.ref.runtime, self.id, gone_s) else (self.id,)

    def sweep(self, gone_s: float) -> tuple[str, ...]:
        """Removes whatever still carries the label: a client that was killed may have left its container half made.

        Returns the ids that could not be removed.
        """
        found = marked(self.ref.runtime, self.marker)
        left = tuple(state.id for state in found if not remove(self.ref.runtime, state.id, gone_s))
        if self._folder.is_dir():
            shutil.rmtree(self._folder, ignore_errors=True)
        return left


def _started(process: Process) -> float:
    """When a process began, in seconds since the epoch."""
    try:
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError):
        return 0.0
    return time.time() - uptime + process.started / TICKS
