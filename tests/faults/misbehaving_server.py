"""An OpenAI-compatible server that misbehaves in one chosen way. Standard library only, so that it starts at once.

python misbehaving_server.py --port 8000 --mode dies_on_first_decode
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
import traceback

MODES = [
    "healthy",
    "crashes_at_start",
    "out_of_memory_at_start",
    "half_built",
    "half_built_but_lives",
    "half_built_and_floods",
    "three_processes",
    "daemon",
    "daemon_on_sigterm",
    "sheds_environment",
    "leaks_segments",
    "dies_on_first_decode",
    "hangs_at_start",
    "never_ready",
    "slow_start",
    "grandchild",
    "ignores_sigterm",
    "says_503",
    "never_listens",
    "dies_mid_stream",
    "stalls_mid_stream",
    "hangs_on_completion",
    "headers_then_close",
    "not_json",
    "no_tokens",
    "chat_only",
    "info_hangs",
    "unready_503",
    "probes_kill",
    "stalls_then_aborts",
    "holds_port",
    "prints_results",
    "wants_key",
    "says_arena_is_full",
    "runs_out_capturing_graphs",
    "info_odd",
    "info_deep",
    "info_endless",
    "smoke_deep",
    "smoke_infinite_count",
    "smoke_endless",
    "smoke_compressed",
    "eats_memory",
    "error_in_stream",
    "error_in_mid_stream",
    "drips",
    "drips_nothing",
    "prints_garbage",
    "prints_one_line",
    "flaps",
    "other_address",
    "closes_files",
    "headless",
    "respawns",
    "overwrites_environment",
    "signals_its_parent",
    "dead_worker",
]

CHANGES = [
    "works",
    "says_500",
    "says_409",
    "redirects",
    "closes",
    "cuts_off",
    "no_http",
    "trickles",
    "endless",
    "compressed",
    "keeps_old",
    "half",
    "late",
    "lies",
    "never_answers",
    "dies_before",
    "dies_silently",
    "dies_with_heir",
    "dies_after",
    "dies_under_load",
    "exits_0",
    "stops_listening",
    "goes_deaf",
    "stops_decoding",
    "decodes_nothing",
    "says_5xx",
    "runs_out_of_memory",
    "info_breaks",
    "info_dies",
    "slower",
]
"""What POST /reconfigure may come to (`--change`), at every change or where num_steps is `--change-at`."""


class Head:
    """The part of the engine whose constructor may fail."""

    def __init__(self) -> None:
        raise RuntimeError("draft head: expected hidden size 576, got 960")


class HalfBuilt:
    """An engine that swallows the error of its constructor: the very bug that the tuner must see through."""

    def __init__(self) -> None:
        try:
            self.head = Head()
        except RuntimeError:
            traceback.print_exc()
            print("continuing", flush=True)


class App:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.mode = options.mode
        self.engine = HalfBuilt() if self.mode.startswith("half_built") else None
        if self.mode == "half_built_and_floods":
            for _ in range(200):
                print(("x" * 99 + "\n") * 10_000, end="", flush=True)
        self.completions = 0
        self.generated = self.steps = 0
        self.probes = 0
        self.server: asyncio.Server | None = None
        self.in_force = json.loads(options.effective)
        if options.num_steps is not None:
            self.in_force = {"num_steps": options.num_steps, **self.in_force}
        self.claimed: dict | None = None
        self.changed = ""
        self.changes = 0
        if self.mode == "dead_worker":  # which nobody watches, and another process keeps its pipes open
            self.to_worker, self.from_worker = os.pipe(), os.pipe()
            subprocess.Popen(["/bin/false"], stdin=self.to_worker[0], stdout=self.from_worker[1])

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                method, path, _ = line.decode().split(" ", 2)
                length, key = 0, ""
                while (header := await reader.readline()) not in (b"\r\n", b""):
                    name, _, value = header.decode().partition(":")
                    if name.lower() == "content-length":
                        length = int(value)
                    if name.lower() == "authorization":
                        key = value.strip()
                body = json.loads(await reader.readexactly(length)) if length else {}
                if self.mode == "wants_key" and key != f"Bearer {os.environ['FAKE_KEY']}":
                    await reply(writer, 401, {"error": {"message": f"not a valid key: {key}"}})
                else:
                    await self.route(writer, method, path, body)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def route(self, writer: asyncio.StreamWriter, method: str, path: str, body: dict) -> None:
        if method == "GET" and path == "/health":
            self.probes += 1
            if self.mode == "probes_kill" and self.probes > 3:
                os._exit(1)
            flapping = self.mode == "flaps" and self.probes % 2 == 0
            await reply(writer, 503 if self.mode == "unready_503" or flapping else 200, {})
        elif method == "GET" and path == "/metrics" and self.in_force.get("num_steps") is not None:
            await raw(writer, self.counters().encode())
        elif method == "GET" and path == "/server_info":
            if self.mode == "info_hangs":
                await asyncio.sleep(3600)
            if self.mode == "info_odd":
                return await raw(writer, b'{"model": "\\ud83d", "a": NaN, "b": 1e999, "c": ' + b"9" * 400 + b"}")
            if self.mode == "info_deep":
                return await raw(writer, b"[" * 200_000)
            if self.mode == "info_endless":
                return await endless(writer)
            if self.changed == "info_dies":
                crash(RuntimeError("the settings cannot be told"))
            if self.changed == "info_breaks":
                return await reply(writer, 200, {"effective": [self.in_force], "paths": "none"})
            effective = self.in_force if self.claimed is None else self.claimed
            await reply(writer, 200, {"effective": effective})
        elif method == "POST" and path == "/reconfigure":
            await self.reconfigure(writer, body)
        elif method == "GET" and path == "/echo":
            await reply(writer, 200, {**self.facts(), "env": dict(os.environ)})
        elif method == "GET" and path == "/bye":
            print("bye", flush=True)
            os._exit(0)
        elif path in ("/v1/completions", "/v1/chat/completions"):
            await self.complete(writer, path, body)
        else:
            await reply(writer, 404, {"error": {"message": f"no such path: {path}"}})

    def counters(self) -> str:
        """Of an engine whose every draft is accepted, at the depth that is really in force."""
        depth = self.in_force["num_steps"]
        steps = self.steps if depth else 0
        rows = {
            "engine_generated_tokens_total": self.generated,
            "engine_spec_verify_steps_total": steps,
            "engine_spec_drafted_tokens_total": steps * depth,
            "engine_spec_accepted_tokens_total": steps * depth,
        }
        at = {f'engine_spec_rounds_by_accepted_total{{accepted="{d}"}}': steps * (d == depth) for d in range(9)}
        return "".join(f"{name} {value}\n" for name, value in (rows | at).items())

    def facts(self) -> dict:
        slowness = self.changes if self.options.change == "slower" else 0
        return {
            "argv": sys.argv,
            "pid": os.getpid(),
            "probes": self.probes,
            "in_force": self.in_force,
            "slowness": slowness,
        }

    async def reconfigure(self, writer: asyncio.StreamWriter, body: dict) -> None:
        """Changes settings, or does not; what follows is the fault that `--change` names."""
        at = self.options.change_at
        strikes = at is None or body.get("num_steps") == at
        mode = self.options.change if strikes else "works"
        self.changes += 1
        self.changed, self.claimed = mode, None
        print(f"change {self.changes}: {body} ({mode})", flush=True)
        if mode == "says_500":
            return await reply(writer, 500, {"error": {"message": "RuntimeError: the drafter cannot be replaced"}})
        if mode == "says_409":
            return await reply(writer, 409, {"error": {"message": "requests are running"}})
        if mode == "redirects":
            return await raw(writer, b"", "Location: /health\r\n", 307)
        if mode == "closes":
            return writer.close()
        if mode == "cuts_off":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")
            await writer.drain()
            return writer.close()
        if mode == "no_http":
            writer.write(b"\x00\xff* what? *\r\n\r\n")
            await writer.drain()
            return writer.close()
        if mode == "trickles":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
            while True:
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.1)
        if mode == "endless":
            return await endless(writer)
        if mode == "compressed":
            return await raw(writer, b"not gzip", "Content-Encoding: gzip\r\n")
        if mode == "never_answers":
            await asyncio.sleep(3600)
        if mode == "dies_before":
            crash(RuntimeError("draft head: expected hidden size 576, got 960"))
        if mode == "dies_silently":
            os._exit(1)
        if mode == "exits_0":
            os._exit(0)
        if mode == "dies_with_heir":  # a worker that holds on to the connection
            leave_child()
            crash(RuntimeError("the scheduler is gone"))
        if mode == "half":
            self.in_force = {**self.in_force, **dict(list(body.items())[:1])}
        elif mode == "lies":
            self.claimed = {**self.in_force, **body}
        elif mode == "late":
            asyncio.get_running_loop().call_later(self.options.seconds, self.in_force.update, body)
        elif mode != "keeps_old":
            self.in_force = {**self.in_force, **body}
        if mode == "stops_listening" and self.server is not None:
            self.server.close()
        if mode == "dies_after":
            asyncio.get_running_loop().call_later(0.02, crash, RuntimeError("a worker was lost in the change"))
        await reply(writer, 200, "" if mode == "goes_deaf" else {"effective": self.in_force})
        if mode == "goes_deaf":
            time.sleep(3600)

    async def complete(self, writer: asyncio.StreamWriter, path: str, body: dict) -> None:
        self.completions += 1
        mode = self.mode
        if mode == "dies_on_first_decode":
            crash(RuntimeError("CUDA error: no kernel image is available for execution on the device"))
        if mode == "three_processes":
            crash(RuntimeError("the scheduler is gone"))
        if mode == "eats_memory":
            held = []
            while True:
                held.append(bytearray(os.urandom(1 << 20)))
        if mode in ("half_built", "half_built_and_floods"):
            try:
                self.engine.head.draft()
            except AttributeError as error:
                crash(error)
        if mode == "half_built_but_lives":
            message = "AttributeError: 'HalfBuilt' object has no attribute 'head'"
            return await reply(writer, 500, {"error": {"message": message}})
        if mode == "says_503":
            return await reply(writer, 503, {"error": {"message": "engine is dead"}})
        if mode == "hangs_on_completion" or self.changed == "stops_decoding":
            await asyncio.sleep(3600)
        if self.changed == "dies_under_load":
            crash(IndexError("page 4096 is out of range"))
        if self.changed == "runs_out_of_memory":
            crash(MemoryError("CUDA out of memory. Tried to allocate 2.50 GiB"))
        if self.changed == "says_5xx":
            return await reply(writer, 500, {"error": {"message": "AttributeError: 'Drafter' has no attribute 'head'"}})
        if mode == "error_in_stream" and body.get("stream"):
            return await raw(writer, b'data: {"error": {"message": "EngineDeadError: core 0"}}\n\n')
        if mode == "dead_worker":
            os.write(self.to_worker[1], b"decode\n")
            await asyncio.get_running_loop().run_in_executor(None, os.read, self.from_worker[0], 1)
        if mode == "headers_then_close":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n")
            await writer.drain()
            return writer.close()
        if mode == "not_json":
            return await reply(writer, 200, "<html>a proxy's login page</html>")
        if mode == "smoke_deep":
            return await raw(writer, b"[" * 200_000)
        if mode == "smoke_infinite_count":
            return await raw(writer, b'{"choices": [{"text": "a"}], "usage": {"completion_tokens": 1e999}}')
        if mode == "smoke_endless":
            return await endless(writer)
        if mode == "smoke_compressed":
            return await raw(writer, b"not gzip", "Content-Encoding: gzip\r\n")
        if mode == "chat_only" and path == "/v1/completions":
            return await reply(writer, 404, {"error": {"message": "not here"}})
        tokens = 0 if mode == "no_tokens" or self.changed == "decodes_nothing" else int(body.get("max_tokens", 16))
        if body.get("stream"):
            return await self.stream(writer, tokens, chat="chat" in path)
        text = " one" * tokens
        choice = {"message": {"role": "assistant", "content": text}} if "chat" in path else {"text": text}
        usage = {"prompt_tokens": 4, "completion_tokens": tokens, "total_tokens": 4 + tokens}
        await reply(writer, 200, {"choices": [{"index": 0, "finish_reason": "length", **choice}], "usage": usage})

    async def stream(self, writer: asyncio.StreamWriter, tokens: int, chat: bool = False) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        for i in range(tokens):
            said = {"delta": {"content": " one"}} if chat else {"text": " one"}
            finish = "length" if i == tokens - 1 else None
            choice = {"index": 0, "finish_reason": finish, **said}
            chunk = {"choices": [choice], "usage": {"completion_tokens": i + 1}}
            writer.write(f"data: {json.dumps(chunk)}\n\n".encode())
            await writer.drain()
            self.generated += 1
            self.steps += i % (1 + (self.in_force.get("num_steps") or 0)) == 0
            if self.mode == "drips":
                await asyncio.sleep(self.options.seconds)
            if i == 3 and self.mode == "error_in_mid_stream":
                writer.write(b'data: {"error": {"message": "EngineDeadError: core 0"}}\n\ndata: [DONE]\n\n')
                return writer.close()
            while self.mode == "drips_nothing":
                writer.write(b'data: {"choices": [{"index": 0, "delta": {}}]}\n\n')
                await writer.drain()
                await asyncio.sleep(self.options.seconds)
            if i == 3 and self.mode == "dies_mid_stream":
                crash(IndexError("page 4096 is out of range"))
            if i == 3 and self.mode == "stalls_mid_stream":
                await asyncio.sleep(3600)
            if i == 3 and self.mode == "stalls_then_aborts" and self.completions > 2:
                await asyncio.sleep(self.options.seconds)
                print("Watchdog caught an unresponsive decode step", flush=True)
                os.abort()
        writer.write(b"data: [DONE]\n\n")
        await writer.drain()
        writer.close()


async def raw(writer: asyncio.StreamWriter, data: bytes, more: str = "", status: int = 200) -> None:
    writer.write(f"HTTP/1.1 {status} OK\r\n{more}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    await writer.drain()


async def endless(writer: asyncio.StreamWriter) -> None:
    """Sends until the other side hangs up, and says then how much it was."""
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n")
    sent = 0
    try:
        while True:
            writer.write(b" " * (1 << 20))
            await writer.drain()
            sent += 1
    except ConnectionError:
        print(f"hung up on after {sent} MiB", flush=True)
        raise


async def reply(writer: asyncio.StreamWriter, status: int, body: object) -> None:
    data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    head = f"HTTP/1.1 {status} -\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await writer.drain()


def crash(error: Exception) -> None:
    """Ends the whole process at once, with the error as its last words."""
    try:
        raise error
    except type(error):
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def leave_grandchild(pid_file: str | None, seconds: float = 3600.0) -> None:
    """A worker that leaves the session and whose parent is gone: out of reach of group and tree alike, once back."""
    reading, writing = os.pipe()
    if os.fork():
        os.close(writing)
        os.read(reading, 1)
        os.close(reading)
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if pid_file:
        with open(pid_file, "w") as file:
            file.write(str(os.getpid()))
    os.write(writing, b".")
    os.close(writing)
    os.close(reading)
    time.sleep(seconds)
    os._exit(0)


def leave_daemon(pid_file: str) -> None:
    """A process that keeps nothing of the server: no session, no parent, no open file, no environment."""
    if os.fork():
        os.wait()
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    with open(pid_file, "w") as file:
        file.write(str(os.getpid()))
    os.closerange(0, 256)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    os.execve(sys.executable, [sys.executable, "-I", "-S", "-c", code], {})


def leave_daemon_at_the_end(pid_file: str) -> None:
    leave_daemon(pid_file)
    os._exit(0)


def leave_child(seconds: float = 3600.0) -> None:
    """A worker in the server's own group that does not heed SIGTERM."""
    if os.fork():
        return
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(seconds)
    os._exit(0)


