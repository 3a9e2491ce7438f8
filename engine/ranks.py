"""The processes of one model: rank 0, which speaks to the frontend, and the others, which do what it does.

Every rank runs the same scheduler on the same messages, in the same order, so nothing but those messages has to be
told. They go through a pipe from rank 0 to each other rank; what ranks compute goes through a collective
(`engine.collectives`). When a rank ends, rank 0 ends with the cause, and takes the others with it; when rank 0 ends,
the kernel ends the others. A rank that hangs is noticed by those that wait for it.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

from engine.collectives.base import Choice, Collective, Group, Place, backend, choose
from engine.config import EngineConfig
from engine.errors import CollectiveError, CollectiveTimeout, EngineError, RankLost
from engine.ipc.lifetime import die_with
from engine.ipc.messages import Ask, Fatal
from engine.logs import configure_logging

log = logging.getLogger(__name__)

FOLLOW = "engine.worker:follow"
_BLAME_S = 1.0
"""After a broken exchange the process that broke it is found dead within this time, if it is."""
_EXIT_S = 2.0
_REACT_S = 3.0
"""Rank 0 reacts to a rank's last words within this time, or hangs."""
_LOOK_S = 0.5
_STOPPED_S = 2 * _REACT_S
"""A process that is stopped for this long and the timeout is given up. An exchange that waits for it says so before."""


class RankFailed(EngineError):
    """A rank other than 0 has ended with an error of its own; the message is its cause."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class _Failed:
    """Last words of a rank. `consequence`: another rank's end or silence was the cause."""

    cause: str
    exit_code: int
    consequence: bool


class Step:
    """Run one round."""


class _Stop:
    """End."""


class Crew(Protocol):
    """The ranks, as one of them sees them."""

    group: Group
    choice: Choice | None

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value, by rank. All ranks call it at the same point.

        Raises:
            RankLost, RankFailed: another one has ended.
        """
        ...

    def tell(self, message: Any) -> None:
        """From rank 0: let the others do this too, before the next `Step`, or at once if it is one or a question."""
        ...

    def await_message(self, connection: Connection) -> None:
        """On rank 0: until the frontend has something to say. Raises RankLost, RankFailed."""
        ...

    def explain(self, error: BaseException) -> BaseException:
        """The error that lies behind `error`: a rank's death, where that is why an exchange failed."""
        ...

    def dismiss(self) -> None:
        """Let the other ranks end by themselves."""
        ...

    def close(self) -> None:
        """End the other ranks by force. May be called more than once."""
        ...


class Alone:
    """One rank."""

    def __init__(self) -> None:
        self.group = Group()
        self.choice: Choice | None = None

    def exchange(self, value: Any) -> list[Any]:
        """See `Crew.exchange`."""
        return [value]

    def tell(self, message: Any) -> None:
        """See `Crew.tell`."""

    def await_message(self, connection: Connection) -> None:
        """See `Crew.await_message`. The caller's `recv` waits."""

    def explain(self, error: BaseException) -> BaseException:
        """See `Crew.explain`."""
        return error

    def dismiss(self) -> None:
        """See `Crew.dismiss`."""

    def close(self) -> None:
        """See `Crew.close`."""


def launch(config: EngineConfig, frontend: Connection | None = None, follow: str = FOLLOW) -> Crew:
    """Start the other ranks of this model, if it has some; this process is rank 0.

    Args:
        config: of all of them.
        frontend: told by another rank when this one hangs.
        follow: what the others run, "module:function", called with (config, crew).

    Raises:
        InvalidConfig: the exchange that is asked for cannot run here.
    """
    if config.tp == 1:
        return Alone()
    place = Place(config.tp, config.device)
    choice = choose(config.allreduce, place)
    log.info("%d ranks, joined by %s (%s)", config.tp, choice.name, choice.reason)
    if not choice.verified:
        log.warning("allreduce %s has never run on real hardware; see docs/hardware.md", choice.name)
    return Leader(config, place, choice, frontend, follow)


