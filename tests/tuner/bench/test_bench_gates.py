import math
from dataclasses import replace
from typing import Any

import pytest

from tests.tuner.judge.study_records import block
from tuner.bench.gates import DRIFT_NEEDS_S, ENVIRONMENT_GATES, Observed, gates, half_drift, pair_gates
from tuner.bench.machine import Surroundings
from tuner.bench.recount import Recount
from tuner.records import Block, Percentiles

GOOD = Observed(
    concurrency=8,
    window_s=8.0,
    warm=True,
    warm_detail="",
    requests=40,
    failed=0,
    failure_detail="",
    in_flight=8.0,
    mean_request_s=1.6,
    client_busy=0.02,
    client_steal=0.01,
    turnaround_s=0.0002,
    loop_lag_s=0.003,
    edge_lag_s=0.02,
    tokens=2000.0,
    unknown_tokens=0,
    usage_detail="",
    overrun_tokens=0,
    short_outputs=0,
    degenerate_outputs=0,
    series=(250.0,) * 8,
    client_tokens=2004.0,
    server_tokens=2000.0,
    slack_tokens=8.0,
    events_per_s=250.0,
    ceiling_events_per_s=50_000.0,
    surroundings=Surroundings(foreign=0.2, steal=0.02, throttled=0.0),
)


def failed(**changes):
    return {gate.name for gate in gates(replace(GOOD, **changes)) if not gate.ok}


def test_two_shared_cores_still_give_valid_blocks():
    """A mean lag of 3 ms, and 20 ms at an edge, move a block of 8 s by far less than 1 %."""
    assert failed() == set()


SLOWED = Surroundings(gpus=("GPU 0: power brake",))
STEPS = (100.0, 101.0) * 10
EDGES = [
    ("not_warm", {"warm": True}, {"warm": False}),
    ("no_tokens", {"tokens": 0.5}, {"tokens": 0.0}),
    ("no_usage", {"unknown_tokens": 0}, {"unknown_tokens": 1}),
    ("usage_undercounts", {"requests": 100, "undercounted": 1}, {"requests": 100, "undercounted": 2}),
    ("unheard_at_end", {"unheard_tokens": 19.9}, {"unheard_tokens": 20.1}),
    ("low_success_rate", {"requests": 99, "failed": 1}, {"requests": 98, "failed": 1}),
    ("low_success_rate", {"requests": 1}, {"requests": 0, "tokens": 10.0}),
    ("low_concurrency", {"in_flight": 7.85}, {"in_flight": 7.83}),
    ("too_few_requests", {"requests": 4}, {"requests": 3}),
    ("client_bound", {"client_busy": 0.5}, {"client_busy": 0.51}),
    ("client_ceiling", {"events_per_s": 16_600.0}, {"events_per_s": 16_700.0}),
    ("client_steals_cpu", {"client_steal": 0.04}, {"client_steal": 0.041}),
    ("slow_turnaround", {"turnaround_s": 0.0129}, {"turnaround_s": 0.0131}),  # beside 3 ms of lag, of 1.6 s
    ("slow_turnaround", {"loop_lag_s": 0.0157}, {"loop_lag_s": 0.0159}),
    ("loop_lag", {"edge_lag_s": 0.079}, {"edge_lag_s": 0.081}),
    ("client_stopped", {"stopped_s": 1.0}, {"stopped_s": 1.01}),
    ("client_stopped", {"window_s": 90.0, "stopped_s": 1.79}, {"window_s": 90.0, "stopped_s": 1.81}),
    ("token_overrun", {"overrun_tokens": 1}, {"overrun_tokens": 2}),
    ("short_output", {"short_outputs": 2}, {"short_outputs": 3}),
    ("degenerate_output", {"degenerate_outputs": 8}, {"degenerate_outputs": 9}),
    ("tokens_disagree", {"client_tokens": 2017.9}, {"client_tokens": 2018.1}),
    ("tokens_disagree", {"client_tokens": 1982.1}, {"client_tokens": 1981.9}),
    ("tokens_recounted", {"recount": Recount(100, 114)}, {"recount": Recount(100, 115)}),
    ("tokens_recounted", {"recount": Recount(100, 86)}, {"recount": Recount(100, 85)}),
    ("foreign_load", {"surroundings": Surroundings(foreign=0.75)}, {"surroundings": Surroundings(foreign=0.76)}),
    ("cpu_stolen", {"surroundings": Surroundings(steal=0.25)}, {"surroundings": Surroundings(steal=0.26)}),
    ("cpu_throttled", {"surroundings": Surroundings(throttled=0.01)}, {"surroundings": Surroundings(throttled=0.02)}),
    ("gpu_slowed", {"surroundings": Surroundings()}, {"surroundings": SLOWED}),
    (
        "not_steady",
        {"series": STEPS + tuple(x * 1.28 for x in STEPS)},
        {"series": STEPS + tuple(x * 1.29 for x in STEPS)},
    ),
]


