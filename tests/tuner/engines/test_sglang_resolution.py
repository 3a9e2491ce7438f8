"""What SGLang would make of a candidate is asked before the first launch, and said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tuner.engines.base import Mismatch, Resolution
from tuner.engines.installed import Program
from tuner.engines.sglang_resolution import resolution
from tuner.records import LaunchRecord

ANSWERS = """#!/bin/sh
case "$2" in
*importlib.metadata*) echo 0.5.23 ;;
*) cat > {asked}; echo asked >> {log}; cat {answers} ;;
esac
"""


class Installed:
    """A stand-in for an interpreter with SGLang: it tells what it was told to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.program = Program("sglang", (str(folder / "sglang"), "serve"), ("--help",), "sglang", "Install it")
        interpreter = folder / "python-of-sglang"
        names = {name: folder / name for name in ("asked", "answers", "log")}
        interpreter.write_text(ANSWERS.format(**names))
        interpreter.chmod(0o755)
        (folder / "sglang").write_text(f"#!{interpreter}\n")
        (folder / "sglang").chmod(0o755)

    def answers(self, *told: dict[str, Any]) -> None:
        (self.folder / "answers").write_text(json.dumps(told))


@pytest.fixture
def sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installed:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Installed(tmp_path)


def record(**settings: Any) -> LaunchRecord:
    told = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    argv = ("sglang", "serve", *told)
    return LaunchRecord("sglang", "0.5.23", "m", argv, {}, "127.0.0.1", 1, settings, settings, "m")


def mismatches(launch: LaunchRecord, told: dict[str, Any]) -> list[Mismatch]:
    return [Mismatch(k, v, told[k], "") for k, v in launch.expected.items() if k in told and told[k] != v]


def resolve(sglang: Installed, *launches: LaunchRecord) -> Resolution:
    return resolution(sglang.program, launches, mismatches)


def test_nothing_is_said_of_candidates_that_are_taken_as_asked_and_it_is_asked_once(sglang: Installed) -> None:
    sglang.answers({"topk": 1}, {"topk": 4})
    launches = [record(topk=1), record(topk=4)]
    for _ in range(2):
        assert resolve(sglang, *launches) == Resolution()
    assert (sglang.folder / "log").read_text() == "asked\n"
    assert json.loads((sglang.folder / "asked").read_text()) == [["--topk", "1"], ["--topk", "4"]]
    resolve(sglang, *launches, record(topk=2))
    assert (sglang.folder / "log").read_text() == "asked\nasked\n"


def test_refusals_and_rewritings_of_some_candidates_are_told_together(sglang: Installed) -> None:
    sglang.answers({}, {"error": "ValueError: page_size must be 1"}, {"topk": 1}, {"topk": 1}, {"topk": 2})
    found = resolve(sglang, record(topk=1), record(topk=3), record(topk=8), record(topk=8, x=1), record(topk=2))
    assert found.refused == ()
    refused, rewritten = found.notes
    assert refused == "1 of 4 candidates: SGLang refuses it: ValueError: page_size must be 1: (topk=3)"
    assert rewritten == "2 of 4 candidates: SGLang would run it with topk 1 in place of 8: (topk=8), (topk=8 x=1)"


def test_a_baseline_that_is_refused_ends_the_check(sglang: Installed) -> None:
    sglang.answers({"error": "no such model"}, {})
    refused = resolve(sglang, record(topk=1), record(topk=3)).refused
    assert refused == ("the baseline: SGLang refuses it: no such model",)


def test_so_do_candidates_of_which_none_is_left(sglang: Installed) -> None:
    sglang.answers({}, {"error": "no"}, {"error": "no"})
    assert len(resolve(sglang, record(topk=1), record(topk=3), record(topk=4)).refused) == 1


def test_an_sglang_that_cannot_be_asked_is_a_note_with_its_reason(sglang: Installed) -> None:
    broken = '#!/bin/sh\ncase "$2" in *metadata*) echo 0.5.23; exit;; esac\necho libcuda >&2; exit 1\n'
    (sglang.folder / "python-of-sglang").write_text(broken)
    (note,) = resolve(sglang, record(topk=1)).notes
    assert note.endswith("could not be asked: libcuda")
    sglang = Installed(sglang.folder)
    sglang.answers()  # fewer than were asked for
    (note,) = resolve(sglang, record(topk=1)).notes
    assert "could not be asked" in note