class Leader:
    """Rank 0's side."""

    def __init__(
        self, config: EngineConfig, place: Place, choice: Choice, frontend: Connection | None, follow: str
    ) -> None:
        self.choice: Choice | None = choice
        chosen = backend(choice.name)
        context = multiprocessing.get_context("spawn")
        meeting = chosen.meeting(place)
        self._processes = []
        self._pipes: list[Connection] = []
        self._told: list[Any] = []
        self._words: dict[int, _Failed] = {}  # of ranks that have ended
        self._collective: Collective | None = None
        self._closing = False
        self._frontend = frontend
        self._patience_s = config.collective_timeout_s + _STOPPED_S
        try:
            for rank in range(1, place.ranks):
                ours, theirs = context.Pipe()
                arguments = (follow, config, rank, place, choice.name, meeting, theirs, frontend, os.getpid())
                process = context.Process(target=_run_follower, args=arguments, name=f"rank {rank}", daemon=True)
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(ours)
            log.info("rank 0 is process %d, %s", os.getpid(), self._others())
            self.exchange("here")  # a process may take long to start, and then all open within the timeout
            threading.Thread(target=self._watch, name="watch of the ranks", daemon=True).start()
            self._collective = chosen.open(meeting, 0, place, config.collective_timeout_s)
            self.exchange("met")
        except BaseException:
            self.close()
            raise
        meeting.close()
        self.group = Group(0, place.ranks, self._collective)

    def _others(self) -> str:
        return ", ".join(f"{process.name} process {process.pid}" for process in self._processes)

    def exchange(self, value: Any) -> list[Any]:
        """See `Crew.exchange`."""
        self._flush()
        values = [value, *(self._receive(rank) for rank in range(1, len(self._pipes) + 1))]
        for rank in range(1, len(values)):
            self._send(rank, values)
        return values

    def tell(self, message: Any) -> None:
        """See `Crew.tell`."""
        self._told.append(message)
        if isinstance(message, Step | Ask):
            self._flush()

    def await_message(self, connection: Connection) -> None:
        """See `Crew.await_message`."""
        self._flush()  # or others would not know that there is nothing left to do
        while connection not in wait([connection, *self._pipes, *(p.sentinel for p in self._processes)]):
            found = self._found()
            if found is not None:
                raise found

    def explain(self, error: BaseException) -> BaseException:
        """See `Crew.explain`."""
        if not isinstance(error, CollectiveError):
            return error
        # Who lost a connection may say so before the process that closed it is seen to have ended.
        deadline = time.monotonic() + _BLAME_S
        while not self._causes() and time.monotonic() < deadline:
            time.sleep(0.02)
        found = self._found()
        return found if found is not None else error

    def close(self) -> None:
        """See `Crew.close`. Without a word before it, what the others are in the middle of is of no use any more."""
        self._closing = True
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def dismiss(self) -> None:
        """See `Crew.dismiss`."""
        self._closing = True
        self._told.append(_Stop())
        with contextlib.suppress(EngineError):
            self._flush()
            for process in self._processes:
                process.join(_EXIT_S)

    def _flush(self) -> None:
        told, self._told = self._told, []
        if told:
            for rank in range(1, len(self._pipes) + 1):
                self._send(rank, told)

    def _send(self, rank: int, message: Any) -> None:
        try:
            self._pipes[rank - 1].send(message)
        except OSError:
            raise self._found() or self._lost(rank) from None

    def _receive(self, rank: int) -> Any:
        pipe, process = self._pipes[rank - 1], self._processes[rank - 1]
        stopped = _StoppedFor(process.pid)
        while not (ready := wait([pipe, process.sentinel], _LOOK_S)):
            if stopped.seconds() >= self._patience_s:
                raise CollectiveTimeout(f"rank {rank} of {len(self._pipes) + 1} {stopped}")
        try:
            message = pipe.recv() if pipe in ready else None
        except (EOFError, OSError):
            message = None
        if message is None:
            raise self._found() or self._lost(rank)
        if isinstance(message, _Failed):
            self._words[rank] = message
            raise self._found() or self._failed(rank, message)
        return message[0]

    def _causes(self) -> list[EngineError]:
        """Ends of ranks that did not follow from another's: deaths, then errors."""
        deaths, errors = [], []
        for rank, (pipe, process) in enumerate(zip(self._pipes, self._processes, strict=True), 1):
            with contextlib.suppress(EOFError, OSError):
                if rank not in self._words and pipe.poll() and isinstance(words := pipe.recv(), _Failed):
                    self._words[rank] = words
            if rank not in self._words:
                if wait([process.sentinel], 0):
                    deaths.append(self._lost(rank))
            elif not self._words[rank].consequence:
                errors.append(self._failed(rank, self._words[rank]))
        return [*deaths, *errors]

    def _found(self) -> EngineError | None:
        """Why a rank has ended, if one has."""
        causes = self._causes()
        if causes:
            return causes[0]
        return next((self._failed(rank, words) for rank, words in self._words.items()), None)

    def _lost(self, rank: int) -> RankLost:
        process = self._processes[rank - 1]
        process.join(_EXIT_S)
        status = process.exitcode
        end = f"ended with status {status} without saying why"
        if status is not None and status < 0:
            hint = "; the kernel's out-of-memory killer does that (see dmesg)" if status == -signal.SIGKILL else ""
            end = f"was ended by signal {-status} ({signal.Signals(-status).name}){hint}"
        return RankLost(f"rank {rank} of {len(self._pipes) + 1} (process {process.pid}) {end}; no rank can go on alone")

    def _failed(self, rank: int, words: _Failed) -> RankFailed:
        return RankFailed(f"rank {rank} of {len(self._pipes) + 1}: {words.cause}", words.exit_code)

    def _watch(self) -> None:
        """Tell whoever waits in an exchange for a rank that has died, or is stopped. A thread of its own.

        Where the ranks still look for each other, which some backends do without end, this ends the process, as it does
        for a rank that is stopped at any time: that one may be waited for without a timeout, as while models load.
        """
        sentinels = {process.sentinel: rank for rank, process in enumerate(self._processes, 1)}
        stopped = [_StoppedFor(process.pid) for process in self._processes]
        while not (ended := wait(list(sentinels), _LOOK_S)):
            for rank, one in enumerate(stopped, 1):
                if one.seconds() >= self._patience_s and not self._closing:
                    self._give_up(f"rank {rank} of {len(stopped) + 1} {one}", CollectiveTimeout.exit_code)
        if self._closing:
            return
        if self._collective is not None:
            self._collective.lose(min(sentinels[sentinel] for sentinel in ended if isinstance(sentinel, int)))
            return
        found = self._found()
        cause, status = (str(found), found.exit_code) if found is not None else ("a rank has ended", 1)
        self._give_up(cause, status)

    def _give_up(self, cause: str, status: int) -> None:
        log.error("%s", cause)
        if self._frontend is not None:
            with contextlib.suppress(OSError):
                self._frontend.send(Fatal(cause, "", status))
        os._exit(status)


