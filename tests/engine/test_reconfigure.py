"""Settings change between rounds; requests in flight lose nothing, and a refused change changes nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from engine.build import Core
from engine.config import SpecConfig
from engine.errors import InvalidConfig
from engine.ipc.messages import SamplingParams, Submit
from engine.reconfigure import reconfigure
from engine.scheduler.lane import InlineLane
from tests.engine.conftest import generate
from tests.engine.test_spec import prompts

CHANGES = [
    {"speculation": "ngram"},
    {"num_steps": 6},
    {"speculation": "eagle3", "num_steps": 3},
    {"topk": 4, "num_draft_tokens": 12},
    {"spec_version": "v2"},
    {"speculation": "hybrid"},
    {"hybrid_steps": 1},
    {"hybrid_steps": None},
    {"speculation": "draft_model", "topk": 1},
    {"steps_by_batch": {"1": 2, "3": 0}},
    {"disable_batch_threshold": 2},
    {"speculation": "none"},
    {"spec_version": "v1"},
    {},
    {"speculation": "eagle3", "policy": "adaptive"},
]


@pytest.fixture
def core(make_core: Callable[..., Core], head_file: Path, small_model: Path) -> Core:
    return make_core(SpecConfig(draft_head=str(head_file), draft_model=str(small_model)))


def test_every_change_in_flight_leaves_every_output_as_it_is(core: Core, make_core: Callable[..., Core]) -> None:
    asked = prompts(6)
    expected = generate(make_core(), asked, max_tokens=80)
    outputs: dict[int, list[int]] = {rid: [] for rid in range(len(asked))}
    for rid, prompt in enumerate(asked):
        core.scheduler.submit(Submit(rid, tuple(prompt), SamplingParams(max_tokens=80)))
    changes = itertools.cycle(CHANGES)
    made = 0
    while core.scheduler.busy:
        updates = core.scheduler.step()
        if len(outputs[0]) % 3 == 1:
            change = next(changes)
            reply, more = reconfigure(core, change)
            made += 1
            assert reply["epoch"] == made
            assert reply["applied"] == change
            assert {k: v for k, v in reply["effective"].items() if k in ("speculation", "num_steps")}.items() >= {
                k: v for k, v in change.items() if k in ("speculation", "num_steps")
            }.items()
            updates = (*updates, *more)
        for update in updates:
            assert not update.error
            outputs[update.rid].extend(update.token_ids)
    assert list(outputs.values()) == expected
    assert made >= len(CHANGES)
    reconfigure(core, {"spec_version": "v1"})
    core.scheduler.check()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"page_size": 4}, "page_size: cannot be changed on a running server"),
        ({"num_steps": 9, "speculation": "ngram"}, "num_steps: 9 is outside 1 to 8"),
        ({"num_steps": "3"}, "num_steps: '3' is not valid"),
        ({"num_steps": True}, "num_steps: True is not valid"),
        ({"speculation": "medusa"}, "speculation: 'medusa' is unknown"),
        ({"speculation": "ngram", "topk": 2}, "only chains"),
        ({"speculation": "eagle3", "topk": 2, "num_steps": 2, "num_draft_tokens": 60}, "holds 2 to 7"),
        ({"steps_by_batch": {"x": 1}}, "steps_by_batch"),
        ({"steps_by_batch": [1, 2]}, "steps_by_batch"),
        ({"steps_by_batch": {"2": 0}}, "must begin with 1"),
        ({"disable_batch_threshold": 0}, "below 1"),
        ({"spec_version": "v3"}, "unknown"),
        ({"policy": "clever"}, "valid: fixed, adaptive"),
    ],
)
def test_a_change_that_cannot_be_is_refused_and_nothing_has_changed(core: Core, change: dict, says: str) -> None:
    before = core.effective()
    with pytest.raises(InvalidConfig, match=says):
        reconfigure(core, change)
    assert core.effective() == before
    assert core.epoch == 0
    assert len(generate(core, [[1, 2, 3]])[0]) == 40


def test_what_is_not_at_hand_is_refused_with_what_is_missing(make_core: Callable[..., Core]) -> None:
    core = make_core()
    for name, says in (("eagle3", "no head ships"), ("draft_model", "none is named"), ("hybrid", "no head ships")):
        with pytest.raises(InvalidConfig, match=says):
            reconfigure(core, {"speculation": name})
    assert core.info()["drafters"]["none"] == "loaded"
    assert "no head ships" in core.info()["drafters"]["eagle3"]


def test_a_change_counts_as_fresh(core: Core, make_core: Callable[..., Core], head_file: Path) -> None:
    """After a change, rounds are exactly those of an engine launched with the new settings."""
    generate(core, prompts(3))
    reconfigure(core, {"speculation": "eagle3", "num_steps": 4})
    generate(core, prompts(4))
    fresh = make_core(SpecConfig("eagle3", 4, 1, 5, draft_head=str(head_file)))
    generate(fresh, prompts(4))
    window, lifetime = core.info()["window"], fresh.counters()
    for name in ("rounds", "rows", "generated_tokens", "spec_verify_steps", "spec_accepted_tokens"):
        assert window[f"engine_{name}_total"] == lifetime[f"engine_{name}_total"]
    assert core.counters()["engine_rounds_total"] > lifetime["engine_rounds_total"]


def test_depths_follow_from_each_other() -> None:
    spec = SpecConfig()
    chain = spec.merged({"speculation": "eagle3"})
    assert (chain.num_steps, chain.topk, chain.num_draft_tokens) == (3, 1, 4)
    assert chain.merged({"num_steps": 5}).num_draft_tokens == 6
    tree = chain.merged({"topk": 4})
    assert (tree.num_draft_tokens, tree.problems()) == (16, [])
    off = tree.merged({"speculation": "none"})
    assert (off.num_steps, off.topk, off.num_draft_tokens, off.problems()) == (0, 1, 1, [])
    scheduled = chain.merged({"steps_by_batch": ((1, 0), (4, 3))})
    assert scheduled.merged({"disable_batch_threshold": 8}).steps_by_batch is None
    assert replace(scheduled, disable_batch_threshold=3).problems()


def test_the_lane_changes_with_the_version(core: Core) -> None:
    assert isinstance(core.scheduler._lane, InlineLane)
    reconfigure(core, {"spec_version": "v2"})
    assert core.effective()["spec_version"] == "v2"
    assert not isinstance(core.scheduler._lane, InlineLane)
    reconfigure(core, {"spec_version": "v1"})
    assert isinstance(core.scheduler._lane, InlineLane)
