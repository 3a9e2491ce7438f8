"""`tuner bench` beside vLLM's `bench serve`, on the same running server: two clients that share no code.

    python -m benchmarks.independent_client --vllm VENV/bin/vllm --tokenizer HF_FOLDER --output FILE

They take turns, with the same prompts and lengths, greedy. vLLM's own figure has ramp and drain in it; from its
detailed records the rate is taken again over the time in which every stream was busy, as ours is. What the server
counted over each of our windows stands beside it. The folder is what `engine export-hf` writes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from tuner.bench.prompts import load_prompts
from tuner.judge.intervals import t_interval
from tuner.launch.ports import free_port

ROOT = Path(__file__).parents[1]


def ours(url: str, level: int, tokens: int, seed: int) -> dict[str, float]:
    """Tokens a second, and how far the server's own count of them is off."""
    command = [sys.executable, "-m", "tuner", "bench", url, "--concurrency", str(level), "--json"]
    command += ["--max-tokens", str(tokens), "--profile", "full", "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    block = json.loads(done.stdout)["blocks"][0]
    gates = {gate["name"]: gate for gate in block["gates"]}
    return {
        "tokens_per_s": block["tokens_per_s"],
        "ttft_p50_ms": block["ttft_ms"]["p50"],
        "counter_apart": gates["tokens_disagree"]["value"],
        "valid": all(gate["ok"] for gate in block["gates"]),
    }


def theirs(vllm: str, url: str, tokenizer: Path, prompts: Path, level: int, tokens: int) -> dict[str, float]:
    """Tokens a second as vLLM reports them, and over the time in which all streams were busy."""
    with tempfile.TemporaryDirectory() as folder:
        command = [vllm, "bench", "serve", "--backend", "openai-chat", "--endpoint", "/v1/chat/completions"]
        command += ["--base-url", url, "--model", "smollm2-135m", "--tokenizer", str(tokenizer)]
        command += ["--dataset-name", "custom", "--dataset-path", str(prompts), "--skip-chat-template"]
        command += ["--custom-output-len", str(tokens), "--num-prompts", str(12 * level), "--temperature", "0"]
        command += ["--max-concurrency", str(level), "--save-result", "--save-detailed", "--result-dir", folder]
        env = {**{k: v for k, v in os.environ.items() if k != "PYTHONPATH"}, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
        if done.returncode:
            raise SystemExit(f"vllm bench serve failed: {done.stderr[-2000:]}")
        (file,) = Path(folder).glob("*.json")
        told = json.loads(file.read_text())
    return {"reported": told["output_throughput"], "tokens_per_s": busy_rate(told, level)}


def busy_rate(told: dict[str, Any], level: int) -> float:
    """Output tokens a second between the moment when the last stream had begun and that when the first had no more."""
    starts, firsts, gaps = told["start_times"], told["ttfts"], told["itls"]
    ends = [s + f + sum(g) for s, f, g in zip(starts, firsts, gaps, strict=True)]
    begin, end = sorted(starts)[level - 1], max(starts)
    arrived = 0.0
    for start, first, gap, count in zip(starts, firsts, gaps, told["output_lens"], strict=True):
        at = start + first
        times = [at]
        for each in gap:
            at += each
            times.append(at)
        per_event = count / len(times)
        arrived += per_event * sum(begin <= moment < end for moment in times)
    assert end > begin, (begin, end, max(ends))
    return arrived / (end - begin)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--level", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=4)
    given = parser.parse_args()
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    serve = [sys.executable, "-m", "engine", "serve", "--model", "smollm2-135m", "--port", str(port)]
    serve += ["--prefix-cache", "off"]  # ours asks prompts anew, theirs the same again
    rounds = []
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(serve, cwd=ROOT, stdout=subprocess.DEVNULL) as server,
    ):
        try:
            prompts = Path(folder) / "prompts.jsonl"
            texts = [prompt.text for prompt in load_prompts("mixed", split="tuning")]
            prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
            while True:
                try:
                    if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                        break
                except httpx.TransportError:
                    time.sleep(0.2)
            for i in range(given.rounds):
                one = ours(url, given.level, given.tokens, i)
                other = theirs(given.vllm, url, given.tokenizer, prompts, given.level, given.tokens)
                rounds.append({"ours": one, "theirs": other, "ratio": one["tokens_per_s"] / other["tokens_per_s"]})
                print(json.dumps(rounds[-1]), flush=True)
        finally:
            server.terminate()
    logs = [math.log(one["ratio"]) for one in rounds]
    interval = t_interval(logs, 0.95)
    result = {
        "concurrency": given.level,
        "max_tokens": given.tokens,
        "ratio": math.exp(interval.mean),
        "interval_95": [math.exp(interval.low), math.exp(interval.high)],
        "rounds": rounds,
    }
    given.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: result[key] for key in ("ratio", "interval_95")}))


if __name__ == "__main__":
    main()
