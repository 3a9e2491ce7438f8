"""`tuner recompute`, `remeasure` and `pack`: a study's numbers derived again, measured again, and handed on."""

from __future__ import annotations

import json
import sqlite3
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
from typer.testing import CliRunner, Result

from tests.tuner.export.test_verify import SIMULATED
from tuner.cli.app import app
from tuner.export.pack import Secrets, _database
from tuner.secrets import redacted, without_secrets
from tuner.study import tables as t

TOKEN = "planted-Token-0123456789"
KEY = "plantedKey42"
HUB = "hf_" + "aB3" * 8


def tuner(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    (folder / "sim.yaml").write_text(SIMULATED)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert tuner("run", "sim.yaml", "--quiet").exit_code == 0
    return folder / "studies" / "sim" / "study.db"


@pytest.fixture
def study(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The database of a study of one's own, in the folder that one is in."""
    monkeypatch.chdir(tmp_path)
    copy = tmp_path / "studies" / "sim" / "study.db"
    copy.parent.mkdir(parents=True)
    source, target = sqlite3.connect(made), sqlite3.connect(copy)
    source.backup(target)
    source.close()
    target.close()
    return copy


def rows(file: Path, query: str) -> list[tuple]:
    with sqlite3.connect(file) as connection:
        return connection.execute(query).fetchall()


def test_every_stored_number_follows_from_the_records(study: Path) -> None:
    result = tuner("recompute", "sim")
    assert result.exit_code == 0, result.output
    told = json.loads(tuner("recompute", "sim", "--json").stdout)
    assert told["derived"]["blocks"] == rows(study, "select count(*) from tuner_blocks")[0][0]
    assert told["derived"]["pairs"] > 0
    assert told["derived"]["verdicts"] == 3
    assert told["differences"] == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            "update tuner_blocks set block = json_set(block, '$.tokens_per_s', 1e6) where id = 3",
            "block 3, tokens per second",
        ),
        ("update tuner_pairs set log_ratio = log_ratio + 0.1 where rowid = 1", "pair"),
        ("delete from tuner_pairs where rowid = 2", "pair"),
        ("update tuner_verdicts set verdict = json_set(verdict, '$.speedup', 2.0) where rowid = 1", "speedup"),
    ],
)
def test_a_number_that_does_not_follow_is_named(study: Path, change: str, said: str) -> None:
    with sqlite3.connect(study) as connection:
        connection.execute(change)
    result = tuner("recompute", "sim")
    assert result.exit_code == 1, result.output
    assert "differs: " in result.output
    assert said in result.output


def test_a_candidate_is_measured_again_beside_its_record_and_the_study_stays_as_it_was(study: Path) -> None:
    before = rows(study, "select count(*) from tuner_blocks")
    candidate = rows(study, "select distinct candidate from tuner_blocks where role = 'confirm'")[0][0]
    for named in (candidate, "baseline"):
        result = tuner("remeasure", "sim", named)
        assert result.exit_code == 0, result.output
        assert "recorded" in result.output
        assert "SIMULATED" in result.output
    kept = [json.loads(row) for row in (study.parent / "remeasured.jsonl").read_text().splitlines()]
    assert kept[0]["candidate"] == candidate
    assert rows(study, "select count(*) from tuner_blocks") == before
    assert tuner("remeasure", "sim", "ffffffffffff").exit_code == 2


def test_another_machine_is_not_measured_against_the_record_of_this_one(study: Path) -> None:
    with sqlite3.connect(study) as connection:
        connection.execute("update tuner_studies set fingerprint = json_set(fingerprint, '$.hardware.cpu', 'Abacus')")
    result = tuner("remeasure", "sim", "baseline")
    assert result.exit_code == 2
    assert "Abacus" in result.output


