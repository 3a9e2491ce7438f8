"""What is promised around drafting: what is counted, what is told, who may write where, what a new drafter takes."""

from __future__ import annotations

import itertools
import logging
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
from safetensors import safe_open

import engine.spec
from engine.build import Core
from engine.config import DRAFTERS, DraftLimits, DraftShape, SpecConfig
from engine.ipc.messages import SamplingParams, Submit
from engine.model.head_file import read_head, save_head
from engine.reconfigure import reconfigure
from engine.scheduler.lane import InlineLane
from engine.server.metrics import Metrics
from engine.spec import alarm, base
from engine.worker import warm_up
from tests.engine.conftest import generate
from tests.engine.test_overlap import LateInlineLane
from tests.engine.test_spec import prompts

NGRAM = SpecConfig("ngram", 4, 1, 5, ngram_min=1, ngram_max=2)
EAGLE = SpecConfig("eagle3", 4, 1, 5)

PARROT = '''
"""Says the last token again."""
import numpy as np
from engine.config import DRAFTERS
from engine.spec.base import register, roots_and_chains

@register("parrot")
class Parrot:
    name = "parrot"
    limits = DRAFTERS["parrot"]
    observes = False
    features = ()
    lookahead = 0
    alarm_floor = 0.0
    check = None
    identity = ""
    resident = None

    def __init__(self, surroundings):
        pass

    def add(self, rid, row, tokens):
        pass

    def propose(self, asked):
        drafts = [[root] * steps for root, steps in zip(asked.roots.tolist(), asked.steps.tolist(), strict=True)]
        return roots_and_chains(asked.roots, drafts)

    def observe(self, seen):
        pass

    def release(self, rid):
        pass
'''


def test_another_drafter_is_one_new_file_and_its_line(
    make_core: Callable[..., Core], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "parrot.py").write_text(PARROT)
    monkeypatch.setattr(engine.spec, "__path__", [*engine.spec.__path__, str(tmp_path)])
    monkeypatch.setitem(DRAFTERS, "parrot", DraftLimits(max_depth=8, max_topk=1))
    try:
        expected = generate(make_core(), prompts(3))
        for version in ("v1", "v2"):
            core = make_core(SpecConfig("parrot", 3, 1, 4, spec_version=version))
            assert generate(core, prompts(3)) == expected
            assert core.round.stats.drafted > 100
            core.scheduler.use_lane(InlineLane())
        core = make_core(NGRAM)
        assert core.info()["drafters"]["parrot"] == "on demand"
        assert reconfigure(core, {"speculation": "parrot", "num_steps": 8})[0]["effective"]["num_steps"] == 8
        assert generate(core, prompts(3)) == expected
        assert SpecConfig("parrot", 3, 2, 4).problems() == [
            "topk: 2 is not valid; the drafter 'parrot' only chains (topk 1)"
        ]
    finally:
        base._FACTORIES.pop("parrot", None)
        sys.modules.pop("engine.spec.parrot", None)


def test_a_round_is_counted_by_depth_by_rows_and_by_where_its_time_went(
    make_core: Callable[..., Core], head_file: Path
) -> None:
    core = make_core(replace(EAGLE, draft_head=str(head_file), spec_version="v2"))
    generate(core, prompts(4))
    told = core.counters()
    by_depth = [told[f'engine_spec_rounds_by_accepted_total{{accepted="{d}"}}'] for d in range(5)]
    assert sum(by_depth) == told["engine_spec_verify_steps_total"] > 0
    assert sum(d * n for d, n in enumerate(by_depth)) == told["engine_spec_accepted_tokens_total"]
    drafted, accepted = told["engine_spec_drafted_tokens_total"], told["engine_spec_accepted_tokens_total"]
    assert told["engine_spec_wasted_rows_total"] == drafted - accepted
    assert told["engine_spec_verified_rows_total"] == drafted + told["engine_spec_verify_steps_total"]
    assert told["engine_generated_tokens_total"] == 160
    for part in ("draft", "forward", "extend", "other", "lane_idle"):
        assert told[f"engine_{part}_seconds_total"] > 0
    assert told["engine_spec_gate_steps"] == 4
    text = Metrics().render(told).decode()
    assert 'engine_spec_rounds_by_accepted_total{accepted="4"}' in text
    assert f"engine_spec_gate_transitions_total {float(core.gate.transitions)}" in text
    reconfigure(core, {"spec_version": "v1"})
    window = core.info()["window"]
    assert not any(window.values()), "a change begins a new window, and the lifetime goes on"
    assert core.counters()["engine_generated_tokens_total"] == 160


