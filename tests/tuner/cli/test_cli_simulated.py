"""Whatever shows a figure of a simulated study says that nothing was measured."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.tuner.export.test_verify import SIMULATED
from tuner.cli.app import app
from tuner.launch.ports import free_port
from tuner.report.frames import load_study
from tuner.study.notify import message
from tuner.study.store import open_study

MARKED = "simulated"


def tuner(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with two simulated studies."""
    folder = tmp_path_factory.mktemp("simulated")
    (folder / "sim.yaml").write_text(SIMULATED)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name in ("sim", "other"):
            result = tuner("run", "sim.yaml", "--study", name)
            assert result.exit_code == 0, result.output
            assert "SIMULATED" in result.output
        yield folder


@pytest.mark.parametrize(
    "arguments",
    [
        ("status", "sim"),
        ("list",),
        ("plan", "sim.yaml"),
        ("report", "sim"),
        ("report", "sim", "--compare", "other"),
        ("recommend", "sim"),
        ("recompute", "sim"),
        ("calibrate", "--space", "sim.yaml", "--launches", "4"),
    ],
    ids=" ".join,
)
def test_every_command_that_shows_figures_says_so(made: Path, arguments: tuple[str, ...]) -> None:
    result = tuner(*arguments)
    assert result.exit_code == 0, result.output
    assert "SIMULATED" in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ("recommend", "sim", "--json"),
        ("recompute", "sim", "--json"),
        ("plan", "sim.yaml", "--json"),
        ("calibrate", "--space", "sim.yaml", "--launches", "4", "--json"),
    ],
    ids=" ".join,
)
def test_so_does_what_programs_read(made: Path, arguments: tuple[str, ...]) -> None:
    result = tuner(*arguments)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["simulated"] is True


def test_pages_exports_frames_and_messages_are_marked(made: Path) -> None:
    assert tuner("report", "sim", "--html", "page.html").exit_code == 0
    assert "SIMULATED" in (made / "page.html").read_text()
    assert tuner("report", "sim", "--compare", "other", "--html", "both.html").exit_code == 0
    assert "SIMULATED" in (made / "both.html").read_text()
    for kind in ("shell", "json", "env", "systemd", "compose", "kubernetes", "helm"):
        refused = tuner("export", "sim", "--format", kind, "--output", f"no-{kind}")
        assert refused.exit_code != 0
        assert "--allow-simulated" in refused.output
        assert not (made / f"no-{kind}").exists()
        result = tuner("export", "sim", "--format", kind, "--output", kind, "--allow-simulated")
        assert result.exit_code == 0, result.output
        files = [path for path in (made / kind).rglob("*") if path.is_file()]
        assert any(MARKED in path.read_text().lower() for path in files), kind
    study = load_study("sim")
    assert study.view.simulated
    assert study.blocks.simulated.all()
    assert study.pairs.simulated.all()
    with closing(open_study("sim", None)) as store:
        assert message(store.data(), None)["simulated"] is True
        assert message(store.data(), ValueError("x"))["simulated"] is True


def test_a_study_is_marked_before_it_has_launched_anything(made: Path) -> None:
    with closing(open_study("sim", None)) as store:
        data = store.data()
    from dataclasses import replace

    assert replace(data, launches=()).simulated


@pytest.fixture(scope="module")
def simulated_server() -> Iterator[str]:
    port = free_port()
    argv = [sys.executable, "-m", "tuner.engines.simulated", "--port", str(port), "--options", '{"speed": 50}']
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)


def test_bench_of_a_simulated_server_says_so(simulated_server: str) -> None:
    import time

    import httpx

    for _ in range(200):
        try:
            httpx.get(f"{simulated_server}/health", trust_env=False)
            break
        except httpx.HTTPError:
            time.sleep(0.1)
    found = tuner("bench", simulated_server, "--rate", "5", "--seconds", "1", "--max-tokens", "8")
    assert "SIMULATED" in found.output
    told = tuner("bench", simulated_server, "--rate", "5", "--seconds", "1", "--max-tokens", "8", "--json")
    assert json.loads(told.stdout)["simulated"] is True