def test_a_pack_holds_everything_but_secrets(study: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MY_API_KEY", TOKEN)
    logs = study.parent / "logs"
    logs.mkdir(exist_ok=True)
    planted = [
        f"starting with {TOKEN} in the middle",
        f"env: HF_TOKEN={KEY}",
        f"argv: serve --api-key {KEY} --port 8000",
        f"['serve', '--api-key', '{KEY}']",
        f'{{"api_key": "{KEY}", "max_tokens": 5}}',
        f"authorization: Bearer {KEY}",
        f"GET https://user:{KEY}@example.org/x",
        f"downloading with {HUB}",
    ]
    (logs / "launch-1.log").write_text("\n".join([*planted, "ready on port 8000", ""]))
    with sqlite3.connect(study) as connection:
        for row in planted:
            connection.execute("insert into tuner_events (study, at, kind, message) values ('sim', 1, 'x', ?)", (row,))
        one = "update tuner_launches set record = json_set(record, '$.argv[#]', '--api-key', '$.argv[#]', ?)"
        connection.execute(one, (KEY,))
    result = tuner("pack", "sim")
    assert result.exit_code == 0, result.output
    with tarfile.open("sim.tar.gz") as tar:
        content = {member.name: tar.extractfile(member).read() for member in tar.getmembers()}  # type: ignore[union-attr]
    for name, data in content.items():
        for secret in (TOKEN, KEY, HUB):
            assert secret.encode() not in data, name
    log = content["sim/files/logs/launch-1.log"].decode()
    assert "ready on port 8000" in log
    assert '"max_tokens": 5' in log
    assert {"sim/space.json", "sim/report.md", "sim/host.json", "sim/manifest.json", "sim/study.db"} <= set(content)
    (tmp_path / "there.db").write_bytes(content["sim/study.db"])
    assert rows(tmp_path / "there.db", "pragma integrity_check") == [("ok",)]
    again = tuner("recompute", "sim", "--storage", f"sqlite:///{tmp_path / 'there.db'}")
    assert again.exit_code == 0, again.output
    assert rows(study, "select count(*) from tuner_events where message like '%planted%'")[0][0] > 0, "the study stays"
    second = tuner("pack", "sim")
    assert second.exit_code == 2
    assert "exists" in second.output


def test_rows_are_packed_of_a_database_that_lacks_tables_which_come_with_their_first_row() -> None:
    engine = sa.create_engine("sqlite://")
    t.metadata.create_all(engine, tables=[each for each in t.metadata.sorted_tables if each not in t.MADE_WHEN_NEEDED])
    store: Any = SimpleNamespace(engine=engine)
    data: Any = SimpleNamespace(name="old")
    packed = dict(_database(store, data, Secrets({})))
    assert json.loads(packed["study.json"])["tuner_events"] == []


def test_a_pack_that_cannot_be_written_leaves_nothing(study: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    result = tuner("pack", "sim", "--output", str(tmp_path / "file" / "a.tar.gz"))
    assert result.exit_code == 2, result.output
    assert "Nothing was written" in result.output


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("max_tokens: 64, tokens_per_s=12.5", "max_tokens: 64, tokens_per_s=12.5"),
        ("API_KEY_FILE=/run/key", "API_KEY_FILE=/run/key"),
        ("the token of the day", "the token of the day"),
        ("--api-key --port 5", "--api-key --port 5"),
        ("--api-key=abc", "--api-key=(left out)"),
        ("password: 'a b'", "password: '(left out)'"),
        ("Bearer abcdef", "Bearer (left out)"),
    ],
)
def test_what_looks_like_a_secret_is_left_out_of_a_text_and_nothing_else(text: str, kept: str) -> None:
    assert redacted(text) == kept
    assert redacted(redacted(text)) == redacted(text)


def test_secrets_of_a_structure_are_told_by_keys_and_flags() -> None:
    assert without_secrets({"hf_token": "a", "argv": ["--api-key", "b", "--tp", "2"], "token": 3, "n": None}) == {
        "hf_token": "(left out)", "argv": ["--api-key", "(left out)", "--tp", "2"], "token": 3, "n": None,
    }  # fmt: skip
