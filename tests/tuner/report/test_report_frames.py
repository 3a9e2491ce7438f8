"""The frames hold what the study holds, also where it holds nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from report_studies import REFERENCE, reference, toy
from toy_study import study

from tuner.errors import UsageError
from tuner.report.frames import frames, load_study


def test_a_study_is_loaded_by_name_and_storage() -> None:
    found = load_study("quickstart", f"sqlite:///{REFERENCE}")
    data = reference()
    assert len(found.blocks) == len(data.blocks)
    assert len(found.pairs) == len(data.pairs)
    assert len(found.launches) == len(data.launches)
    assert list(found.candidates.index) == [candidate.id for candidate in found.view.candidates]
    mean = found.blocks.query("role == 'confirm' and concurrency == 1").groupby("candidate").tokens_per_s.mean()
    baseline = found.view.candidates[0]
    assert mean[baseline.id] == pytest.approx(baseline.rows[0].tokens_per_s)
    with pytest.raises(UsageError):
        load_study("nosuch", f"sqlite:///{REFERENCE}")


def test_failures_and_invalid_blocks_are_in_the_frames() -> None:
    found = frames(toy())
    assert (found.launches.failure == "startup_crash").any()
    assert (~found.blocks.valid).any()


def test_an_empty_study_has_empty_frames_with_their_columns(tmp_path: Path) -> None:
    found = frames(study(tmp_path).data())
    assert len(found.blocks) == len(found.pairs) == 0
    assert {"candidate", "tokens_per_s", "valid"} <= set(found.blocks.columns)
    assert {"candidate", "ratio"} <= set(found.pairs.columns)