class _StoppedFor:
    """How long a process has been stopped by a signal, looked at every `_LOOK_S`.

    By looks, not by the clock: whoever looks may have been stopped with it (a terminal stops all of them).
    """

    def __init__(self, pid: int | None) -> None:
        self._pid, self._looks = pid, 0

    def seconds(self) -> float:
        """Look; 0 while it runs, and where the kernel does not say."""
        try:
            state = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            state = ""
        self._looks = self._looks + 1 if state == "T" else 0
        return self._looks * _LOOK_S

    def __str__(self) -> str:
        return f"(process {self._pid}) has been stopped for {self._looks * _LOOK_S:g} s (signal SIGSTOP, or a terminal)"


class Follower:
    """Another rank's side."""

    def __init__(self, pipe: Connection) -> None:
        self.group = Group()  # until all have met
        self.choice: Choice | None = None
        self._pipe = pipe

    def exchange(self, value: Any) -> list[Any]:
        """See `Crew.exchange`."""
        self._pipe.send((value,))
        values: list[Any] = self._pipe.recv()
        return values

    def tell(self, message: Any) -> None:
        """See `Crew.tell`. Only rank 0 has something to tell."""

    def await_message(self, connection: Connection) -> None:
        """See `Crew.await_message`. Only rank 0 hears the frontend."""

    def explain(self, error: BaseException) -> BaseException:
        """See `Crew.explain`."""
        return error

    def dismiss(self) -> None:
        """See `Crew.dismiss`. Rank 0 does that."""

    def close(self) -> None:
        """See `Crew.close`. Rank 0 does that."""

    def messages(self, busy: Callable[[], bool], timeout_s: float) -> Iterator[Any]:
        """What rank 0 tells, until it says stop. While there is something to do, it must say so within `timeout_s`.

        Raises:
            CollectiveTimeout: it does not.
        """
        while True:
            if busy() and not self._pipe.poll(timeout_s):
                rank, ranks = self.group.rank, self.group.ranks
                raise CollectiveTimeout(
                    f"rank {rank} of {ranks}: rank 0 has not begun a round for {timeout_s:g} s while requests run"
                )
            told: Sequence[Any] = self._pipe.recv()
            for message in told:
                if isinstance(message, _Stop):
                    return
                yield message


