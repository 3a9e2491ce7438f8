"""Keeps the rooms of a cluster filled with workers of one study until the study ends, or none can work on."""

from __future__ import annotations

import queue
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from tuner.errors import EnvironmentBroken, StudyStopped, TunerError, UsageError
from tuner.workers.ray_cluster import Ended, Happening, Log, Lost, Placed, Said
from tuner.workers.rooms import Needs, Node, Room, require_room, rooms

LOOK_EVERY_S = 5.0
"""How often the cluster is asked for nodes that have come or gone."""

STOP_S = 180.0
"""How long workers may take to end in order: a server is stopped, what was measured is written."""

MOST_DEATHS = 3
"""So often a worker is begun anew in one room."""

SIGNALLED = 128
"""A status from here on means that a signal has ended the process: nobody decided that it should."""


class Cluster(Protocol):
    """What a cluster does for us."""

    happenings: queue.Queue[Happening]

    def nodes(self) -> list[Node]:
        """The nodes that are alive."""

    def start(self, room: Room, task: Mapping[str, Any]) -> None:
        """Starts a worker."""

    def stop(self, room: Room) -> None:
        """Asks it to end in order."""

    def kill(self, room: Room) -> None:
        """Ends it."""


@dataclass
class Drive:
    """One study's workers.

    Args:
        cluster: where they run.
        needs: what each takes.
        first: the task of the first worker, which makes the study or changes its budget.
        later: the task of every other one.
        state: what the study is doing; "" while there is none, or while its database cannot be asked.
        said: told of every line of a worker's: its place or room, the line.
        tell: told what happens to workers, in sentences.
        log: given a launch's log of another host.
    """

    cluster: Cluster
    needs: Needs
    first: Mapping[str, Any]
    later: Mapping[str, Any]
    state: Callable[[], str]
    said: Callable[[str, str], None]
    tell: Callable[[str], None]
    log: Callable[[str, bytes], None] = lambda _path, _content: None
    busy: dict[Room, str] = field(default_factory=dict)
    """Rooms with a worker, and the names of their places; "" of one that waits for its GPUs."""

    given_up: dict[Room, int] = field(default_factory=dict)
    """Rooms in which no further worker is begun, and the status with which the last one ended."""

    deaths: Counter[Room] = field(default_factory=Counter)
    last_words: dict[Room, str] = field(default_factory=dict)
    begun: bool = False
    """Whether the first worker has come so far that others can join it."""

    ended: bool = False

    def run(self) -> None:
        """Until the study has ended.

        Raises:
            UsageError, StudyStopped, EnvironmentBroken: no worker is left, and the study has not ended.
        """
        try:
            require_room(self.cluster.nodes(), self.needs)
            looked = 0.0
            while True:
                if time.monotonic() - looked >= LOOK_EVERY_S or not self.busy:
                    self._fill()
                    looked = time.monotonic()
                if not self.busy:
                    break
                self._next(1.0)
        except BaseException:
            self._stop_all()
            raise
        if self.state() != "done":
            raise self._why()

    def _fill(self) -> None:
        if self.ended:
            return
        for room in rooms(self.cluster.nodes(), self.needs):
            if room in self.busy or room in self.given_up:
                continue
            self.begun = self.begun or (bool(self.busy) and self.state() == "running")
            if self.busy and not self.begun:
                return  # the first worker makes the study, or changes its budget; the others come to it
            self.cluster.start(room, self.later if self.begun else self.first)
            self.busy[room] = ""

    def _next(self, timeout_s: float) -> None:
        try:
            happening = self.cluster.happenings.get(timeout=timeout_s)
        except queue.Empty:
            return
        room = happening.room
        if isinstance(happening, Placed):
            self.busy[room] = f"{room.host}/{','.join(happening.devices)}" if happening.devices else room.host
            self.tell(f"a worker begins at {self.busy[room]}")
        elif isinstance(happening, Said):
            self.last_words[room] = happening.line or self.last_words.get(room, "")
            self.said(self._name(room), happening.line)
        elif isinstance(happening, Log):
            self.log(happening.path, happening.content)
        else:
            self._over(happening)

    def _over(self, happening: Ended | Lost) -> None:
        room, name = happening.room, self._name(happening.room)
        self.begun = self.begun or self.state() == "running"
        self.busy.pop(room, None)
        if isinstance(happening, Ended) and happening.status < SIGNALLED:
            self.given_up[room] = happening.status
            if happening.status == 0:
                self.ended = True
                return
            self.tell(f"the worker at {name} has ended with {happening.status}: nothing more is started there")
            if not self.begun and happening.status == UsageError.exit_code:
                self.ended = True  # what it was told is wrong, and so it would be everywhere
            return
        why = f"signal {happening.status - SIGNALLED}" if isinstance(happening, Ended) else happening.why
        self.deaths[room] += 1
        said = f"the worker at {name} is gone ({why}). What it has measured is kept, and its candidate is measured anew"
        if self.deaths[room] >= MOST_DEATHS:
            self.given_up[room] = EnvironmentBroken.exit_code
            said += f"; it was the {self.deaths[room]}rd time, and nothing more is started there"
        self.tell(said)

    def _name(self, room: Room) -> str:
        return self.busy.get(room) or room.name

    def _stop_all(self) -> None:
        """Every worker ends in order; those that do not in time are killed, and end by themselves."""
        waiting = [room for room, place in self.busy.items() if not place]
        for room in waiting:
            self.cluster.kill(room)
            self.busy.pop(room)
        if self.busy:
            self.tell(f"stopping {len(self.busy)} worker{'s' * (len(self.busy) != 1)} and their servers")
        for room in self.busy:
            self.cluster.stop(room)
        deadline = time.monotonic() + STOP_S
        while self.busy and time.monotonic() < deadline:
            try:
                happening = self.cluster.happenings.get(timeout=1.0)
            except queue.Empty:
                continue
            if isinstance(happening, (Ended, Lost)):
                self.busy.pop(happening.room, None)
            elif isinstance(happening, Log):
                self.log(happening.path, happening.content)
        for room, place in self.busy.items():
            self.tell(f"the worker at {place} has not ended within {STOP_S:.0f} s and is left to end by itself")
            self.cluster.kill(room)

    def _why(self) -> TunerError:
        kinds: dict[int, type[TunerError]] = {2: UsageError, 3: EnvironmentBroken}
        status = next(reversed(self.given_up.values()), EnvironmentBroken.exit_code)
        words = [f"{self._name(room)}: {self.last_words[room]}" for room in self.given_up if room in self.last_words]
        listed = "".join(f"\n  - {line}" for line in words)
        said = f"no worker is left, and the study has not ended{':' if words else ''}{listed}\nNothing measured is lost"
        return kinds.get(status, StudyStopped)(said)
