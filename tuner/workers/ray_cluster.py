"""Ray: which nodes there are, a worker's process on one of them, and what it says until its end.

A worker is an actor that has its GPUs and cores to itself for as long as it lives. Within it runs an ordinary tuner, as
a process of its own: it has the environment in which the node was started, not that of Ray's processes, and is told
what it needs (secrets among it) through a pipe. When the pipe breaks it ends in order, whatever became of Ray.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner import __version__
from tuner.errors import EnvironmentBroken, UsageError
from tuner.workers.rooms import Node, Room

PROGRAM = "tuner.cli.worker"
"""What runs in a worker's process; `python -m` starts it."""


@dataclass(frozen=True)
class Placed:
    """A worker has its GPUs: `devices` are their names, none where it takes none."""

    room: Room
    devices: tuple[str, ...]


@dataclass(frozen=True)
class Said:
    """A line that a worker has written."""

    room: Room
    line: str


@dataclass(frozen=True)
class Log:
    """The log of a launch on another host, whole: its path below the folder in which the study runs."""

    room: Room
    path: str
    content: bytes


@dataclass(frozen=True)
class Ended:
    """A worker has ended by itself, with this status."""

    room: Room
    status: int


@dataclass(frozen=True)
class Lost:
    """A worker, or the node that it was on, is gone."""

    room: Room
    why: str


Happening = Placed | Said | Log | Ended | Lost


class RayCluster:
    """A connection to a Ray cluster. Use `connected`."""

    def __init__(self, ray: Any) -> None:
        self.happenings: queue.Queue[Happening] = queue.Queue()
        self._ray = ray
        self._actors: dict[Room, Any] = {}
        self._class = ray.remote(max_concurrency=4, max_restarts=0, max_task_retries=0)(Worker)

    def nodes(self) -> list[Node]:
        """The nodes that are alive."""
        found = []
        for node in self._ray.nodes():
            if node.get("Alive"):
                has = node.get("Resources", {})
                gpus, cpus = int(has.get("GPU", 0)), int(has.get("CPU", 0))
                found.append(Node(node["NodeID"], node["NodeManagerHostname"], gpus, cpus))
        return found

    def start(self, room: Room, task: Mapping[str, Any]) -> None:
        """Starts a worker in a room, as soon as Ray has its GPUs and cores free; `happenings` tells of it."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = NodeAffinitySchedulingStrategy(room.node, soft=False)
        actor = self._class.options(num_gpus=room.gpus, num_cpus=room.cpus, scheduling_strategy=there).remote()
        self._actors[room] = actor
        threading.Thread(target=self._follow, args=(room, actor, dict(task)), daemon=True, name=room.name).start()

    def stop(self, room: Room) -> None:
        """Asks a worker to end in order; it is not waited for. One that has not been placed yet is withdrawn."""
        actor = self._actors.get(room)
        if actor is not None:
            actor.stop.remote()

    def kill(self, room: Room) -> None:
        """Ends a worker's actor; its tuner notices, and ends in order by itself."""
        actor = self._actors.pop(room, None)
        if actor is not None:
            with suppress(Exception):
                self._ray.kill(actor)

    def _follow(self, room: Room, actor: Any, task: dict[str, Any]) -> None:
        try:
            devices = tuple(self._ray.get(actor.devices.remote()))
            self.happenings.put(Placed(room, devices))
            for reference in actor.work.options(num_returns="streaming").remote(task):
                kind, value = self._ray.get(reference)
                if kind == "end":
                    self.happenings.put(Ended(room, value))
                    return
                self.happenings.put(Said(room, value) if kind == "line" else Log(room, *value))
            self.happenings.put(Lost(room, "it ended without a word"))
        except Exception as error:  # noqa: BLE001 - of a thread: whatever it is, the worker is gone, and it is told
            self.happenings.put(Lost(room, first_line(error)))
        finally:
            self._actors.pop(room, None)
            with suppress(Exception):
                self._ray.kill(actor)  # so that its GPUs are free again


