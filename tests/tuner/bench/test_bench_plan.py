from collections import Counter

import pytest

from tuner.bench.plan import WindowPlan, window_plan
from tuner.bench.prompts import load_prompts
from tuner.bench.requests import prompt_order
from tuner.errors import UsageError


def test_profiles():
    short, full = window_plan("short"), window_plan("full")
    assert (short.window_s, short.warmup_s) == (8, 4)
    assert (full.window_s, full.warmup_s) == (30, 10)
    with pytest.raises(UsageError, match="valid: short, full"):
        window_plan("long")


def test_the_window_lasts_some_requests_but_not_for_ever():
    plan = WindowPlan(window_s=8, window_requests=2, window_cap_s=20)
    assert plan.window_for(None) == plan.window_for(1.0) == 8
    assert plan.window_for(6.0) == 12
    assert plan.window_for(60.0) == 20


def test_the_order_is_a_permutation_fixed_by_the_seed():
    prompts = load_prompts("mixed", split="tuning")
    assert prompt_order(prompts, 3) == prompt_order(prompts, 3)
    assert prompt_order(prompts, 3) != prompt_order(prompts, 4)
    assert sorted(p.id for p in prompt_order(prompts, 3)) == sorted(p.id for p in prompts)


def test_any_stretch_of_the_order_holds_about_the_same_mix():
    prompts = load_prompts("mixed", split="tuning")
    for seed in range(20):
        order = prompt_order(prompts, seed)
        for start in range(0, 72 - 21, 7):
            counts = Counter(p.kind for p in order[start : start + 21])
            assert all(2 <= counts[kind] <= 4 for kind in {p.kind for p in prompts}), (seed, start, counts)
