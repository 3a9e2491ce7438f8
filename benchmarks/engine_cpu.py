"""The engine's decoding speed beside other engines' on the same weights and this machine's CPU.

Contenders are servers that answer the same streamed requests: the engine with each kind of weights, and of these
whatever is given: llama.cpp's `llama-server` on the same GGUF file, and vLLM's CPU build on the same weights as a
folder; transformers, in this process, at one stream. All take turns in every round (A B C, A B C, …) and the others
stand still meanwhile: absolute figures mean little on a shared machine, ratios of neighbours do. Greedy, the tuning
prompts that ship, 200 tokens each whatever they say, other prompts every round, no reuse of prompts.

    engine export-hf smollm2-hf
    python benchmarks/engine_cpu.py --llama-server PATH/llama-server --vllm-python VENV/bin/python \\
        --vllm-model smollm2-hf --transformers --rounds 3 --json FILE
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import torch

from engine.model.source import ModelSource, resolve
from engine.model.weights import open_weights
from engine.text.tokenizer import load_tokenizer
from tuner.bench.prompts import load_prompts

START_S = 420.0


@dataclass
class Server:
    """A contender; `fields` are added to its requests."""

    name: str
    command: list[str]
    port: int
    environment: dict[str, str] = field(default_factory=dict)
    fields: dict[str, object] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    def start(self, log: Path) -> None:
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                self.command,
                stdout=out,
                stderr=out,
                env={**os.environ, **self.environment},
                process_group=0,  # not a session of its own, which Linux would schedule by its own priority
            )
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            if self.process.poll() is not None:
                raise SystemExit(f"{self.name} ended while starting:\n{log.read_text()[-2000:]}")
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{self.port}/health", timeout=2).status_code == 200:
                    return
            time.sleep(0.5)
        raise SystemExit(f"{self.name} did not start within {START_S:.0f} s:\n{log.read_text()[-2000:]}")

    def signal(self, number: int) -> None:
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, number)

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        self.signal(signal.SIGCONT)
        time.sleep(0.3)
        try:
            yield
        finally:
            self.signal(signal.SIGSTOP)

    def stop(self) -> None:
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        if self.process is not None:
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.signal(signal.SIGKILL)


@dataclass
class Heard:
    """Of one stream: when each event came, in seconds."""

    sent: float
    events: list[float] = field(default_factory=list)


async def one_stream(server: Server, prompt: str, tokens: int) -> Heard:
    body = json.dumps(
        {
            "model": "m",
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
            **server.fields,
        }
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    heard = Heard(time.perf_counter())
    status = await reader.readline()
    if b" 200 " not in status:
        raise SystemExit(f"{server.name}: {(status + await reader.read()).decode()[:500]}")
    while line := await reader.readline():
        if line.startswith(b"data: {") and b'"choices":[]' not in line:
            heard.events.append(time.perf_counter())
        elif line.startswith(b"data: [DONE]"):
            break
    writer.close()
    return heard


def rate(server: Server, prompts: list[str], tokens: int) -> tuple[float, float]:
    """Output tokens per second from the first output of all streams to the end, and the median time to first token."""

    async def together() -> list[Heard]:
        return await asyncio.gather(*(one_stream(server, prompt, tokens) for prompt in prompts))

    heard = asyncio.run(together())
    for h in heard:
        if not tokens * 0.9 <= len(h.events) <= tokens + 2:
            raise SystemExit(f"{server.name}: {len(h.events)} events for {tokens} tokens; they cannot be counted")
    began, ended = max(h.events[0] for h in heard), max(h.events[-1] for h in heard)
    before = sum(sum(at <= began for at in h.events) for h in heard)
    first = statistics.median(h.events[0] - h.sent for h in heard)
    return (tokens * len(heard) - before) / (ended - began), first


def forward_share(server: Server, prompt: str, tokens: int) -> float:
    """Share of the time of one stream that the engine spends in the model's forwards."""

    def total() -> float:
        page = httpx.get(f"http://127.0.0.1:{server.port}/metrics").text
        return next(float(line.split()[1]) for line in page.splitlines() if line.startswith("engine_forward_seconds_t"))

    before, began = total(), time.perf_counter()
    rate(server, [prompt], tokens)
    took = time.perf_counter() - began
    return (total() - before) / took


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def contenders(options: argparse.Namespace, source: ModelSource, cores: int) -> list[Server]:
    """Those that can be run here; says which are not."""
    most = max(options.streams)
    found = []
    for weights in options.weights:
        port = free_port()
        command = [sys.executable, "-m", "engine", "serve", "--model", options.model, "--served-model-name", "m"]
        command += ["--dtype", "bfloat16", "--weights", weights, "--prefix-cache", "off", "--port", str(port)]
        found.append(Server(f"engine {weights}", [*command, "--max-running-requests", str(max(most, 1))], port))
    if options.llama_server and source.kind == "gguf":
        # Its threads wait for each other hundreds of times a token: on a shared machine one may well beat all.
        for threads in sorted({1, cores}):
            port = free_port()
            command = [str(options.llama_server), "-m", str(source.path), "-np", str(most), "-c", str(1024 * most)]
            command += ["-t", str(threads), "--port", str(port)]
            found.append(Server(f"llama-server -t {threads}", command, port, fields={"cache_prompt": False}))
    else:
        print("llama-server: not run (--llama-server, and a .gguf model)")
    if options.vllm_python and options.vllm_model:
        port = free_port()
        command = [str(options.vllm_python), "-m", "vllm.entrypoints.openai.api_server", "--served-model-name", "m"]
        command += ["--model", str(options.vllm_model), "--dtype", "bfloat16", "--max-model-len", "2048"]
        command += [
            "--no-enable-prefix-caching",
            "--max-num-seqs",
            str(most),
            "--port",
            str(port),
            *options.vllm_option,
        ]
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{cores - 1}",
        }
        environment["PATH"] = f"{Path(options.vllm_python).parent}{os.pathsep}{os.environ['PATH']}"
        found.append(Server("vllm bf16", command, port, environment))
    else:
        print("vllm: not run (--vllm-python and --vllm-model)")
    return found


