"""`tuner export`: the winner's launch, or the baseline's, from a study's records."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from toy_study import ToyMachine, controller, study
from typer.testing import CliRunner, Result

from tuner.cli.app import app
from tuner.export.choose import choose
from tuner.export.json_file import load_launch
from tuner.records import LaunchRecord
from tuner.study.data import StudyData
from tuner.study.decide import recommendation


def run_study(folder: Path, speed: float) -> StudyData:
    """A finished study in which speculation is `speed` times as fast as the baseline."""
    store = study(folder)
    fast = ToyMachine(speed=lambda s, level: 100 * level * (speed if s.get("speculation") == "ngram" else 1.0))
    controller(store, fast, folder=folder).run()
    return store.data()


def export(folder: Path, *arguments: str) -> Result:
    url = f"sqlite:///{folder / 'study.db'}"
    out = str(folder / "out")
    return CliRunner().invoke(app, ["export", "toy", "--storage", url, "--output", out, *arguments])


def exported(folder: Path) -> LaunchRecord:
    return load_launch(folder / "out")[0]


def test_the_winner_is_exported_from_its_last_confirmation_launch(tmp_path: Path) -> None:
    data = run_study(tmp_path, 1.4)
    winner = recommendation(data).overall.winner
    assert winner is not None
    result = export(tmp_path, "--format", "json")
    assert result.exit_code == 0, result.output
    record, provenance = load_launch(tmp_path / "out")
    mine = [x for x in data.launches if x.slot.candidate_id == winner.id and x.slot.role == "confirm"]
    assert provenance.launch == mine[-1].id
    assert record == mine[-1].record
    assert "winner overall" in provenance.decision
    assert {figure.role for figure in provenance.figures} == {"confirm"}


def test_without_a_winner_the_baseline_is_exported_and_the_user_is_told(tmp_path: Path) -> None:
    data = run_study(tmp_path, 0.7)
    assert recommendation(data).overall.winner is None
    result = export(tmp_path, "--format", "json")
    assert result.exit_code == 0
    assert "No winner: keep the baseline" in result.output
    assert exported(tmp_path).settings == data.baseline.settings


def test_another_candidate_can_be_asked_for_and_is_marked_as_such(tmp_path: Path) -> None:
    data = run_study(tmp_path, 1.4)
    other = next(trial.candidate_id for trial in data.measured if trial.candidate_id != data.baseline.id)
    chosen = choose(data, other)
    assert chosen.record.settings == data.settings_of(other)
    result = export(tmp_path, "--format", "shell", "--candidate", "baseline")
    assert "not what the study recommends" in result.output
    assert (tmp_path / "out" / "run.sh").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--format", "shel"], 2, "did you mean 'shell'"),
        (["--format", "json", "--candidate", "ffffffffffff"], 2, "has no candidate"),
        ([], 2, "--format"),
    ],
)
def test_wrong_usage_writes_nothing(tmp_path: Path, arguments: list[str], code: int, said: str) -> None:
    run_study(tmp_path, 1.4)
    result = export(tmp_path, *arguments)
    assert result.exit_code == code
    assert said in result.output
    assert not (tmp_path / "out").exists()


def test_what_a_container_format_takes_for_granted_is_said(tmp_path: Path) -> None:
    run_study(tmp_path, 1.4)
    result = export(tmp_path, "--format", "compose")
    assert result.exit_code == 0, result.output
    assert "build spec-tuner-fake:1" in result.output
    named = export(tmp_path, "--format", "kubernetes", "--image", "registry.example/x:1")
    assert "build" not in named.output
    assert 'image: "registry.example/x:1"' in (tmp_path / "out" / "kubernetes.yaml").read_text()
    for image in ("two words", "", "-x", "a\nb", "a\x1bb", "$(id)", 'a"b'):
        wrong = export(tmp_path, "--format", "kubernetes", f"--image={image}")
        assert wrong.exit_code == 2, image


def test_a_study_in_which_nothing_was_launched_has_nothing_to_deploy(tmp_path: Path) -> None:
    study(tmp_path)
    result = export(tmp_path, "--format", "json")
    assert result.exit_code == 1
    assert "no launch that ended well" in result.output


@pytest.mark.parametrize("part", ["argv", "host", "settings"])
def test_a_study_whose_launch_record_lacks_a_part_exports_nothing(tmp_path: Path, part: str) -> None:
    run_study(tmp_path, 1.4)
    with sqlite3.connect(tmp_path / "study.db") as connection:
        connection.execute(f"update tuner_launches set record = json_remove(record, '$.{part}')")
    result = export(tmp_path, "--format", "shell")
    assert result.exit_code == 2, result.output
    assert "is not complete" in result.output
    assert "Traceback" not in result.output
    assert not (tmp_path / "out").exists()
