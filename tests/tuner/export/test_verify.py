"""`tuner verify` and `tuner drift`: the exported artefact itself, held against its record."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.tuner.export.test_export import launch, provenance
from tuner.bench.plan import PROFILES
from tuner.cli.app import app
from tuner.engines.base import get_engine
from tuner.export.artefact import FORMATS, export_artefact
from tuner.export.provenance import record_hash
from tuner.export.reference import Level, Reference
from tuner.judge.holds import level_holds
from tuner.launch.ports import free_port
from tuner.records import Candidate, LaunchRecord
from tuner.space import parse_space
from tuner.study.engine import launch_record
from tuner.study.hardware import hardware

SERVER = Path(__file__).parents[1] / "cli" / "paced_server.py"

SIMULATED = """
name: sim
engine: {kind: simulated, model: any}
workload: {concurrency: [1, 8]}
baseline: {}
parameters:
  num_steps: {low: 1, high: 5}
budget: {launches: 12}
simulation: {clock: virtual}
"""

PACED = f"""
name: paced
engine:
  kind: command
  model: tiny
  args:
    command: [{sys.executable}, -I, "{SERVER}", --port, "{{port}}", --num-steps, "{{num_steps?}}"]
workload: {{prompts: mixed, max_tokens: 24, concurrency: [2]}}
baseline: {{}}
parameters: {{num_steps: {{low: 1, high: 5}}}}
"""


def tuner(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def change(file: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads(file.read_text())
    edit(document)
    file.write_text(json.dumps(document))


# -- on a virtual clock -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("simulated")
    (folder / "sim.yaml").write_text(SIMULATED)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert tuner("run", "sim.yaml", "--quiet").exit_code == 0
        exported = tuner("export", "sim", "--format", "shell", "--output", "out", "--allow-simulated")
        assert exported.exit_code == 0, exported.output
    return folder / "out"


@pytest.fixture
def out(export: Path, tmp_path: Path) -> Path:
    """A copy of the export, to be changed."""
    for file in export.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def test_a_server_that_does_what_was_measured_holds_and_each_time_is_kept(out: Path) -> None:
    first = tuner("verify", str(out), "--allow-simulated")
    assert first.exit_code == 0, first.output
    assert first.output.splitlines()[-4].startswith("Holds") or "Holds" in first.output
    assert "SIMULATED" in first.output
    second = tuner("drift", str(out), "--allow-simulated")
    assert second.exit_code == 0
    assert "since the last time" in second.output
    kept = [json.loads(row) for row in (out / "verified.jsonl").read_text().splitlines()]
    assert [row["outcome"] for row in kept] == ["holds", "holds"]
    told = json.loads(tuner("drift", str(out), "--allow-simulated", "--json").stdout)
    assert told["before"]["levels"][0]["measured"] == kept[-1]["levels"][0]["measured"]


@pytest.mark.parametrize("fmt", list(FORMATS))
def test_a_simulated_study_is_not_exported_unless_it_is_wanted(
    fmt: str, export: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(export.parent)
    result = tuner("export", "sim", "--format", fmt, "--output", "other")
    assert result.exit_code == 2, result.output
    assert "--allow-simulated" in result.output
    assert "Nothing was written" in result.output
    assert not (export.parent / "other").exists()


def test_noise_that_hides_a_loss_is_said(out: Path) -> None:
    def noisy(document: dict[str, Any]) -> None:
        for level in document["reference"]["levels"]:
            rate = level["tokens_per_s"][0]
            level["tokens_per_s"] = [0.8 * rate, 1.2 * rate] * 2

    quiet = tuner("verify", str(out), "--allow-simulated")
    assert "a loss of less than" not in quiet.output
    change(out / "launch.json", noisy)
    result = tuner("verify", str(out), "--allow-simulated")
    assert result.exit_code == 0, result.output
    assert "not checked: a loss of less than" in result.output
    assert "--launches 4" in result.output


def test_a_server_that_is_slower_than_noise_explains_does_not_hold(out: Path) -> None:
    def faster(document: dict[str, Any]) -> None:
        for level in document["reference"]["levels"]:
            level["tokens_per_s"] = [1.3 * rate for rate in level["tokens_per_s"]]

    change(out / "launch.json", faster)
    for command in ("verify", "drift"):
        result = tuner(command, str(out), "--allow-simulated")
        assert result.exit_code == 1, result.output
        assert "does not hold" in result.output.lower()
        assert "noise explains" in result.output


def test_another_machine_is_told_apart_and_what_differs_is_said(out: Path) -> None:
    change(out / "launch.json", lambda document: document["provenance"]["machine"].update(cpu="Abacus", cores=10**6))
    result = tuner("verify", str(out), "--allow-simulated")
    assert result.exit_code == 3, result.output
    assert result.stdout.startswith("Different machine")
    assert "cpu: was 'Abacus'" in result.output
    assert "tokens/s" in result.output, "what it does here is said too"


def _version(document: dict[str, Any]) -> None:
    document["reference"]["fingerprint"]["engine_version"] = "99"


def _nowhere(document: dict[str, Any]) -> None:
    document["record"]["argv"][0] = "/nowhere/engine"
    document["provenance"]["record_hash"] = record_hash(LaunchRecord.from_dict(document["record"]))


def _without_figures(document: dict[str, Any]) -> None:
    document["reference"] = None


def _without_argv(document: dict[str, Any]) -> None:
    del document["record"]["argv"]


def _edited(document: dict[str, Any]) -> None:
    document["record"]["port"] = 1


@pytest.mark.parametrize(
    ("edit", "code", "said"),
    [
        (_version, 3, "what was measured is 99"),
        (_nowhere, 3, "/nowhere/engine is not here"),
        (_without_figures, 2, "holds no figures"),
        (_without_argv, 2, "is not complete"),
        (_edited, 2, "was changed"),
    ],
)
def test_what_cannot_be_verified_is_said_before_anything_starts(out: Path, edit: Any, code: int, said: str) -> None:
    change(out / "launch.json", edit)
    result = tuner("verify", str(out), "--allow-simulated")
    assert (result.exit_code, said in result.output) == (code, True), result.output
    assert "Traceback" not in result.output
    assert not (out / "verified.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["."], "simulated study"),
        (["nowhere"], "cannot be read"),
        (["http://127.0.0.1:1"], "--record DIR"),
        ([".", "--record", "."], "--record goes with a URL"),
        ([".", "--launches", "0"], "at least 1"),
        ([".", "--port", "0"], "between 1 and 65535"),
        (["http://127.0.0.1:1", "--record", ".", "--port", "5"], "not for a running server"),
        (["ftp://x", "--record", ".", "--allow-simulated"], "not the URL of a server"),
        (["http://a:b@x", "--record", ".", "--allow-simulated"], "holds a password"),
    ],
)
def test_wrong_usage_is_exit_2_and_starts_nothing(
    out: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(out)
    result = tuner("verify", *arguments)
    assert result.exit_code == 2, result.output
    assert said in result.output


def test_a_server_that_is_not_there_is_the_environments(out: Path) -> None:
    result = tuner("verify", f"http://127.0.0.1:{free_port()}", "--record", str(out), "--allow-simulated")
    assert result.exit_code == 3, result.output
    assert "nothing answers" in result.output


@pytest.mark.parametrize("fmt", ["systemd", "kubernetes", "compose"])
def test_what_another_tool_starts_is_verified_by_its_url(fmt: str, tmp_path: Path) -> None:
    record = launch("--port", "31234")
    export_artefact(record, provenance(record, machine={}), fmt, tmp_path, reference=reference(record, [1.0]))
    result = tuner("verify", str(tmp_path))
    assert result.exit_code == 2, result.output
    assert f"--record {tmp_path}" in result.output.replace("\n", "")


def test_a_secret_that_an_export_left_out_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("API_KEY", raising=False)
    record = launch("--port", "31234", "--api-key", "s3cr3t", engine_version="unknown")
    export_artefact(record, provenance(record, machine={}), "shell", tmp_path, reference=reference(record, [1.0]))
    result = tuner("verify", str(tmp_path))
    assert result.exit_code == 2, result.output
    assert "API_KEY: is a secret that the export left out; set it" in result.output


# -- a real process -----------------------------------------------------------------------------------------------


def reference(record: LaunchRecord, rates: list[float]) -> Reference:
    level = Level(2, tuple(rates), (0.01,) * len(rates), "confirm")
    fingerprint = {"engine_version": record.engine_version}
    return Reference(parse_space(PACED).to_dict(), (level,), None, None, fingerprint)


def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of seconds. Neighbours on the machine cost this server nothing: it sleeps between its tokens."""
    short = replace(PROFILES["short"], ramp_s=0.2, warmup_s=1.0, steady_span_s=0.5, window_s=3.0, tail_s=1.0)
    monkeypatch.setitem(PROFILES, "short", short)
    monkeypatch.setattr("tuner.bench.gates.MAX_FOREIGN_LOAD", 2.0)
    monkeypatch.setattr("tuner.bench.gates.MAX_STEAL", 2.0)