def first_line(error: BaseException) -> str:
    """What an error of Ray's says, without the traceback and the tables that it prints with it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[0] if lines else ""
    return f"{type(error).__name__}: {said[:300]}" if said else type(error).__name__


@contextmanager
def connected() -> Iterator[RayCluster]:
    """The cluster that `RAY_ADDRESS` names, else the one that runs on this host.

    Raises:
        UsageError: Ray is not installed.
        EnvironmentBroken: the cluster cannot be reached.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise UsageError(
            f"Ray is not installed ({error}). Nothing was started; install it with: pip install 'spec-tuner[ray]'"
        ) from None
    try:
        ray.init(address="auto", logging_level=logging.ERROR, log_to_driver=False, namespace="spec-tuner")
    except Exception as error:  # noqa: BLE001 - Ray raises its own, gRPC's, and plain ones: all mean the same here
        address = os.environ.get("RAY_ADDRESS")
        where = f"at {address} " if address else ""
        raise EnvironmentBroken(
            f"the Ray cluster {where}cannot be reached: {first_line(error)}. Nothing was started; start one with "
            "'ray start --head', and name it in RAY_ADDRESS where it is not of this host"
        ) from None
    try:
        yield RayCluster(ray)
    finally:
        ray.shutdown()


class Worker:
    """The actor: starts the tuner on its node, passes on what it says, and ends it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._stopped = False

    def devices(self) -> list[str]:
        """The names of the GPUs that Ray has given it."""
        import ray

        return [str(each) for each in ray.get_runtime_context().get_accelerator_ids().get("GPU", [])]

    def work(self, task: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        """Runs the tuner; yields ("line", text) for each line, ("log", (path, bytes)), and ("end", status) at last."""
        if task["version"] != __version__:
            yield "line", f"this node has spec-tuner {__version__}, and the study is run by {task['version']}"
            yield "end", 3
            return
        began = time.time()
        devices = self.devices()
        # Ray ends the children of an actor that is gone at once, without a chance to stop their servers: the shell
        # between is such a child, and the tuner, which notices by itself, is none.
        command = ["/bin/sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-m", PROGRAM]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment_of_node(),
            start_new_session=True,
            text=True,
            errors="replace",
        )
        self._process = process
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps({**task, "devices": devices}) + "\n")
            process.stdin.flush()
        if self._stopped:
            self.stop()
        folder = Path()
        for line in process.stdout:
            if line.startswith(FOLDER):
                folder = Path(line.removeprefix(FOLDER).strip())
                continue
            yield "line", line.rstrip("\n")
        status = process.wait()
        if task["host"] != os.uname().nodename:
            yield from ((("log", each)) for each in _logs(folder, task["study"], began))
        yield "end", status

    def stop(self) -> None:
        """Ends the tuner in order: the pipe breaks by which it is told to go on."""
        self._stopped = True
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError, ValueError):
                self._process.stdin.close()


FOLDER = "spec-tuner-folder: "
"""Begins the line in which a worker's process says in which folder it works."""

MOST_OF_A_LOG = 4 << 20
"""Bytes of a log that are brought back: its beginning is on its host."""


def _logs(folder: Path, study: str, since: float) -> Iterator[tuple[str, bytes]]:
    """The logs of launches that were written there since then."""
    for path in sorted((folder / "studies" / study / "logs").glob("launch-*.log")):
        with suppress(OSError):
            if path.stat().st_mtime >= since:
                yield path.relative_to(folder).as_posix(), path.read_bytes()[-MOST_OF_A_LOG:]


def environment_of_node() -> dict[str, str]:
    """The environment in which this node's Ray was started, without what Ray has added for its own processes.

    A server is measured as it would run without Ray: with the user's number of threads, for instance, not with Ray's.
    """
    try:
        raw = Path(f"/proc/{os.environ['RAY_RAYLET_PID']}/environ").read_bytes()
        found = dict(os.fsdecode(entry).split("=", 1) for entry in raw.split(b"\0") if b"=" in entry)
    except (KeyError, OSError):
        found = dict(os.environ)
        for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "PYTHONBREAKPOINT"):
            found.pop(name, None)
    preloaded = [each for each in found.pop("LD_PRELOAD", "").split(":") if each and "/ray/core/" not in each]
    if preloaded:
        found["LD_PRELOAD"] = ":".join(preloaded)
    return {name: value for name, value in found.items() if not name.startswith("RAY_")}
