"""Overlap scheduling: the same output, whatever comes and goes while a round is in flight."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.build import Core
from engine.config import SpecConfig
from engine.ipc.messages import SamplingParams, Submit, TokenUpdate
from engine.scheduler.lane import InlineLane, ThreadLane, Ticket
from tests.engine.conftest import VOCAB, generate
from tests.engine.test_spec import prompts

SPECS = [
    SpecConfig(),
    SpecConfig("ngram", 5, 1, 6, ngram_min=1, ngram_max=2),
    SpecConfig("eagle3", 3, 1, 4),
    SpecConfig("eagle3", 3, 3, 9),
    SpecConfig("hybrid", 3, 1, 4, ngram_min=1, ngram_max=2),
]


class LateInlineLane:
    """Deterministic overlap: work runs in the caller, but only when its result is asked for or more work comes."""

    overlaps = True
    idle_s = 0.0

    def __init__(self) -> None:
        self._pending: list[Ticket] = []

    def submit(self, work: Callable[[], object]) -> Ticket:
        self._run()
        lane = self

        class Late(Ticket):
            def wait(self) -> object:
                lane._run()
                return super().wait()

        ticket = Late(work)
        self._pending.append(ticket)
        return ticket

    def _run(self) -> None:
        while self._pending:
            self._pending.pop(0).run()

    def close(self) -> None:
        self._run()


def random_traffic(core: Core, seed: int) -> dict[int, list[int]]:
    """Outputs of 14 requests that come at random times, some aborted on the way, in a pool that is too small."""
    rng = np.random.default_rng(seed)
    outputs: dict[int, list[int]] = {}
    asked = [(i, rng.integers(1, VOCAB, rng.integers(1, 40)).tolist(), int(rng.integers(1, 40))) for i in range(14)]
    aborted = set(rng.choice(14, 4, replace=False).tolist())
    finished: set[int] = set()

    def take(updates: tuple[TokenUpdate, ...]) -> None:
        for update in updates:
            assert not update.error, update.error
            assert update.rid not in finished
            outputs[update.rid].extend(update.token_ids)
            if update.finish:
                finished.add(update.rid)

    while asked or core.scheduler.busy:
        if asked and rng.random() < 0.4:
            rid, prompt, most = asked.pop(0)
            outputs[rid] = []
            params = SamplingParams(max_tokens=most, stop_token_ids=(int(rid) + 3, 50, 60))
            assert core.scheduler.submit(Submit(rid, tuple(prompt), params)) is None
        if aborted and rng.random() < 0.1 and (rid := min(aborted)) in outputs:
            aborted.discard(rid)
            finished.add(rid)
            core.scheduler.abort(rid)
            outputs[rid] = []
        take(core.scheduler.step())
    take(core.scheduler.land())
    core.scheduler.check()
    return {rid: output for rid, output in outputs.items() if output}


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_random_arrivals_ends_and_aborts_leave_every_output_as_it_is(
    make_core: Callable[..., Core], head_file: Path, spec: SpecConfig, seed: int
) -> None:
    # The prefix cache is off, so that pages are as short as they look.
    spec = replace(spec, draft_head=str(head_file))
    core = make_core(spec, kv_tokens=160, prefill_tokens=9, prefix_cache=seed % 2 == 0)
    core.scheduler.use_lane(LateInlineLane())
    outputs = random_traffic(core, seed)
    plain = random_traffic(make_core(kv_tokens=4000), seed)
    for rid in outputs.keys() & plain.keys():
        assert outputs[rid] == plain[rid]
    assert len(outputs.keys() & plain.keys()) >= 9


@pytest.mark.timing
def test_scheduler_and_lane_work_at_the_same_time(make_core: Callable[..., Core], head_file: Path) -> None:
    """While a round runs on the lane, the scheduler hands out the tokens of the round before it."""
    core = make_core(replace(SPECS[2], draft_head=str(head_file)), max_running_requests=32)
    trace: list[tuple[float, float]] = []
    core.scheduler.use_lane(ThreadLane(trace))
    for rid, prompt in enumerate(prompts(20)):
        core.scheduler.submit(Submit(rid, tuple(prompt), SamplingParams(max_tokens=60)))
    handled: list[float] = []
    while core.scheduler.busy:
        if core.scheduler.step():
            handled.append(time.perf_counter())
            time.sleep(0.002)  # as if there were more to hand out
    core.scheduler.use_lane(InlineLane())
    inside = sum(any(began < at + 0.002 and at < ended for began, ended in trace) for at in handled)
    assert inside > len(handled) / 2


def test_an_exception_on_the_lane_reaches_the_scheduler(make_core: Callable[..., Core]) -> None:
    core = make_core(SpecConfig(spec_version="v2"))
    core.round.drafter.propose = lambda asked: 1 // 0
    core.scheduler.submit(Submit(1, (1, 2, 3), SamplingParams(max_tokens=4)))
    core.scheduler.step()
    with pytest.raises(ZeroDivisionError):
        core.scheduler.step()


def test_penalties_and_overlap_go_together(make_core: Callable[..., Core]) -> None:
    asked, given = prompts(4), {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "max_tokens": 30}
    core = make_core(replace(SPECS[1], spec_version="v2"))
    assert generate(core, asked, **given) == generate(make_core(), asked, **given)
    core.scheduler.use_lane(InlineLane())