def _run_follower(
    follow: str,
    config: EngineConfig,
    rank: int,
    place: Place,
    name: str,
    meeting: Any,
    pipe: Connection,
    frontend: Connection | None,
    parent: int,
) -> None:
    """The first function of a rank's process. It ends without atexit handlers, which may wait for other ranks."""
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # What all ranks notice, rank 0 says.
    configure_logging("warning" if config.log_level in ("info", "debug") else config.log_level, config.log_format)
    module, _, function = follow.partition(":")
    status = 1
    watch = (config.collective_timeout_s + _STOPPED_S, frontend, parent)
    threading.Thread(target=_watch_leader, args=watch, name="watch of rank 0", daemon=True).start()
    try:
        run = getattr(importlib.import_module(module), function)
        crew = Follower(pipe)
        crew.exchange("here")
        collective = backend(name).open(meeting, rank, place, config.collective_timeout_s)
        crew.group = Group(rank, place.ranks, collective)
        crew.exchange("met")
        meeting.close()
        run(config, crew)
        status = 0
    except (EOFError, ConnectionError):
        pass  # rank 0 has gone; it, or the frontend, says why
    except BaseException as error:  # noqa: BLE001 - carried to rank 0, which ends the server with it
        if not isinstance(error, EngineError):
            log.error("rank %d:\n%s", rank, traceback.format_exc().rstrip())
        cause = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
        code = error.exit_code if isinstance(error, EngineError) else 1
        _last_words(pipe, _Failed(cause, code, isinstance(error, CollectiveError)), frontend, parent)
    os._exit(status)


def _watch_leader(patience_s: float, frontend: Connection | None, leader: int) -> None:
    """End rank 0 when it is stopped, since it may be waited for without a timeout. A thread in each other rank."""
    stopped = _StoppedFor(leader)
    while stopped.seconds() < patience_s:
        time.sleep(_LOOK_S)
    if frontend is not None:
        with contextlib.suppress(OSError):
            frontend.send(Fatal(f"rank 0 hangs: it {stopped}", "", CollectiveTimeout.exit_code))
    os.kill(leader, signal.SIGKILL)


def _last_words(pipe: Connection, words: _Failed, frontend: Connection | None, parent: int) -> None:
    """Tell rank 0; where that hangs itself, tell the frontend, and end rank 0."""
    with contextlib.suppress(OSError, EOFError):
        pipe.send(words)
        if words.consequence and not pipe.poll(_REACT_S):
            if frontend is not None:
                frontend.send(Fatal(f"rank 0 hangs: {words.cause}", "", 1))
            os.kill(parent, signal.SIGKILL)
