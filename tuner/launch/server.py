"""One server of one launch record: started, waited for, tried with a real completion, and ended without a trace."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, Self

import httpx

from tuner.ask import Answer, ask
from tuner.errors import LaunchFailed
from tuner.foreign import count, parse
from tuner.launch import gpu, kernel, logs, ports
from tuner.launch.classify import classify
from tuner.launch.clock import RunningClock
from tuner.launch.container import LaunchContainer
from tuner.launch.kinds import Phase, failure
from tuner.launch.notes import NoteBook
from tuner.launch.processes import (
    KEEPS_ENVIRONMENT,
    MARKER,
    Family,
    Process,
    adopt_orphans,
    bytes_read,
    look,
    marker_text,
    pid_namespace,
    send,
    snapshot,
    sockets,
    wait_until,
)
from tuner.launch.shm import SegmentWatch
from tuner.plain import plain
from tuner.records import Failure, LaunchRecord

_POLL_S = 0.05
_LOG_LIMIT = 4 << 20
"""Bytes of a log part that are read for classification: its first half and its last."""

_BUSY_SHARE = 0.05
"""Share of one core above which an unready server counts as working: an idle event loop stays far below."""

_READ_STEP = 1 << 16
"""Bytes read between two looks that count as progress of loading."""

_LOOK_S = 1.0
"""Between two looks at the family while it runs, or longer where a look takes more than 1 % of that."""

_PROMPT = "Count on: one two three one two three one two three one two"
"""A prompt that repeats itself, so that a drafter which looks things up has something to draft from."""


@dataclass(frozen=True)
class LaunchLimits:
    """How long to wait for what, in seconds.

    Args:
        stall_s: without any sign of progress (log, CPU, bytes read) before readiness.
        startup_s: for readiness, however lively the server is.
        smoke_s: for the first completion; kernels may be compiled in it.
        info_s: for the information endpoint.
        grace_s: between SIGTERM and SIGKILL.
        gone_s: for killed processes and the port to be gone.
    """

    stall_s: float = 120.0
    startup_s: float = 3600.0
    smoke_s: float = 120.0
    info_s: float = 10.0
    grace_s: float = 15.0
    gone_s: float = 20.0


@dataclass(frozen=True)
class StopReport:
    """How a server ended.

    Args:
        exit_status: of the server itself, negative for a signal.
        escalated: whether the server needed SIGKILL.
        killed: pids of its family that outlived it and were killed.
        leftovers: pids that could not be ended, for instance because they wait in a driver.
        port_free: whether the port can be listened on again.
        seconds: that stopping took.
        segments_removed: shared-memory segments that the family left behind and that were removed.
        segments_left: those that could not be removed.
        segments_unclaimed: those of our user that came up meanwhile, held by nobody, and not provably the family's.
        gpu_memory_back: whether GPU memory is where it was before the start; None without `nvidia-smi`. Another
            program's use of the same GPU counts too.
        gpu_before: MiB in use by GPU index before the start; None without `nvidia-smi`.
        containers_left: ids of containers that could not be removed.
        runtime: of the launch's container; "" without one.
    """

    exit_status: int | None
    escalated: bool
    killed: tuple[int, ...]
    leftovers: tuple[int, ...]
    port_free: bool
    seconds: float
    segments_removed: tuple[str, ...] = ()
    segments_left: tuple[str, ...] = ()
    segments_unclaimed: tuple[str, ...] = ()
    gpu_memory_back: bool | None = None
    gpu_before: Mapping[int, int] | None = None
    containers_left: tuple[str, ...] = ()
    runtime: str = ""

    @property
    def unclean(self) -> tuple[str, ...]:
        """What is left of the launch, in words; empty when nothing is."""
        found = []
        if self.leftovers:
            found.append(f"processes {', '.join(map(str, self.leftovers))} cannot be ended")
        if self.containers_left:
            found.append(f"containers {', '.join(name[:12] for name in self.containers_left)} cannot be removed")
        if self.segments_left:
            found.append(f"shared memory {', '.join(self.segments_left)} cannot be removed")
        if self.gpu_memory_back is False:
            found.append("GPU memory is not back where it was before the start")
        if not self.port_free:
            found.append("its port is still taken")
        return tuple(found)

    @property
    def clean(self) -> bool:
        """Whether nothing is left of the launch."""
        return not self.unclean


@dataclass(frozen=True)
class Smoke:
    """The first real completion: how many tokens in how many seconds, by which path."""

    tokens: int
    seconds: float
    path: str


class _Reply(NamedTuple):
    """What a request came to: an answer, or the error that stood in its place."""

    answer: Answer | None
    error: str = ""
    timed_out: bool = False

    @property
    def status(self) -> int | None:
        """Of the answer; None without one."""
        return self.answer.status if self.answer else None

    @property
    def excerpt(self) -> str:
        """The beginning of the body."""
        return self.answer.text[:300].strip() if self.answer else ""

    def json(self, *, strict: bool = False) -> Any:
        """The body as JSON.

        Raises:
            ValueError: there is none, or it is none that can be used.
        """
        return parse(self.answer.body if self.answer else b"", strict=strict)


class _Died(Exception):
    """The server ended while something was waited for."""


class Server:
    """A running server. Start it with `Server.start`, best in a `with` block, which stops it.

    Not for use from several threads at once, but for `failure` and `alive`.
    """

    def __init__(
        self,
        record: LaunchRecord,
        process: subprocess.Popen[bytes],
        marker: str,
        log: logs.LaunchLog,
        limits: LaunchLimits,
        segments: SegmentWatch,
        gpu_before: Mapping[int, int] | None,
        container: LaunchContainer | None = None,
        api_key: str | None = None,
    ) -> None:
        self.record = record
        self.log_path = log.path
        self.limits = limits
        self.marker = marker
        self.started_at = time.time()
        self.startup_s: float | None = None
        self._process = process
        self._log = log
        self._segments = segments
        self._gpu_before = gpu_before
        self._container = container
        self._api_key = api_key
        # A container's runtime keeps processes of its own; what runs inside is found by the container.
        self._family = Family(process.pid, marker, lambda: log.pump_pid, adopts=container is None)
        self._notes = NoteBook(marker, self._family.key)
        self._oom = kernel.OomWatch(everywhere=container is not None)
        self._looking = threading.Lock()
        self._ended = threading.Event()
        self._looker = threading.Thread(target=self._look_on, daemon=True, name="look-at-server")
        self._ready_at: int | None = None
        self._proven_at: int | None = None
        self._phase: Phase = "ready"
        self._report: StopReport | None = None

    @classmethod
    def start(
        cls,
        record: LaunchRecord,
        *,
        marker: Mapping[str, str],
        log_path: Path | str,
        limits: LaunchLimits | None = None,
        api_key: str | None = None,
    ) -> Server:
        """Starts the record's command in a session of its own; returns at once, long before it is ready.

        Args:
            record: what to start. Its environment difference is applied to ours.
            marker: who this launch is, in order from general to special, e.g. study then launch. Every process of
                the launch carries it in `SPEC_TUNER_MARKER`, with a nonce added, and `reap` finds it by a prefix.
            log_path: gets what the server writes to its output and error streams; replaced when it exists. The
                beginning stays for good, of what comes later the last part (`tuner.launch.logs`).
            limits: how long to wait for what.
            api_key: sent as a bearer token with every request; it stands in no message and no record.

        Raises:
            LaunchFailed: when the port is taken, or the program cannot be executed. Nothing runs then.
        """
        if not ports.is_free(record.port, record.host):
            raise LaunchFailed(
                failure("port_conflict", "start", f"something already listens on {record.host}:{record.port}")
            )
        adopt_orphans()
        tuner = look(os.getpid())
        owner = f"{tuner.pid}.{tuner.started}" if tuner else str(os.getpid())
        text = marker_text({**marker, "tuner": owner, "namespace": pid_namespace(), "nonce": secrets.token_hex(6)})
        segments, gpu_before = SegmentWatch(), gpu.memory_used()
        try:
            log = logs.LaunchLog(Path(log_path), {**os.environ, MARKER: text})
        except OSError as error:
            raise LaunchFailed(failure("env_broken", "start", f"the log cannot be written: {error}")) from error
        try:
            write_files(record)
        except OSError as error:
            log.started()
            log.close()
            raise LaunchFailed(failure("env_broken", "start", f"a file of the launch: {error}")) from error
        container, argv = None, record.argv
        if record.container is not None:
            container = LaunchContainer(record.container, text, Path(log_path).with_suffix(".cid"))
            argv = container.command(record)
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log.write_end,
                stderr=subprocess.STDOUT,
                env=environment(record, text),
                cwd=container.folder(record) if container is not None else record.cwd or None,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            log.started()
            log.close()
            raise LaunchFailed(
                failure("env_broken", "start", f"'{record.argv[0]}' cannot be started: {error}")
            ) from error
        log.started()
        server = cls(record, process, text, log, limits or LaunchLimits(), segments, gpu_before, container, api_key)
        server._look()
        server._looker.start()
        return server

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Of the server, which is also its process group and session."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the server itself runs."""
        self._log.tend()
        return self._process.poll() is None

    def wait_ready(self, watch: Callable[[float], None] | None = None) -> float:
        """Waits until the server answers 200 on its ready path, from a listener of its own; returns the seconds.

        Args:
            watch: called about once a second with the seconds since the start, for a progress display.

        Raises:
            LaunchFailed: the server ended, made no progress for `stall_s`, exceeded `startup_s`, or somebody else
                listens on its port. It may still run: `stop` it.
        """
        self._phase = "ready"
        clock = RunningClock()
        began = clock.now()
        progress = _Progress(self._family, self._log, clock, self._contained)
        next_watch = began
        while True:
            reply = self._ask("GET", self.record.ready_path, timeout_s=5.0, phase="ready", between=progress.check)
            now = clock.now()
            if reply.status is not None:
                self._check_owner()
                if reply.status == 200:
                    break
            progress.check()
            if watch and now >= next_watch:
                next_watch = now + 1.0
                watch(now - began)
            last = f"{self.record.ready_path} last said: {reply.status or reply.error}"
            if now - progress.at > self.limits.stall_s:
                seen = f"no log line, no CPU time and nothing read for {self.limits.stall_s:g} s; {last}"
                self._fail("ready", "startup_hang", seen + self._listens_elsewhere())
            if now - began > self.limits.startup_s:
                seen = f"not ready after {self.limits.startup_s:g} s; {last}"
                self._fail("ready", "startup_timeout", seen + self._listens_elsewhere())
            self._pause(_POLL_S)
        self.startup_s = clock.now() - began
        self._ready_at = self._position()
        self._look()
        return self.startup_s

    def smoke(self, tokens: int = 16) -> Smoke:
        """A real completion of up to `tokens` tokens: a healthy server may still die on its first decode.

        Raises:
            LaunchFailed: the server died, answered with an error, with something else than a completion, or not at
                all. When its log holds an error from before readiness, that error is the evidence (partial_init).
        """
        self._phase = "smoke"
        began = time.monotonic()
        path = "/v1/completions"
        body: dict[str, Any] = {"model": self.record.served_model, "prompt": _PROMPT, "max_tokens": tokens}
        reply = self._ask_awake(path, body)
        if reply.status in (404, 405):
            chat_path = "/v1/chat/completions"
            messages = [{"role": "user", "content": _PROMPT}]
            body = {"model": self.record.served_model, "messages": messages, "max_tokens": tokens}
            chat = self._ask_awake(chat_path, body)
            if chat.status not in (404, 405):
                path, reply = chat_path, chat
        self._check_smoke(path, reply)
        tokens_made = self._count(path, reply)
        self._look()
        # Once the server has decoded, an error of its start that it lives with is not held against it any more.
        self._proven_at = self._position()
        self._phase = "bench"
        return Smoke(tokens_made, time.monotonic() - began, path)

    def server_info(self) -> dict[str, Any] | None:
        """What the server says about itself; None when it has no such path, does not answer in time or not in JSON.

        None means that the effective settings are unknown, which is not a failure of the server. What the record
        `also_read`s is added: under its key the JSON of a path, or the lines of the log that match.

        Raises:
            LaunchFailed: when the server ended meanwhile.
        """
        data = None if self.record.info_path is None else self._json(self.record.info_path)
        found = dict(data) if isinstance(data, dict) else None
        for key, source in self.record.also_read.items():
            said = self._json(source) if source.startswith("/") else self._lines(source)
            if said is not None:
                found = {**(found or {}), key: said}
        return found

    def _json(self, path: str) -> Any:
        """What the server answers on a path; None where it does not, or not in JSON."""
        # Once it has decoded, a death is no half-built start, and none of its first decode.
        phase: Phase = "readback" if self._proven_at is None else "bench"
        reply = self._ask("GET", path, timeout_s=self.limits.info_s, phase=phase)
        try:
            return reply.json() if reply.status == 200 else None
        except ValueError:
            return None

    def _lines(self, pattern: str, most: int = 20) -> list[str]:
        """The first lines of the log that match."""
        self._log.drain()
        found = re.compile(pattern)
        lines = logs.read(self.log_path, 0, _LOG_LIMIT).splitlines()
        return [plain(line).strip() for line in lines if found.search(line)][:most]

    def failure(self, phase: Phase = "bench", wait_s: float = 0.0) -> Failure | None:
        """Why the server is not running any more; None while it runs, or after a wanted stop.

        Args:
            phase: what the tuner was doing.
            wait_s: how long a server that has just dropped a connection may take to end.
        """
        if self._report is not None:
            return None
        if not wait_until(lambda: not self.alive, wait_s):
            return None
        return self._classify(phase)

    def cpu_s(self) -> float:
        """CPU seconds of the family's living processes so far, a container's included."""
        return sum(process.cpu_s for process in [*self._family.living(), *self._contained()])

    def hung(self, seen: str) -> Failure:
        """The failure of a server under load that lives and gives no tokens; `seen` says for how long."""
        return self.failure("bench") or self._classify("bench", "hung_decode", seen)

    def log_tail(self, lines: int = 20) -> str:
        """The last lines of the log."""
        self._log.drain()
        return logs.tail(self.log_path, lines)

    def stop(self) -> StopReport:
        """Ends the whole family and waits until all that it held is back where it was.

        That is its processes (zombies aside), its port, its shared-memory segments and GPU memory. SIGTERM to the
        group, SIGKILL after the grace time, then SIGKILL for whatever outlived the server. Calling it again returns
        the same report.
        """
        if self._report is None:
            self._ended.set()
            try:
                self._report = self._stop()
                if self._report.clean:
                    self._notes.note.drop()
            except BaseException:
                # Interrupted while waiting: no more patience with the server, but it must not be left behind.
                self._kill_family()
                if self._container is not None:
                    self._container.sweep(self.limits.gone_s)
                self._log.close()
                raise
        return self._report

    # -- asking -------------------------------------------------------------------------------------------------

    def _ask(
        self,
        method: str,
        path: str,
        *,
        timeout_s: float,
        phase: Phase,
        body: dict[str, Any] | None = None,
        between: Callable[[], object] | None = None,
    ) -> _Reply:
        """One request, given up as soon as the server ends, whatever the socket does."""
        headers = {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}

        def watch() -> None:
            if not self.alive:
                raise _Died
            if between:
                between()

        url = self.record.base_url + path
        try:
            # `timeout_s` bounds each step of the request; a body that trickles could take for ever.
            reply = _Reply(ask(method, url, timeout_s=timeout_s, body=body, headers=headers, watch=watch))
        except _Died:
            raise LaunchFailed(self._classify(phase)) from None
        except httpx.TimeoutException as error:
            reply = _Reply(None, str(error) or f"no answer in {timeout_s:g} s", timed_out=True)
        except httpx.HTTPError as error:
            reply = _Reply(None, f"{type(error).__name__}: {error}")
        if not self.alive:
            raise LaunchFailed(self._classify(phase))
        return reply

    def _ask_awake(self, path: str, body: dict[str, Any]) -> _Reply:
        """A completion; asked for again where we were stopped while its time ran out."""
        while True:
            clock = RunningClock()
            reply = self._ask("POST", path, timeout_s=self.limits.smoke_s, phase="smoke", body=body, between=clock.now)
            clock.now()
            if not (reply.timed_out and clock.stopped):
                return reply

    def _pause(self, seconds: float) -> None:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return
        raise LaunchFailed(self._classify("ready"))

    def _listens_elsewhere(self) -> str:
        """Where the server listens, if not where it was to; "" where that cannot be told, or it listens nowhere."""
        own = frozenset[int]().union(*(sockets(one.pid) for one in [*self._family.living(), *self._contained()]))
        here = ports.listeners(self.record.port, self.record.host)
        if here is None or here & own:
            return ""
        found = ", ".join(ports.addresses(own))
        return f"; it listens on {found} and not on port {self.record.port} of {self.record.host}" if found else ""

    def _check_owner(self) -> None:
        """Raises when a socket that listens on our port belongs to somebody else."""
        listening = ports.listeners(self.record.port, self.record.host)
        if listening is None:
            return
        family = [*self._family.living(), *self._contained()]
        own = frozenset[int]().union(*(sockets(process.pid) for process in family))
        if listening - own or not listening:
            if not self.alive:
                raise LaunchFailed(self._classify("ready"))
            # The listener may have closed between the answer and this look.
            listening = ports.listeners(self.record.port, self.record.host) or frozenset()
            if listening - own and not self._vouched(listening - own):
                message = f"a process that is not part of this launch answers on port {self.record.port}"
                raise LaunchFailed(failure("port_conflict", "ready", message, self.log_tail()))

    def _contained(self) -> list[Process]:
        """The processes of the launch's container; none without one."""
        return self._container.processes() if self._container is not None else []

    def _vouched(self, listening: frozenset[int]) -> bool:
        """Whether listeners that no process of ours holds are the container's all the same.

        A runtime that runs as root hides whose they are. Then the container has to run, and on a published port to
        publish it; on the host's network nobody else who can be seen may hold the listener (the port was free before).
        """
        if self._container is None or (state := self._container.state()) is None or not state.running:
            return False
        if self._container.ref.network != "host":
            return self.record.port in state.ports
        return not any(sockets(pid) & listening for pid in snapshot())

    def _check_smoke(self, path: str, reply: _Reply) -> None:
        if reply.status == 200:
            return
        # A server that has lost its engine often takes a moment to end, and its exit says more than the answer.
        if wait_until(lambda: not self.alive, 1.0):
            raise LaunchFailed(self._classify("smoke"))
        if reply.status is None:
            symptom = "hung_decode" if reply.timed_out else "bad_protocol"
            self._fail("smoke", symptom, f"{path}: {reply.error}")
        answer = f"{path} answered {reply.status}: {reply.excerpt}"
        self._fail("smoke", "engine_dead_5xx" if reply.status >= 500 else "bad_protocol", answer)

    def _count(self, path: str, reply: _Reply) -> int:
        """Tokens of a completion, by its usage or, without one, 1 for any text."""
        try:
            data = reply.json(strict=True)
            choice = data["choices"][0]
            text = choice["text"] if "text" in choice else choice["message"]["content"]
            usage = data.get("usage") or {}
            tokens = count(usage.get("completion_tokens")) or int(bool(text))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            seen = f"{path} answered 200 without a completion ({error!r}): {reply.excerpt}"
            self._fail("smoke", "bad_protocol", seen)
        if tokens < 1:
            self._fail("smoke", "short_output", f"{path} answered 200 with no token: {reply.excerpt}")
        return tokens

    # -- failing ------------------------------------------------------------------------------------------------

    def _fail(self, phase: Phase, symptom: str, seen: str) -> NoReturn:
        raise LaunchFailed(self._classify(phase, symptom, seen))

    def _classify(self, phase: Phase, symptom: str | None = None, seen: str = "") -> Failure:
        """The failure now, from the part of the log that matters in this phase."""
        before_decode = phase in ("smoke", "readback") and self._proven_at is None
        since = self._proven_at or (self._ready_at if before_decode else None) or 0
        self._log.drain()
        status = self._process.poll()
        container = self._container
        ended = container is not None and status is not None
        found = classify(
            logs.read(self.log_path, since, limit=_LOG_LIMIT),
            phase=phase,
            exit_status=status,
            engine=self.record.engine,
            earlier=logs.read(self.log_path, 0, self._ready_at, _LOG_LIMIT) if before_decode and self._ready_at else "",
            port=self.record.port,
            symptom=symptom,
            seen=seen,
            own_rules=self.record.log_rules,
            kernel_oom=self._oom.killed(),
            started=logs.read(self.log_path, 0, self._ready_at, _LOG_LIMIT)
            if phase == "bench" and self._ready_at
            else "",
            never_ran=container.ended_by_runtime(status) if container is not None and ended else "",
            oom_killed=bool(container is not None and ended and (state := container.state()) and state.oom_killed),
        )
        return self._without_key(found)

    def _without_key(self, found: Failure) -> Failure:
        """A server may repeat in an answer or its log what it was sent."""
        if not self._api_key:
            return found
        hidden = {
            name: getattr(found, name).replace(self._api_key, "(the API key)") for name in ("message", "evidence")
        }
        return replace(found, **hidden)

    def _position(self) -> int:
        """Where the log stands now, everything that the server has written so far included."""
        self._log.drain()
        return self._log.size

    def _look(self) -> None:
        """Notes who belongs to the family and which segments it holds: later there may be nobody left to ask."""
        with self._looking:
            members = self._family.members()
            self._segments.look(process.pid for process in members)
            self._oom.look(process.pid for process in members)
            segments = [(segment.name, segment.inode) for segment in self._segments.mine()]
            self._notes.see([process.key for process in members], segments)

    def _look_on(self) -> None:
        wait = _LOOK_S
        while not self._ended.wait(wait):
            began = time.thread_time()
            self._look()
            wait = max(_LOOK_S, 100 * (time.thread_time() - began))

    # -- stopping -----------------------------------------------------------------------------------------------

    def _stop(self) -> StopReport:
        began = time.monotonic()
        deadline = began + self.limits.grace_s
        self._ended.set()
        self._looker.join(5)
        self._look()
        escalated, stuck = (
            self._container.end(self.limits.grace_s, self.limits.gone_s) if self._container else (False, ())
        )
        if self.alive:
            self._signal_group(signal.SIGTERM)
        wait_until(lambda: not self.alive, deadline - time.monotonic())
        escalated = escalated or self.alive
        if not escalated:
            # The server has ended in order; what it told to end with it gets a moment to do so.
            wait_until(lambda: not self._family.living(), min(1.0, max(0.0, deadline - time.monotonic())))
        killed = self._kill_family()
        leftovers = tuple(process.pid for process in self._family.living())
        if self._container is not None:
            # Of a client that ended between asking for a container and having its id.
            stuck = tuple({*stuck, *self._container.sweep(self.limits.gone_s)})
        self._log.close()
        removed, left = self._segments.clear()
        unclaimed = self._segments.unclaimed()
        gpu_back = gpu.wait_for(self._gpu_before, self.limits.gone_s)
        port_free = wait_until(lambda: ports.is_free(self.record.port, self.record.host), self.limits.gone_s)
        return StopReport(
            exit_status=self._process.poll(),
            escalated=escalated,
            killed=tuple(sorted(killed - {self.pid})),
            leftovers=leftovers,
            port_free=port_free,
            seconds=time.monotonic() - began,
            segments_removed=removed,
            segments_left=left,
            segments_unclaimed=unclaimed,
            gpu_memory_back=gpu_back,
            gpu_before=self._gpu_before,
            containers_left=stuck,
            runtime=self._container.ref.runtime if self._container is not None else "",
        )

    def _signal_group(self, number: signal.Signals) -> None:
        # While the server has not been waited for, its pid, and with it the group's id, cannot mean anyone else.
        if self.pid == os.getpgrp():
            raise RuntimeError("refusing to signal the tuner's own process group")
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return

    def _kill_family(self) -> set[int]:
        """SIGKILL until none is left: a member may start another between a look and the signal.

        All are stopped before the first is killed, or two that watch one another would always be restarted in time.
        """
        killed: set[int] = set()
        quiet = 0

        def gone() -> bool:
            nonlocal quiet
            if self.alive:
                self._signal_group(signal.SIGKILL)
            living = self._family.living()
            for process in living:
                send(process, signal.SIGSTOP)
            for process in living:
                if send(process, signal.SIGKILL):
                    killed.add(process.pid)
            self._family.reap()
            quiet = quiet + 1 if not self.alive and not living and self._family.settled else 0
            return quiet > 1

        wait_until(gone, self.limits.gone_s)
        return killed