def test_every_switch_of_depth_is_counted_and_outlives_a_change(make_core: Callable[..., Core]) -> None:
    core = make_core(replace(NGRAM, disable_batch_threshold=2))
    shape, depths = core.gate.shape, []

    def watched(running: int) -> DraftShape:
        found = shape(running)
        depths.append(found.num_steps)
        return found

    core.gate.shape = watched  # type: ignore[method-assign]
    for _ in range(3):
        for rid, tokens in enumerate((20, 40, 60)):
            core.scheduler.submit(Submit(rid, tuple(prompts(3)[rid]), SamplingParams(max_tokens=tokens)))
        while core.scheduler.busy:
            core.scheduler.step()
    switches = sum(a != b for a, b in itertools.pairwise(depths))
    assert switches >= 5
    assert core.counters()["engine_spec_gate_transitions_total"] == switches
    reconfigure(core, {"num_steps": 2})
    assert core.counters()["engine_spec_gate_transitions_total"] == switches


def test_the_scheduler_hands_out_tokens_while_the_lane_computes(make_core: Callable[..., Core]) -> None:
    """Without a clock: the lane is held in the middle of a round, and the tokens of the round before it come out."""
    core = make_core(replace(NGRAM, spec_version="v2"))
    run, inside, go = core.round.run, threading.Event(), threading.Event()
    core.scheduler.submit(Submit(1, (1, 2, 3), SamplingParams(max_tokens=30)))
    core.scheduler.step()
    core.scheduler.step()
    flight = core.scheduler._flight
    assert flight is not None
    flight.ticket.wait()

    def held(*given: object) -> object:
        inside.set()
        assert go.wait(20)
        return run(*given)  # type: ignore[arg-type]

    core.round.run = held  # type: ignore[method-assign, assignment]
    updates = core.scheduler.step()
    assert inside.wait(20)
    assert core.scheduler._flight is not None
    assert not core.scheduler._flight.ticket.done
    assert updates[0].token_ids, "handed out while a round is being computed"
    go.set()
    core.round.run = run  # type: ignore[method-assign]
    core.scheduler.land()
    core.scheduler.use_lane(InlineLane())


@pytest.mark.parametrize("end", ["abort", "finish"])
def test_pages_of_an_ended_request_are_nobodys_until_its_last_round_has_landed(
    make_core: Callable[..., Core], end: str
) -> None:
    core = make_core(NGRAM, prefix_cache=False, page_size=4, kv_tokens=400)
    core.scheduler.use_lane(LateInlineLane())  # a round is computed when it must be, not before
    core.scheduler.submit(Submit(1, (1, 2, 3), SamplingParams(max_tokens=60 if end == "abort" else 8)))
    core.scheduler.submit(Submit(2, (4, 5, 6), SamplingParams(max_tokens=60)))
    core.scheduler.step()
    request = core.scheduler._running[1]
    if end == "abort":
        core.scheduler.step()
        core.scheduler.abort(1)
    else:
        while 1 in core.scheduler._running:
            core.scheduler.step()
    pages = set(core.pages.pages_of(request.row))
    assert pages, "the round in flight may still write there"
    flight = core.scheduler._flight
    assert flight is not None
    assert any(work.request.rid == 1 for work in flight.work) or end == "finish"
    core.scheduler.submit(Submit(3, tuple(range(1, 30)), SamplingParams(max_tokens=4)))
    core.scheduler._launch()  # plans with what is free, before the round in flight has landed
    assert not pages & set(core.pages.pages_of(core.scheduler._running[3].row))
    core.scheduler.land()
    assert core.pages.pages_of(request.row) == []


