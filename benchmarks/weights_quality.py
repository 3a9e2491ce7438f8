"""What int8 and int4 weights do to the output: against the greedy answers of bfloat16 weights to the shipped prompts.

Each kind of weights reads the same answers, token by token. Its perplexity is that of these answers; agreement is the
share of positions where its own first choice is the answer's token; the first position where it is not is where its
own greedy answer would leave. float32, the file's values without any rounding, shows how much of that is chance.

    python benchmarks/weights_quality.py [--prompts 48] [--tokens 200] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from dataclasses import replace
from pathlib import Path

import torch

from engine.build import Core, build
from engine.config import EngineConfig
from engine.ipc.messages import SamplingParams, Submit
from engine.memory.pool import KVPool
from engine.ops.base import causal_view
from engine.text.tokenizer import load_tokenizer
from tuner.bench.prompts import load_prompts

PAGE = 16


def greedy(core: Core, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """Answers, ending where the model ends them."""
    answers: dict[int, list[int]] = {}
    ends = tuple(load_tokenizer(core.source).stop_token_ids)
    for rid, prompt in enumerate(prompts):
        answers[rid] = []
        params = SamplingParams(max_tokens=tokens, stop_token_ids=ends)
        refused = core.scheduler.submit(Submit(rid, tuple(prompt), params))
        if refused is not None:
            raise SystemExit(refused.error)
    while core.scheduler.busy:
        for update in core.scheduler.step():
            answers[update.rid].extend(update.token_ids)
    return [answers[rid] for rid in range(len(prompts))]


def read(core: Core, prompt: list[int], answer: list[int]) -> tuple[list[float], list[bool]]:
    """Of each token of the answer: its log-probability, and whether it is the first choice."""
    model, config = core.model, core.model.config
    tokens = torch.tensor(prompt + answer)
    pages = -(-len(tokens) // PAGE)
    pool = KVPool(config.layers, pages, PAGE, config.kv_heads, config.head_dim, model.dtype)
    view = causal_view(tokens, torch.arange(pages, dtype=torch.int32).unsqueeze(0), PAGE)
    view = replace(view, logit_rows=torch.arange(len(prompt) - 1, len(tokens) - 1))
    with torch.inference_mode():
        logits = model.forward(view, pool)
    wanted = torch.tensor(answer)
    logprobs = logits.log_softmax(-1).gather(1, wanted.unsqueeze(1)).squeeze(1)
    return logprobs.tolist(), (model.ops.argmax(logits) == wanted).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    reference = build(EngineConfig(model=options.model, dtype="bfloat16", weights="bf16"))
    tokenizer = load_tokenizer(reference.source)
    prompts = [
        tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": prompt.text}]))
        for prompt in load_prompts("mixed", split="tuning")[: options.prompts]
    ]
    answers = greedy(reference, prompts, options.tokens)
    found: dict[str, dict[str, float]] = {}
    for dtype, weights in (("float32", "auto"), ("bfloat16", "bf16"), ("bfloat16", "int8"), ("bfloat16", "int4")):
        core = build(EngineConfig(model=options.model, dtype=dtype, weights=weights))
        logprobs: list[float] = []
        same: list[bool] = []
        leaves = []
        for prompt, answer in zip(prompts, answers, strict=True):
            values, agree = read(core, prompt, answer)
            logprobs += values
            same += agree
            leaves.append(agree.index(False) if False in agree else len(agree))
        name = "fp32" if dtype == "float32" else weights
        whole = sum(at == len(answer) for at, answer in zip(leaves, answers, strict=True))
        found[name] = {
            "perplexity": math.exp(-sum(logprobs) / len(logprobs)),
            "first choice agrees": sum(same) / len(same),
            "answers that are the same": whole / len(answers),
            "tokens before leaving, median": statistics.median(leaves),
        }
        print(f"{name:<5}" + ", ".join(f"{key} {value:.4g}" for key, value in found[name].items()), flush=True)
    if options.json:
        about = {"model": options.model, "prompts": len(prompts), "answer_tokens": sum(map(len, answers))}
        options.json.write_text(json.dumps({**about, "weights": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