@pytest.fixture
def paced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An export of a server of two streams at 50 tokens a second each, which is what five steps make of 33."""
    return export_paced(tmp_path, monkeypatch, "shell")


def export_paced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fmt: str) -> Path:
    quick(monkeypatch)
    space = parse_space(PACED)
    candidate = Candidate({"num_steps": 5})
    record = launch_record(space, get_engine("command"), candidate, host="127.0.0.1", port=free_port())
    folder = tmp_path / "out"
    made = provenance(record, study="paced", machine=hardware())
    export_artefact(record, made, fmt, folder, reference=reference(record, [98.0, 100.0, 102.0, 100.0]))
    return folder


@pytest.mark.slow
@pytest.mark.timing
@pytest.mark.parametrize("fmt", ["env", "json"])
def test_an_env_file_and_a_record_are_started_too_and_drift_says_what_has_changed(
    fmt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = export_paced(tmp_path, monkeypatch, fmt)
    held = tuner("verify", str(folder))
    assert held.exit_code == 0, held.output
    again = tuner("drift", str(folder))
    assert again.exit_code == 0, again.output
    assert "since the last time" in again.output


@pytest.mark.slow
@pytest.mark.timing
def test_the_exported_script_itself_is_started_and_a_slower_one_is_found(paced: Path) -> None:
    held = tuner("verify", str(paced))
    assert held.exit_code == 0, held.output
    assert "not checked: the answers" in held.output
    script = paced / "run.sh"
    text = script.read_text()
    assert "--num-steps 5" in text
    script.write_text(text.replace("--num-steps 5", "--num-steps 0"))
    slower = tuner("verify", str(paced), "--json")
    assert slower.exit_code == 1, slower.output
    assert json.loads(slower.stdout)["levels"][0]["outcome"] == "slower"


@pytest.fixture
def running(paced: Path) -> Iterator[int]:
    """A server of the same, on the port of the record."""
    port = json.loads((paced / "launch.json").read_text())["record"]["port"]
    server = subprocess.Popen([sys.executable, "-I", str(SERVER), "--port", str(port), "--num-steps", "5"])
    try:
        for _ in range(100):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield port
        assert server.poll() is None, "a running server is left running"
    finally:
        server.kill()
        server.wait()


@pytest.mark.timing
def test_a_running_server_is_taken_and_a_taken_port_is_the_environments(paced: Path, running: int) -> None:
    taken = tuner("verify", str(paced))
    assert taken.exit_code == 3, taken.output
    assert f"port {running} of 127.0.0.1 is taken" in taken.output
    held = tuner("verify", f"http://127.0.0.1:{running}/v1", "--record", str(paced))
    assert held.exit_code == 0, held.output
    assert (paced / "verified.jsonl").read_text().count("\n") == 1


# -- the verdict --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recorded", "measured", "outcome"),
    [
        ([100, 101, 99, 100], [100], "holds"),
        ([100, 101, 99, 100], [97], "holds"),
        ([100, 101, 99, 100], [90], "slower"),
        ([100, 101, 99, 100], [110], "faster"),
        ([100, 120, 80, 100], [80], "holds"),
        ([100], [97], "holds"),
        ([100], [85], "slower"),
        ([100, 100, 100, 100], [99.5], "holds"),
    ],
)
def test_a_level_holds_within_the_noise_of_its_record(recorded: Any, measured: Any, outcome: str) -> None:
    found = level_holds(8, recorded, measured)
    assert found.outcome == outcome
    assert (found.ratio < 1 - found.tolerance) == (outcome == "slower")


def test_more_noise_by_a_calibration_and_more_levels_widen_what_holds() -> None:
    alone = level_holds(1, [100, 101, 99, 100], [100]).tolerance
    assert level_holds(1, [100, 101, 99, 100], [100], pair_sd=0.05).tolerance > alone
    assert level_holds(1, [100, 101, 99, 100], [100], claims=4).tolerance > alone
    assert level_holds(1, [100, 101, 99, 100], [100, 100, 100]).tolerance < alone