def transformers_model(source: ModelSource) -> torch.nn.Module:
    """Transformers' Llama holding exactly the tensors the engine serves."""
    from transformers import LlamaConfig, LlamaForCausalLM

    weights = open_weights(source, torch.bfloat16)
    c = weights.config
    model = LlamaForCausalLM(LlamaConfig(**{**c.to_huggingface(), "tie_word_embeddings": c.tied})).to(torch.bfloat16)
    state = {
        name: weights.take(name, tuple(tensor.shape), torch.bfloat16)
        for name, tensor in model.state_dict().items()
        if not (c.tied and name == "lm_head.weight")
    }
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    return model.eval()


def transformers_rate(model: torch.nn.Module, prompt: list[int], tokens: int) -> float:
    """Output tokens per second of `generate`, prefill excluded as for the servers."""
    ids = torch.tensor([prompt])
    arguments = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "attention_mask": torch.ones_like(ids)}
    with torch.inference_mode():
        t0 = time.perf_counter()
        model.generate(ids, max_new_tokens=1, **arguments)
        t1 = time.perf_counter()
        model.generate(ids, max_new_tokens=tokens, **arguments)
        t2 = time.perf_counter()
    return (tokens - 1) / ((t2 - t1) - (t1 - t0))


def spread(values: list[float], digits: int = 2) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def summary(rows: list[dict[str, float]], streams: list[int]) -> dict[str, list[float]]:
    """Ratios of figures of the same round, the most interesting first."""
    ratios: dict[str, list[float]] = {}
    for n in streams:
        key = f"tok/s at {n}"
        names = {name.partition(",")[0] for row in rows for name in row}
        peers = tuple(sorted(name for name in names if not name.startswith("engine")))

        def best(row: dict[str, float], names: tuple[str, ...], key: str = key) -> float:
            return max((row[f"{name}, {key}"] for name in names if f"{name}, {key}" in row), default=float("nan"))

        ours = ("engine bf16", "engine int8", "engine int4")
        pairs = {
            f"best weights / fastest peer at {n}": (ours, peers),
            f"bf16 / vllm bf16 at {n}": (("engine bf16",), ("vllm bf16",)),
            f"int4 / bf16 at {n}": (("engine int4",), ("engine bf16",)),
            f"int8 / bf16 at {n}": (("engine int8",), ("engine bf16",)),
        }
        for name, (upper, lower) in pairs.items():
            values = [best(row, upper) / best(row, lower) for row in rows]
            known = [value for value in values if value == value]
            if known:
                ratios[name] = known
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8, 32])
    parser.add_argument("--weights", type=lambda text: text.split(","), default=["bf16", "int8", "int4"])
    parser.add_argument("--llama-server", type=Path)
    parser.add_argument("--vllm-python", type=Path)
    parser.add_argument("--vllm-model", type=Path, help="the same weights as a folder: `engine export-hf`")
    parser.add_argument("--vllm-option", action="append", default=[], help="one more argument of vLLM's server")
    parser.add_argument("--transformers", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # through `finally`, which ends the servers
    source, cores = resolve(options.model), len(os.sched_getaffinity(0))
    tokenizer = load_tokenizer(source)
    texts = [
        tokenizer.render_chat([{"role": "user", "content": prompt.text}])
        for prompt in load_prompts("mixed", split="tuning")
    ]
    peer = transformers_model(source) if options.transformers else None
    servers = contenders(options, source, cores)
    rows: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as logs:
        try:
            for server in servers:
                server.start(Path(logs) / f"{server.name}.log")
                rate(server, texts[:2], 16)
                server.signal(signal.SIGSTOP)
                print(f"{server.name}: started", flush=True)
            for i in range(options.rounds):
                row: dict[str, float] = {}
                for n in options.streams:
                    prompts = [texts[(i * n + j) % len(texts)] for j in range(n)]
                    for server in servers:
                        with server.awake():
                            speed, first = rate(server, prompts, options.tokens)
                        row[f"{server.name}, tok/s at {n}"] = speed
                        row[f"{server.name}, s to first token at {n}"] = first
                        print(
                            f"  round {i + 1}, {n} streams: {server.name} {speed:.1f} tok/s, {first:.2f} s", flush=True
                        )
                    if n == 1 and peer is not None:
                        speed = transformers_rate(peer, tokenizer.encode(prompts[0]), options.tokens)
                        row["transformers bf16, tok/s at 1"] = speed
                        print(f"  round {i + 1}, 1 stream: transformers {speed:.1f} tok/s", flush=True)
                for server in servers:
                    if server.name.startswith("engine"):
                        with server.awake():
                            share = forward_share(server, texts[i], options.tokens)
                        row[f"{server.name}, share of forwards at 1"] = share
                rows.append(row)
                if options.json:
                    write(options.json, options, cores, rows)
        finally:
            for server in servers:
                server.stop()
    for name in rows[0]:
        print(f"{name}: {spread([row[name] for row in rows if name in row])}")
    for name, values in summary(rows, options.streams).items():
        print(f"{name}: {spread(values)}, n {len(values)}")


def write(file: Path, options: argparse.Namespace, cores: int, rows: list[dict[str, float]]) -> None:
    """After every round, so that a run that is cut short is not lost."""
    about = {"machine": _machine(), "cores": cores, "tokens": options.tokens, "date": time.strftime("%Y-%m-%d")}
    file.write_text(json.dumps({**about, "rows": rows, "ratios": summary(rows, options.streams)}, indent=1) + "\n")


def _machine() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    main()