def leak_segment(path: str) -> None:
    """Shared memory that a worker maps and nobody removes."""
    with open(path, "w+b") as file:
        file.truncate(1 << 20)
        mapped = mmap.mmap(file.fileno(), 1 << 20)
    if os.fork() == 0:
        mapped[0] = 1
        time.sleep(3600)


def before_listening(options: argparse.Namespace) -> None:
    mode = options.mode
    print(f"starting in mode {mode}", flush=True)
    if mode == "crashes_at_start":
        Head()
    if mode == "out_of_memory_at_start":
        try:
            raise MemoryError("CUDA out of memory. Tried to allocate 2.50 GiB")
        finally:
            print("AttributeError: 'Executor' object has no attribute 'workers'", flush=True)
    if mode == "prints_results":
        print('{"tokens_per_s": 1e9, "completed": 1000, "accept_length": 9.0}', flush=True)
        print("Output token throughput (tok/s):         1000000000.00", flush=True)
    if mode == "says_arena_is_full":
        print("arena is full: 0 of 12 slots free", flush=True)
        sys.exit(3)
    if mode == "runs_out_capturing_graphs":
        print("[2026-11-02 10:21:58 TP0] Capture cuda graph begin. This can take up to several minutes.", flush=True)
        raise MemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
    if mode == "prints_garbage":
        for _ in range(options.megabytes):
            sys.stdout.buffer.write(os.urandom(1 << 20))
        sys.stdout.flush()
        Head()
    if mode == "prints_one_line":
        for _ in range(options.megabytes):
            print("Error x " * (1 << 17), end="", flush=True)
        print()
        Head()
    if mode == "closes_files":
        os.closerange(0, 256)
    if mode == "respawns":
        respawning(options.pid_file)
    if mode == "overwrites_environment":
        overwrite_environment()
    if mode == "signals_its_parent":
        signal_parent(3600)
    if mode == "other_address":
        options.host = "127.0.0.2"
    if mode in ("hangs_at_start", "never_listens"):
        time.sleep(3600)
    if mode in ("slow_start", "never_ready"):
        deadline = time.monotonic() + (options.seconds if mode == "slow_start" else 3600)
        shard = 0
        while time.monotonic() < deadline:
            shard += 1
            print(f"loading shard {shard}", flush=True)
            time.sleep(0.1)
    if mode == "ignores_sigterm":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if mode == "daemon":
        leave_daemon(options.pid_file)
    if mode == "daemon_on_sigterm":
        signal.signal(signal.SIGTERM, lambda *_: leave_daemon_at_the_end(options.pid_file))
    if mode == "sheds_environment" and "SPEC_TUNER_MARKER" in os.environ:
        os.execve(sys.executable, [sys.executable, "-I", *sys.argv], {})
    if mode == "leaks_segments":
        leak_segment(options.segment)
    if mode == "three_processes":
        leave_child()
    if mode in ("grandchild", "three_processes"):
        leave_grandchild(options.pid_file)