@pytest.mark.parametrize(("name", "under", "over"), EDGES)
def test_each_gate_lets_its_limit_pass_and_nothing_beyond(
    name: str, under: dict[str, object], over: dict[str, object]
) -> None:
    assert name not in failed(**under)
    assert name in failed(**over)
    gate = next(gate for gate in gates(replace(GOOD, **over)) if gate.name == name)  # type: ignore[arg-type]
    assert not gate.ok
    assert math.isfinite(gate.value)
    assert gate.value != gate.limit


def test_every_gate_has_an_edge_here() -> None:
    everything = replace(
        GOOD,
        surroundings=replace(GOOD.surroundings, gpus=SLOWED.gpus),
        recount=Recount(1, 1),
        series=(250.0,) * DRIFT_NEEDS_S,
    )
    assert {gate.name for gate in gates(everything)} == {name for name, _, _ in EDGES}


def side(length: float = 100.0, *, requests: int = 200, first: float = 200.0, cached: float | None = None, **more: Any):
    """One block of a pair; its requests take a second, `first` milliseconds of them before the first token."""
    counters = {"output_tokens_sd": 0.0, **({} if cached is None else {"cached_share": cached})}
    made = block(8, 100.0, length=length)
    return replace(
        made,
        requests=requests,
        ttft_ms=Percentiles(requests, first, first, first, None),
        e2e_ms=Percentiles(requests, 1000.0, 1000.0, 1000.0, None),
        counters={**counters, **more},
    )


def pair_failed(one: Block, other: Block) -> set[str]:
    return {gate.name for gate in pair_gates([one], [other]) if not gate.ok}


def test_a_shift_of_output_length_counts_by_what_it_moves() -> None:
    """A fifth of a request's time goes by before its first token: 5 % longer answers look 1 % faster."""
    assert pair_failed(side(100.0), side(105.0)) == set()
    assert pair_failed(side(100.0), side(105.3)) == {"output_length_shift"}
    assert pair_failed(side(105.3), side(100.0)) == {"output_length_shift"}
    assert pair_failed(side(100.0, first=20.0), side(130.0, first=20.0)) == set()  # prompts take no time here
    # Twenty answers each that vary by half their length tell no such shift.
    noisy = {"requests": 20, "output_tokens_sd": 50.0}
    assert pair_failed(side(100.0, **noisy), side(125.0, **noisy)) == set()
    assert pair_failed(side(100.0, **noisy), side(250.0, **noisy)) == {"output_length_shift"}


def test_a_warmer_cache_on_one_side_is_found_and_one_on_both_is_none() -> None:
    assert pair_failed(side(cached=0.3), side(cached=0.34)) == set()
    assert pair_failed(side(cached=0.3), side(cached=0.36)) == {"warm_cache"}
    assert pair_failed(side(cached=0.9), side(cached=0.9)) == set()
    assert [gate.name for gate in pair_gates([side()], [side(cached=0.9)])] == ["output_length_shift"]


def test_blocks_that_tell_no_latencies_have_no_gates_between_them() -> None:
    assert pair_gates([block(8, 100.0)], [block(8, 110.0, length=200.0)]) == ()
    assert pair_gates([], [side()]) == ()


def test_a_remote_server_loses_no_cores_to_the_client():
    assert failed(client_steal=None) == set()


def test_drift_needs_to_be_large_and_significant():
    assert half_drift((100.0,) * 20) == 0
    assert half_drift((100.0,) * 10 + (150.0,) * 10) == pytest.approx(0.4)
    assert half_drift((50.0, 150.0, 80.0, 120.0) * 5) == 0
    assert "not_steady" not in failed(series=(100.0,) * 4 + (200.0,) * 4)  # eight seconds say nothing about it


def test_gates_of_the_environment_exist():
    slowed = replace(GOOD, surroundings=replace(GOOD.surroundings, gpus=("GPU 0: power brake",)))
    assert {gate.name for gate in gates(slowed)} >= ENVIRONMENT_GATES
