"""A study whose servers run in real containers, as a program that can be killed.

python -m tests.faults.contained_study FOLDER RUNTIME IMAGE PYTHON MOUNTS
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.faults.conftest import PATIENT
from tests.tuner.study.test_study_fuzz import HTTP_SPACE, Served
from tests.tuner.study.toy_study import controller, space, study
from tuner.engines.base import get_engine
from tuner.launch.server import Server
from tuner.records import LaunchRecord
from tuner.study.policy import Policy
from tuner.study.store import StudyStore
from tuner.study.world import Machine

POLICY = Policy(pairs=1)


class Contained(Served):
    """Real servers in real containers, found and ended as the machine does it."""

    def __init__(self, real: Machine) -> None:
        super().__init__()
        self.real = real

    def start(self, record: LaunchRecord, *, marker: Mapping[str, str], log_path: Path) -> Any:
        return Server.start(record, marker=marker, log_path=log_path, limits=PATIENT)

    def reap(self, marker: Mapping[str, str]) -> list[int | str]:
        return self.real.reap(marker)

    def remaining(self, marker: Mapping[str, str]) -> list[int | str]:
        return self.real.remaining(marker)


def text(runtime: str = "", image: str = "", python: str = sys.executable, mounts: list[str] | None = None) -> str:
    """The space: of the misbehaving server, in containers where a runtime is named."""
    inside = {"runtime": runtime, "image": image, "mounts": mounts or []}
    section = f"  container: {json.dumps(inside)}\n" if runtime else ""
    return HTTP_SPACE.replace(sys.executable, python).replace("workload:", f"{section}workload:")


def opened(folder: Path, the_text: str) -> StudyStore:
    """The study in a folder, made or taken up."""
    return study(folder, space(the_text))


def run(folder: Path, the_text: str) -> Any:
    """The study, from wherever it stands to its end."""
    store = opened(folder, the_text)
    machine = Contained(Machine(space(the_text)))
    return controller(store, machine, get_engine("command"), policy=POLICY).run()


if __name__ == "__main__":
    run(Path(sys.argv[1]), text(*sys.argv[2:5], json.loads(sys.argv[5])))
