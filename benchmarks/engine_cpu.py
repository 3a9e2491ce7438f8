"""The engine's decoding against transformers' on the same bfloat16 weights, and how it scales with streams.

Runs both in turn in one process, several times, and prints ratios with their spread: absolute times mean little on a
shared machine. Greedy, the tuning prompts that ship, 200 tokens each unless told otherwise.

    python benchmarks/engine_cpu.py [--tokens 200] [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch

from engine.build import Core, build
from engine.config import EngineConfig
from engine.ipc.messages import SamplingParams, Submit
from engine.model.source import resolve
from engine.model.weights import open_weights
from engine.text.tokenizer import load_tokenizer
from tuner.bench.prompts import load_prompts


def transformers_model(source: object) -> torch.nn.Module:
    """Transformers' Llama holding exactly the tensors the engine serves."""
    from transformers import LlamaConfig, LlamaForCausalLM

    weights = open_weights(source, torch.bfloat16)
    c = weights.config
    config = LlamaConfig(
        vocab_size=c.vocab,
        hidden_size=c.hidden,
        intermediate_size=c.intermediate,
        num_hidden_layers=c.layers,
        num_attention_heads=c.q_heads,
        num_key_value_heads=c.kv_heads,
        head_dim=c.head_dim,
        max_position_embeddings=c.max_context,
        rms_norm_eps=c.rms_eps,
        rope_theta=c.rope.theta,
        tie_word_embeddings=c.tied,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    state = {
        name: weights.take(name, tuple(tensor.shape), torch.bfloat16)
        for name, tensor in model.state_dict().items()
        if not (c.tied and name == "lm_head.weight")
    }
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    return model


def engine_rate(core: Core, prompts: list[list[int]], tokens: int) -> float:
    """Output tokens per second of these prompts run together, from the first output token of all to the end."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    for rid, prompt in enumerate(prompts):
        core.scheduler.submit(Submit(rid, tuple(prompt), params))
    made = dict.fromkeys(range(len(prompts)), 0)
    began, counted_at_start = None, 0
    while core.scheduler.busy:
        for update in core.scheduler.step():
            made[update.rid] += len(update.token_ids)
        if began is None and all(made.values()):
            began, counted_at_start = time.perf_counter(), sum(made.values())
    return (sum(made.values()) - counted_at_start) / (time.perf_counter() - began)


def transformers_rate(model: torch.nn.Module, prompt: list[int], tokens: int) -> float:
    """Output tokens per second of `generate`, prefill excluded as for the engine."""
    ids = torch.tensor([prompt])
    arguments = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    mask = torch.ones_like(ids)
    with torch.inference_mode():
        t0 = time.perf_counter()
        model.generate(ids, attention_mask=mask, max_new_tokens=1, **arguments)
        t1 = time.perf_counter()
        model.generate(ids, attention_mask=mask, max_new_tokens=tokens, **arguments)
        t2 = time.perf_counter()
    return (tokens - 1) / ((t2 - t1) - (t1 - t0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    core = build(EngineConfig(model=options.model, dtype="bfloat16"))
    source = resolve(options.model)
    tokenizer = load_tokenizer(source)
    prompts = [
        tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": prompt.text}]))
        for prompt in load_prompts("mixed", split="tuning")
    ]
    peer = transformers_model(source)
    engine_rate(core, prompts[:32], 8)
    transformers_rate(peer, prompts[0], 8)
    rows = []
    for i in range(options.rounds):
        one = engine_rate(core, [prompts[i]], options.tokens)
        them = transformers_rate(peer, prompts[i], options.tokens)
        eight = engine_rate(core, prompts[i : i + 8], options.tokens)
        many = engine_rate(core, prompts[i : i + 32], options.tokens)
        again = engine_rate(core, [prompts[i]], options.tokens)
        one = (one + again) / 2
        rows.append({"transformers_1": them, "engine_1": one, "engine_8": eight, "engine_32": many})
        print("  ".join(f"{name} {value:.1f}" for name, value in rows[-1].items()), flush=True)
    ratios = {
        "engine / transformers at 1 stream": [r["engine_1"] / r["transformers_1"] for r in rows],
        "8 streams / 1 stream": [r["engine_8"] / r["engine_1"] for r in rows],
        "32 streams / 1 stream": [r["engine_32"] / r["engine_1"] for r in rows],
    }
    for name, values in ratios.items():
        print(
            f"{name}: median {statistics.median(values):.2f} "
            f"(min {min(values):.2f}, max {max(values):.2f}, n {len(values)})"
        )
    if options.json:
        options.json.write_text(
            json.dumps(
                {"machine": platform.processor() or platform.machine(), "rows": rows, "ratios": ratios}, indent=1
            )
        )


if __name__ == "__main__":
    main()
