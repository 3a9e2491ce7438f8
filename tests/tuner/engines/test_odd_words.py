"""Whatever a server says of itself, reading it back raises nothing: it is a server's word, and may be anything."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tuner.engines.base import engine_kinds, get_engine
from tuner.records import LaunchRecord
from tuner.study.engine import not_in_effect

WORDS = (
    *("effective", "paths", "differences", "setting", "reason", "state", "detail", "failed", "fell_back", "never"),
    *("speculation", "num_steps", "disable_batch_threshold", "kv_tokens", "page_size", "internal_states"),
    *("speculative_config", "slots", "speculative", "total_slots", "default_generation_settings", "model_config"),
    *("vllm_config", "cache_config", "parallel_config", "scheduler_config", "server_args", "log_backend", "n_ctx"),
)
SETTINGS = {"speculation": "ngram", "num_steps": 3, "disable_batch_threshold": "never"}


def odd(rng: random.Random, depth: int = 0) -> Any:
    """JSON of every kind, with words that adapters look for."""
    simple = [None, True, False, 0, -1, 3, 2**63, 0.5, "", "3", "never", "none", rng.choice(WORDS)]
    pick = rng.random()
    if depth > 3 or pick < 0.4:
        return rng.choice(simple)
    if pick < 0.6:
        return [odd(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    return {rng.choice(WORDS): odd(rng, depth + 1) for _ in range(rng.randint(0, 6))}


def record(kind: str) -> LaunchRecord:
    expected = {**SETTINGS, "kv_tokens": 4096, "page_size": 16, "topk": 1, "threads": 2}
    return LaunchRecord(kind, "1", "m", ("x",), {}, "127.0.0.1", 1, dict(SETTINGS), expected, "m")


@pytest.mark.parametrize("kind", engine_kinds())
def test_no_word_of_a_server_raises_anything(kind: str) -> None:
    rng, engine, launch = random.Random(kind), get_engine(kind), record(kind)
    for _ in range(3000):
        info = odd(rng)
        if isinstance(info, dict):
            not_in_effect(engine.mismatches(launch, info))
