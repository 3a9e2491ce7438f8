"""The draft head that ships, served by vLLM (from `engine export-head`) and by ours: is its acceptance the same?

    python -m benchmarks.head_on_vllm --vllm VENV/bin/vllm --target HF_FOLDER --output FILE

Both serve the same weights in bfloat16 (the folder is what `engine export-hf` writes) and answer the same held-out
prompts greedily, one at a time. Tokens a verify step come from each server's own counters.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tuner.bench.prompts import load_prompts
from tuner.launch.ports import free_port

ROOT = Path(__file__).parents[1]
OURS = {
    "rounds": "engine_spec_verify_steps_total",
    "accepted": "engine_spec_accepted_tokens_total",
}
THEIRS = {
    "rounds": "vllm:spec_decode_num_drafts_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
}


@contextmanager
def served(command: list[str], env: dict[str, str], port: int, log: Path) -> Iterator[str]:
    """The address of a server that is healthy; it is ended afterwards."""
    url = f"http://127.0.0.1:{port}"
    with (
        log.open("wb") as out,
        subprocess.Popen(command, env=env, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT) as server,
    ):
        try:
            while True:
                if server.poll() is not None:
                    raise SystemExit(f"{command[0]} ended with {server.returncode}: {log.read_text()[-2000:]}")
                try:
                    if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                        break
                except httpx.TransportError:
                    time.sleep(0.5)
            yield url
        finally:
            server.terminate()


def counters(url: str, names: dict[str, str]) -> dict[str, float]:
    """Sums of the named counters over their labels."""
    text = httpx.get(f"{url}/metrics", timeout=30).text
    found = dict.fromkeys(names, 0.0)
    for line in text.splitlines():
        name = line.split("{")[0].split(" ")[0]
        for key, wanted in names.items():
            if name == wanted:
                found[key] += float(line.rsplit(" ", 1)[1])
    return found


def answers(url: str, names: dict[str, str], texts: list[str], tokens: int) -> tuple[list[str], dict[str, Any]]:
    """What a server says to each prompt, and what its counters tell of it."""
    with httpx.Client(base_url=url, timeout=300) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]

        def ask(text: str, most: int) -> str:
            body = {
                "model": model,
                "messages": [{"role": "user", "content": text}],
                "max_tokens": most,
                "temperature": 0,
            }
            told = client.post("/v1/chat/completions", json=body).raise_for_status().json()
            return str(told["choices"][0]["message"]["content"])

        ask(texts[0], 8)
        before = counters(url, names)
        said = [ask(text, tokens) for text in texts]
        after = counters(url, names)
    spent = {key: after[key] - before[key] for key in names}
    return said, {**spent, "tokens_a_step": 1 + spent["accepted"] / spent["rounds"]}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--num-steps", type=int, nargs="+", default=[3, 5])
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=200)
    given = parser.parse_args()
    texts = [prompt.text for prompt in load_prompts("mixed", split="held_out")][: given.prompts]
    python = {**os.environ, "PYTHONPATH": str(ROOT)}
    cpu = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "HF_HUB_OFFLINE": "1",
    }
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        head = folder / "head"
        subprocess.run([sys.executable, "-m", "engine", "export-head", str(head)], env=python, cwd=ROOT, check=True)
        for steps in given.num_steps:
            port = free_port()
            ours = [sys.executable, "-m", "engine", "serve", "--model", "smollm2-135m", "--port", str(port)]
            ours += ["--speculation", "eagle3", "--num-steps", str(steps)]
            with served(ours, python, port, folder / "ours.log") as url:
                said, mine = answers(url, OURS, texts, given.tokens)
            port = free_port()
            config = {"method": "eagle3", "model": str(head), "num_speculative_tokens": steps}
            theirs = [given.vllm, "serve", str(given.target), "--port", str(port), "--host", "127.0.0.1"]
            theirs += ["--dtype", "bfloat16", "--max-model-len", "2048", "--max-num-seqs", "4"]
            theirs += ["--no-enable-prefix-caching", "--enforce-eager", "--speculative-config", json.dumps(config)]
            with served(theirs, cpu, port, folder / "vllm.log") as url:
                told, other = answers(url, THEIRS, texts, given.tokens)
            same = sum(a == b for a, b in zip(said, told, strict=True))
            ratio = other["tokens_a_step"] / mine["tokens_a_step"]
            rows.append({"num_steps": steps, "ours": mine, "vllm": other, "ratio": ratio, "same_answers": same})
            print(json.dumps(rows[-1]), flush=True)
    result = {"prompts": len(texts), "max_tokens": given.tokens, "rows": rows}
    given.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
