"""Studies that reports are made of here: the real one that ships, and a toy with failures and invalid blocks."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import closing, suppress
from functools import cache
from pathlib import Path
from typing import Any

from toy_study import ToyMachine, controller, study

from tuner.errors import StudyStopped
from tuner.records import Failure
from tuner.study.data import StudyData
from tuner.study.store import open_study

REFERENCE = Path(__file__).parents[3] / "studies" / "reference" / "quickstart" / "study.db"


@cache
def reference() -> StudyData:
    """The reference study."""
    with closing(open_study("quickstart", f"sqlite:///{REFERENCE}")) as store:
        return store.data()


@cache
def toy() -> StudyData:
    """A toy study in which two steps crash and a block is invalid."""

    def fails(phase: str, settings: Mapping[str, Any], _count: int) -> Failure | None:
        crash = phase == "ready" and settings.get("num_steps") == 2
        return Failure("startup_crash", "ready", "it | *ended* <here>", evidence="Error: no") if crash else None

    def valid(settings: Mapping[str, Any], level: int, count: int) -> bool:
        return not (settings.get("num_steps") == 1 and level == 8 and count == 1)

    with tempfile.TemporaryDirectory() as folder:
        store = study(Path(folder))
        with suppress(StudyStopped):
            controller(store, ToyMachine(fails=fails, valid=valid), folder=Path(folder)).run()
        with closing(store):
            return store.data()