class _Progress:
    """Signs of life of a server that is not ready yet: log output, CPU time, bytes read."""

    _EVERY_S = 0.5

    def __init__(
        self,
        family: Family,
        log: logs.LaunchLog,
        clock: RunningClock,
        contained: Callable[[], list[Process]] = list,
    ) -> None:
        self._family = family
        self._contained = contained
        self._log_file = log
        self._clock = clock
        self.at = clock.now()
        self._looked = self.at
        self._log, self._cpu, self._read = self._look()

    def check(self) -> None:
        """Looks, at most twice a second, and notes the time when something has moved."""
        now = self._clock.now()
        if now - self._looked < self._EVERY_S:
            return
        log, cpu, read = self._look()
        busy = cpu - self._cpu > _BUSY_SHARE * (now - self._looked)
        if log != self._log or busy or read - self._read >= _READ_STEP:
            self.at = now
        self._looked, self._log, self._cpu, self._read = now, log, cpu, read

    def _look(self) -> tuple[int, float, int]:
        family = self._family.living()
        family += self._contained()
        cpu = sum(process.cpu_s for process in family)
        return self._log_file.size, cpu, sum(bytes_read(process.pid) for process in family)


def write_files(record: LaunchRecord) -> None:
    """Writes what the record's flags name, where it does not stand already.

    Raises:
        OSError: it cannot be written.
    """
    for name, text in record.files.items():
        path = Path(name)
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")


def environment(record: LaunchRecord, marker: str) -> dict[str, str]:
    """The environment of a launch: ours, the record's difference, and the marker, which a new title is not to erase."""
    result = {KEEPS_ENVIRONMENT: "1", **os.environ, **record.trial_env}
    for name, value in record.env.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = value
    result[MARKER] = marker
    return result
