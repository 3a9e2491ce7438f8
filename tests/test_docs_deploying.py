"""Every command that docs/deploying.md shows in a shell block is run, in order, on a small simulated study."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tuner.cli.app import app

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "deploying.md").read_text(encoding="utf-8")

SPACE = """
name: quickstart
engine: {kind: simulated, model: any}
workload: {concurrency: [1, 8]}
baseline: {}
parameters:
  num_steps: {low: 1, high: 5}
budget: {launches: 10}
simulation: {clock: virtual}
"""


def commands() -> list[str]:
    blocks = re.findall(r"^```sh\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


def test_every_command_of_the_page_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "space.yaml").write_text(SPACE)
    found = ["tuner run space.yaml --quiet", *commands()]
    assert len(found) >= 11
    for command in found:
        program, *arguments = shlex.split(command, comments=True)
        assert program == "tuner"
        if arguments[0] in ("export", "verify", "drift"):
            arguments.append("--allow-simulated")
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, (command, done.output)
    for file in ("out/run.sh", "helm/chart/values.yaml", "kubernetes/kubernetes.yaml", "quickstart.tar.gz"):
        assert (tmp_path / file).is_file(), file


def test_the_page_names_every_format() -> None:
    from tuner.export.artefact import FORMATS

    for fmt in set(FORMATS) - {"vllm", "sglang"}:
        assert f"`{fmt}`" in TEXT, fmt
