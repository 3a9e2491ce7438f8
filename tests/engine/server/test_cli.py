import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from engine.cli import app


def _run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.timing
def test_help_is_there_within_a_second_and_without_torch():
    code = (
        "import sys, engine.cli; sys.argv = ['engine', '--help']\ntry: engine.cli.main()\nfinally: print(*sys.modules)"
    )
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert time.monotonic() - begun < 1
    assert "serve" in done.stdout
    assert "torch" not in done.stdout.split()


def test_the_frontend_needs_no_torch():
    code = "import sys, engine.server.launch; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_all_problems_are_reported_at_once_with_status_2():
    result = _run("serve", "--dtype", "int3", "--port", "70000", "--speculation", "ngram", "--num-steps", "9",
                  "--disable-batch-threshold", "often", "--log-level", "loud")  # fmt: skip
    assert result.exit_code == 2
    for setting in ("dtype", "port", "num_steps", "disable_batch_threshold", "log_level"):
        assert f"error: {setting}:" in result.stderr


def test_an_unknown_model_is_status_2():
    result = _run("fetch", "smollm2")
    assert result.exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], (0, 1, None)),
        (["--speculation", "ngram"], (3, 4, None)),
        (["--speculation", "ngram", "--num-steps", "5"], (5, 6, None)),
        (["--speculation", "ngram", "--disable-batch-threshold", "8"], (3, 4, 8)),
    ],
)
def test_derived_settings(monkeypatch, arguments, expected):
    seen = []
    monkeypatch.setattr("engine.server.launch.serve", lambda config: seen.append(config) or 0)
    monkeypatch.setenv("ENGINE_API_KEY", "from the environment")
    assert _run("serve", *arguments).exit_code == 0
    spec = seen[0].spec
    assert (spec.num_steps, spec.num_draft_tokens, spec.disable_batch_threshold) == expected
    assert seen[0].api_key == "from the environment"