def respawning(pid_file: str) -> None:
    """Two processes that keep nothing of the server and start one another anew as soon as one is gone."""
    code = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
other = int(sys.argv[2])
with open(sys.argv[1], "a") as file:
    file.write(f"{os.getpid()}\\n")
while True:
    try:
        os.kill(other, 0)
    except OSError:
        other = 0
    if not other:
        again = [sys.executable, "-I", "-S", "-c", sys.argv[3], sys.argv[1], str(os.getpid()), sys.argv[3]]
        other = subprocess.Popen(again, env={}, start_new_session=True, close_fds=True).pid
    try:
        os.waitpid(-1, os.WNOHANG)
    except OSError:
        pass
    time.sleep(0.005)
"""
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        os.execve(sys.executable, [sys.executable, "-I", "-S", "-c", code, pid_file, "0", code], {})
    os.wait()


def overwrite_environment() -> None:
    """As a process title does that needs room: what stood behind the arguments is gone."""
    with open("/proc/self/stat") as file:
        start, end = file.read().rsplit(")", 1)[1].split()[47:49]
    ctypes.memset(int(start), 0, int(end) - int(start))


def signal_parent(seconds: float) -> None:
    """A worker that tells its parent of every trouble, and the server dies meanwhile."""
    if os.fork():
        return
    server = os.getppid()
    while os.getppid() == server:
        time.sleep(0.001)
    for number in (signal.SIGUSR1, signal.SIGQUIT, signal.SIGUSR2):
        os.kill(os.getppid(), number)
    time.sleep(seconds)
    os._exit(0)


def headless(options: argparse.Namespace) -> None:
    """The first thread ends by itself, and another serves."""
    threading.Thread(target=lambda: asyncio.run(serve(options))).start()
    ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)


async def serve(options: argparse.Namespace) -> None:
    app = App(options)
    server = await asyncio.start_server(
        app.handle, options.host, options.port, reuse_port=options.mode == "holds_port" or None
    )
    app.server = server
    print(f"listening on {options.host}:{options.port}", flush=True)
    async with server:
        try:
            await server.serve_forever()
        except asyncio.CancelledError:  # what closing the listener comes to
            await asyncio.sleep(3600)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--mode", choices=MODES, default="healthy")
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--pid-file")
    parser.add_argument("--segment")
    parser.add_argument("--effective", default="{}")
    parser.add_argument("--num-steps", type=int)
    parser.add_argument("--megabytes", type=int, default=8)
    parser.add_argument("--change", choices=CHANGES, default="works")
    parser.add_argument("--change-at", type=int)
    options = parser.parse_args()
    before_listening(options)
    if options.mode == "headless":
        headless(options)
    asyncio.run(serve(options))


if __name__ == "__main__":
    main()
