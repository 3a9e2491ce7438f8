"""A user's own command starts the same from any folder and with any PATH."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tuner.engines.base import get_engine
from tuner.records import Candidate, LaunchRecord
from tuner.space import parse_space
from tuner.study.engine import launch_record


def record(*command: str, env: dict[str, str] | None = None, more: str = "") -> LaunchRecord:
    listed = ", ".join(f"'{word}'" for word in (*command, "{port}"))
    text = f"""
name: mine
engine: {{kind: command, model: m, args: {{command: [{listed}]}}, env: {env or {}}{more}}}
workload: {{concurrency: [1]}}
baseline: {{}}
parameters: {{speculation: {{choices: [none]}}}}
"""
    return launch_record(
        parse_space(text), get_engine("command"), Candidate({}), host="127.0.0.1", port=8000, image="i"
    )


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "bin" / "my-server"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    (tmp_path / "model.gguf").write_text("x")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_program_is_recorded_by_its_whole_path(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = str(here / "bin" / "my-server")
    assert record("bin/my-server").argv == (whole, "8000")
    assert record("./bin/my-server").argv == (whole, "8000")
    assert record("my-server", env={"PATH": str(here / "bin")}).argv[0] == whole
    monkeypatch.setenv("PATH", f"{here / 'bin'}{os.pathsep}{os.environ['PATH']}")
    assert record("my-server").argv[0] == whole


def test_a_program_that_is_not_here_keeps_its_name(here: Path) -> None:
    assert record("no-such-server-anywhere").argv[0] == "no-such-server-anywhere"


def test_the_folder_is_recorded_where_an_argument_names_a_file_of_it(here: Path) -> None:
    assert record("bin/my-server", "--model", "model.gguf").cwd == str(here)
    assert record("bin/my-server", "--model=model.gguf").cwd == str(here)
    assert record("bin/my-server", "--model", str(here / "model.gguf")).cwd == ""
    assert record("bin/my-server").cwd == ""
    assert "cwd" not in record("bin/my-server").to_dict(), "hashes of records without it last"


def test_a_program_of_an_image_is_left_as_it_is(here: Path) -> None:
    made = record("my-server", "model.gguf", more=", container: {runtime: docker, image: i}")
    assert made.argv[-3:] == ("my-server", "model.gguf", "8000")
    assert made.cwd == ""
