"""Every command that docs/many-machines.md shows is run, in order, on a small simulated study in a real PostgreSQL."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tuner.cli.app import app
from tuner.study.place import hostname
from tuner.study.store import open_study

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "many-machines.md").read_text(encoding="utf-8")

SPACE = """
name: my_study
engine: {kind: simulated, model: any}
workload: {concurrency: [1, 8]}
baseline: {}
parameters:
  num_steps: {low: 1, high: HIGH}
budget: {launches: 12}
profile: short
simulation: {clock: virtual}
"""

ELSEWHERE = {
    "pip install 'spec-tuner[postgres]'": "an installation; the tests have it",
    "pip install 'spec-tuner[ray]'": "an installation; tests/tuner/workers is skipped without it",
    "ray start --head": "serves until it is stopped; tests/tuner/workers starts one",
    "tuner run my_space.yaml --workers ray": "tests/tuner/workers, with a real Ray",
    "tuner run my_space.yaml --workers ray --gpus 4 --cpus 16 --at-most 2": "the same",
}
"""Commands that are not carried out here, and where they are."""


def commands() -> list[str]:
    blocks = re.findall(r"^```sh\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    return [line.partition("  #")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]


@pytest.mark.timeout(300)
def test_every_command_of_the_page_works(tmp_path: Path, postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_space.yaml").write_text(SPACE.replace("HIGH", "3"))
    (tmp_path / "wider.yaml").write_text(SPACE.replace("HIGH", "5").replace("my_study", "wider"))
    password = postgres.split("://")[1].split("@")[0].split(":")[1]
    found, left = commands(), set(ELSEWHERE)
    assert len(found) >= 12
    for command in found:
        if command in ELSEWHERE:
            left.discard(command)
            continue
        if command.startswith("export "):
            name, _, value = command.removeprefix("export ").partition("=")
            shown = {"TUNER_STORAGE": postgres.replace(f":{password}@", "@"), "PGPASSWORD": password}
            assert value.startswith("postgresql+psycopg://") or name == "PGPASSWORD"
            monkeypatch.setenv(name, shown[name])
            continue
        program, *arguments = shlex.split(command.replace('"$TUNER_STORAGE"', postgres))
        assert program == "tuner", f"neither run nor in ELSEWHERE: {command}"
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, (command, done.output)
        assert password not in done.output, command
    assert not left, f"in ELSEWHERE, and no longer on the page: {left}"
    store = open_study("wider", postgres)
    data = store.data()
    store.close()
    assert any(one.state == "taken" for one in data.imports)
    assert not list(tmp_path.glob("studies/*/study.db")), "all of it is in PostgreSQL"
    status = CliRunner().invoke(app, ["status", "my_study"]).output
    assert f"place:       {hostname()}" in status