@pytest.mark.parametrize("end", ["abort", "stop"])
def test_the_last_request_may_end_while_a_round_is_in_flight(make_core: Callable[..., Core], end: str) -> None:
    """Nobody runs then, and a gate that asks for the depth of a batch of none must not fail."""
    whole = generate(make_core(), prompts(1))[0]
    core = make_core(replace(NGRAM, spec_version="v2", policy="adaptive"))
    stop = (whole[10],) if end == "stop" else ()
    core.scheduler.submit(Submit(1, tuple(prompts(1)[0]), SamplingParams(max_tokens=40, stop_token_ids=stop)))
    core.scheduler.step()
    core.scheduler.step()
    if end == "abort":
        core.scheduler.abort(1)
    while core.scheduler.busy:
        core.scheduler.step()
    core.scheduler.check()
    core.scheduler.use_lane(InlineLane())
    assert generate(core, prompts(1))[0] == whole


def test_a_head_says_at_start_whether_it_works_here(
    make_core: Callable[..., Core], head_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for expected, state in ((3.5, "failed"), (1.0, "active")):
        head = read_head(head_file)
        file = tmp_path / f"{state}.safetensors"
        check = {"prompt": [1, 2, 3, 4], "accept_length": expected}
        save_head(file, head.shape, head.weights, head.hot, {**head.about, "check": check})
        core = make_core(replace(EAGLE, draft_head=str(file)))
        with caplog.at_level(logging.WARNING):
            warm_up(core)
        path = core.info()["paths"]["drafter"]
        assert path["state"] == state
        assert f"{expected:.2f} expected" in path["detail"]
    assert sum("is this head for this model?" in record.message for record in caplog.records) == 1
    assert core.counters()["engine_generated_tokens_total"] == 0


def test_a_hybrid_whose_head_has_collapsed_says_so_whatever_its_lookup_finds(
    make_core: Callable[..., Core],
    head_file: Path,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(alarm, "_WINDOW", 60)
    for second, works in (("eagle3", False), ("draft_model", True)):
        spec = SpecConfig("hybrid", 2, 1, 3, hybrid=("ngram", second), ngram_min=1, ngram_max=2)
        core = make_core(replace(spec, draft_head=str(head_file), draft_model=str(tiny_model)))
        texts = [[*prompt, *prompt] for prompt in prompts(7)]
        generate(core, texts, max_tokens=60)  # of random weights: the head's drafts are hardly ever right
        assert core.drafter.alarm_floor > 0
        assert bool(core.info()["paths"].get("acceptance")) != works
    assert sum("likely causes" in record.message for record in caplog.records) == 1


def test_the_head_that_ships_says_what_it_is() -> None:
    (file,) = Path(str(resources.files("engine.heads"))).glob("*.safetensors")
    assert file.stat().st_size <= 20e6
    head = read_head(file)
    assert head.about["target_fingerprint"] == file.stem
    assert "SmolLM2-135M" in head.about["target"] or head.about["target"] == "smollm2-135m"
    assert head.shape.layers == (1, 14, 26)
    assert head.about["licence"] == "Apache-2.0"
    assert head.about["trained_tokens"] > 1_000_000
    curve = [point["accept_3"] for point in head.about["curve"]]
    assert len(curve) > 5
    assert curve[-1] > 1.6
    assert {"depth_1", "depth_2", "depth_3"} <= head.about["curve"][-1].keys()
    assert len(head.hot) == head.shape.draft_vocab == len(head.hot.unique())
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata()["format"].startswith("spec-tuner eagle3 head")


@pytest.mark.parametrize(("steps", "topk", "tokens"), [(1, 8, 9), (8, 8, 64), (8, 2, 31), (2, 8, 64), (8, 1, 9)])
def test_the_largest_shapes_yield_the_same_text(
    make_core: Callable[..., Core], head_file: Path, steps: int, topk: int, tokens: int
) -> None:
    core = make_core(SpecConfig("eagle3", steps, topk, tokens, draft_head=str(head_file)))
    assert generate(core, prompts(3), max_tokens=25) == generate(make_core(), prompts(3), max_tokens=25)
    assert core.round.stats.drafted > 0
