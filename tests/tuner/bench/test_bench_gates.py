from dataclasses import replace

import pytest

from tuner.bench.gates import ENVIRONMENT_GATES, Observed, gates, half_drift
from tuner.bench.machine import Surroundings

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


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"warm": False}, "not_warm"),
        ({"tokens": 0.0}, "no_tokens"),
        ({"unknown_tokens": 1}, "no_usage"),
        ({"failed": 1}, "low_success_rate"),
        ({"requests": 0, "tokens": 10.0}, "low_success_rate"),
        ({"in_flight": 7.8}, "low_concurrency"),
        ({"requests": 3}, "too_few_requests"),
        ({"client_busy": 0.6}, "client_bound"),
        ({"client_steal": 0.05}, "client_steals_cpu"),
        ({"turnaround_s": 0.02}, "slow_turnaround"),
        ({"loop_lag_s": 0.02}, "slow_turnaround"),
        ({"edge_lag_s": 0.1}, "loop_lag"),
        ({"stopped_s": 1.2}, "client_stopped"),
        ({"overrun_tokens": 64}, "token_overrun"),
        ({"short_outputs": 13}, "short_output"),
        ({"degenerate_outputs": 20}, "degenerate_output"),
        ({"client_tokens": 2019.0}, "tokens_disagree"),
        ({"server_tokens": 4000.0}, "tokens_disagree"),
        ({"series": (100.0, 101.0) * 10 + (200.0, 201.0) * 10}, "not_steady"),
    ],
)
def test_each_gate_fails_for_its_own_reason(changes, name):
    assert name in failed(**changes)


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
