"""Every command that docs/deploying.md shows in a shell block is run, in order, on a small simulated study."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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

WRAPPER = f"""#!/bin/sh
case $1 in export|verify|drift) exec "{sys.executable}" -m tuner "$@" --allow-simulated ;; esac
exec "{sys.executable}" -m tuner "$@"
"""


def commands() -> list[str]:
    blocks = re.findall(r"^```sh\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("deploying")
    (made / "space.yaml").write_text(SPACE)
    (made / "bin").mkdir()
    (made / "bin" / "tuner").write_text(WRAPPER)
    (made / "bin" / "tuner").chmod(0o755)
    assert run(made, "tuner run space.yaml --quiet").returncode == 0
    return made


def run(folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    return subprocess.run(["sh", "-c", command], cwd=folder, env=env, capture_output=True, text=True)


@pytest.mark.timeout(300)
def test_every_command_of_the_page_works(folder: Path) -> None:
    found = commands()
    assert len(found) >= 10
    for command in found:
        done = run(folder, command)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
    for file in ("out/run.sh", "helm/chart/values.yaml", "kubernetes/kubernetes.yaml", "quickstart.tar.gz"):
        assert (folder / file).is_file(), file


def test_the_page_names_every_format() -> None:
    from tuner.export.artefact import FORMATS

    for fmt in set(FORMATS) - {"vllm", "sglang"}:
        assert f"`{fmt}`" in TEXT, fmt
