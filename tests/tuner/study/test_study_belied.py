"""Counters that settings cannot explain: a server that says what it was told, and runs with something else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.tuner.study.toy_study import block
from tuner.study.belied import belied

CHAIN = {"speculation": "eagle3", "num_steps": 3, "topk": 1, "num_draft_tokens": 4}


def seen(
    level: int = 4, *, steps: float = 1000, drafts: float = 3.0, at_least: tuple[float, ...] = (600, 300, 100)
) -> Any:
    """A block whose server drafted so many a step, and accepted at least 1, 2, … drafts in so many steps."""
    accepted = sum(at_least)
    counters = {
        "server_verify_steps": steps,
        "server_drafted": drafts * steps,
        "server_accepted": accepted,
        "server_generated": steps + accepted,
        **{f"accepted_at_depth_{i}": n for i, n in enumerate(at_least, start=1)},
    }
    return replace(block(level, "screen", 100.0), accept_length=1 + accepted / steps, counters=counters)


def kind(told: Mapping[str, Any], of: Any, engine: str = "bundled") -> str | None:
    gate = belied(engine, told, of)
    assert gate is None or not gate.ok
    return gate.name if gate else None


def test_a_server_that_runs_as_it_was_told_is_believed() -> None:
    assert kind(CHAIN, seen()) is None
    assert kind(CHAIN, seen(drafts=2.9)) is None, "less is drafted at the end of an answer"
    assert kind({**CHAIN, "speculation": "ngram"}, seen(drafts=0.8)) is None, "a lookup finds what it finds"
    assert kind({**CHAIN, "speculation": "ngram"}, seen(drafts=0.8), "vllm") is None
    assert kind({**CHAIN, "policy": "adaptive"}, seen(drafts=1.2)) is None
    assert kind(CHAIN, seen(drafts=1.2), "llama_server") is None, "its drafts end where the drafter is in doubt"
    deeper = seen(drafts=7.0, at_least=(900, 800, 700, 600, 500))
    assert kind({**CHAIN, "policy": "adaptive"}, deeper, "sglang") is None, "its own table goes deeper"
    assert kind({**CHAIN, "policy": "adaptive"}, deeper) == "no_op_setting"
    rounded = {**CHAIN, "steps_by_batch": "1:1,10:3"}
    assert kind(rounded, replace(seen(9), counters={"server_verify_steps": 500.0}, accept_length=3.0), "sglang") is None
    assert kind({"num_steps": 1}, seen()) is None, "a name that means something else, for all we know"
    assert kind(CHAIN, seen(steps=20, drafts=9.0)) is None, "too few steps"
    tree = {**CHAIN, "topk": 4, "num_draft_tokens": 16}
    assert kind(tree, seen(drafts=15.0)) is None
    assert kind({"speculation": "eagle3", "num_steps": 3, "topk": 4}, seen(drafts=40.0)) is None, "its size is not told"


@pytest.mark.parametrize(
    ("told", "of"),
    [
        (CHAIN, seen(drafts=5.0, at_least=(600, 300, 100, 40, 5))),
        (CHAIN, seen(drafts=5.0)),
        (CHAIN, seen(drafts=5.0, at_least=())),
        ({**CHAIN, "speculation": "ngram"}, seen(drafts=2.0, at_least=(600, 300, 100, 40))),
        ({**CHAIN, "topk": 4, "num_draft_tokens": 8}, seen(drafts=15.0)),
        ({**CHAIN, "steps_by_batch": "1:3,4:1", "num_steps": 4}, seen(drafts=4.0, at_least=(900, 800, 700, 600))),
    ],
)
def test_more_than_was_asked_for_is_the_old_setting_at_work(told: Mapping[str, Any], of: Any) -> None:
    assert kind(told, of) == "no_op_setting"


@pytest.mark.parametrize("drafter", ["eagle3", "draft_model", "mtp"])
def test_a_drafter_that_always_drafts_to_the_end_and_does_not_is_capped(drafter: str) -> None:
    told = {**CHAIN, "speculation": drafter, "num_steps": 5, "num_draft_tokens": 6}
    assert kind(told, seen(drafts=3.0)) == "capped_effective"
    assert kind(told, seen(drafts=4.8)) is None


def test_tokens_counted_at_the_end_of_requests_get_room_for_their_first() -> None:
    def sglang(length: float) -> Any:
        return replace(seen(), accept_length=length, counters={"server_verify_steps": 500.0})

    assert kind(CHAIN, sglang(4.3), "sglang") is None
    assert kind(CHAIN, sglang(5.5), "sglang") == "no_op_setting"


@pytest.mark.parametrize("told", [{"disable_batch_threshold": 4}, {"steps_by_batch": "1:3,5:0"}])
def test_speculation_above_the_load_at_which_it_is_to_end_is_seen(told: Mapping[str, Any]) -> None:
    assert kind({**CHAIN, **told}, seen(8)) == "no_op_setting"
    assert kind({**CHAIN, **told}, seen(4)) is None
    assert kind({**CHAIN, **told}, seen(6)) is None, "a request that ends may bring it down to four"
    few = replace(seen(8), counters={**seen(8).counters, "server_generated": 20_000.0})
    assert kind({**CHAIN, **told}, few) is None


def test_a_depth_of_zero_at_every_load_allows_no_step_at_all() -> None:
    assert kind({**CHAIN, "steps_by_batch": "1:0,16:3"}, seen(1)) == "no_op_setting"
    assert kind({**CHAIN, "disable_batch_threshold": "never"}, seen(64)) is None
