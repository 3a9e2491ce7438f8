"""`engine bench` runs the engine alone and says what it did."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine.cli import app

SMALL = ["--dtype", "float32", "--threads", "1", "--page-size", "4", "--repeats", "2", "--prompt-tokens", "9"]


def bench(model: Path, *arguments: str) -> dict[str, object]:
    done = CliRunner().invoke(app, ["bench", "--model", str(model), *SMALL, *arguments])
    assert done.exit_code == 0, done.output
    result: dict[str, object] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("speculation", [[], ["--speculation", "ngram", "--num-steps", "2"]])
def test_every_level_is_measured_with_the_settings_given(tiny_model: Path, speculation: list[str]) -> None:
    result = bench(tiny_model, "--streams", "1,3", "--output-tokens", "30", *speculation)
    assert result["effective"]["num_steps"] == (2 if speculation else 0)  # type: ignore[index]
    levels = result["levels"]
    assert [level["streams"] for level in levels] == [1, 3]  # type: ignore[attr-defined]
    for level in levels:  # type: ignore[attr-defined]
        assert level["tokens_per_s"] > 0
        assert level["forward_ms"] < level["step_ms"]
        assert level["accept_length"] >= 1
        assert level["steps"] == 30 or speculation


def test_what_does_not_fit_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    for arguments, message in (
        (["--streams", "a"], "streams"),
        (["--streams", "0"], "streams"),
        (["--streams", "65"], "max_running_requests"),
        (["--output-tokens", "1000"], "do not fit"),
        (["--output-tokens", "0", "--repeats", "0"], "repeats"),
        (["--prompts", str(tmp_path / "none.jsonl")], "prompts"),
        (["--prompts", str(tmp_path / "empty.jsonl")], "is empty"),
    ):
        done = CliRunner().invoke(app, ["bench", "--model", str(tiny_model), *SMALL, *arguments])
        assert (done.exit_code, message in done.stderr) == (2, True), done.output
