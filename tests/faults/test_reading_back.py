"""What a record reads back beside the server's information, and what is there before the server starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tests.faults.conftest import faulty_record
from tuner.launch.server import Server, environment


def test_paths_and_log_lines_are_read_beside_the_information(launch: Callable[..., Server], tmp_path: Path) -> None:
    sources = {
        "again": "/server_info",
        "gone": "/no-such-path",
        "log": r"starting in mode \w+",
        "silent": "no such line",
    }
    steps = tmp_path / "below" / "steps.json"
    record = replace(
        faulty_record("healthy", "--effective", '{{"num_steps": 3}}'), also_read=sources, files={str(steps): "{}"}
    )
    server = launch(record)
    assert steps.read_text() == "{}"
    server.wait_ready()
    server.smoke()
    info = server.server_info()
    assert info is not None
    assert info["again"] == {"effective": {"num_steps": 3}}
    assert "gone" not in info
    assert info["log"] == ["starting in mode healthy"]
    assert info["silent"] == []


def test_variables_of_the_trial_are_set_and_the_users_own_count_more() -> None:
    record = replace(faulty_record("healthy"), trial_env={"A": "trial", "B": "trial"}, env={"B": "user"})
    found = environment(record, "marker")
    assert (found["A"], found["B"]) == ("trial", "user")
