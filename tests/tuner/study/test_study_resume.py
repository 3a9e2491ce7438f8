"""Kill a study at any moment and run it again: nothing measured is lost, nothing is measured twice, and it ends as if
it had never been killed."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from tests.tuner.study.toy_study import SPACE, ToyMachine, controller, space, study
from tuner.errors import StudyStopped
from tuner.records import Failure
from tuner.study.decide import recommendation
from tuner.study.journal import FILE
from tuner.study.policy import Policy

POLICY = Policy(pairs=1)
SMALL = (SPACE, "budget.launches=5")


class Killed(BaseException):
    """What no handler in the tuner may swallow."""


class Watched:
    """Calls `at_boundary` before and after every call of a method, also of what the methods return."""

    def __init__(self, inner: Any, at_boundary: Any) -> None:
        self._inner = inner
        self._at_boundary = at_boundary

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if name in ("trials",):
            return Watched(value, self._at_boundary)
        if not callable(value) or name in ("data", "all", "history", "clock"):
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            args = tuple(arg._inner if isinstance(arg, Watched) else arg for arg in args)
            self._at_boundary(f"before {name}")
            result = value(*args, **kwargs)
            self._at_boundary(f"after {name}")
            return Watched(result, self._at_boundary) if name == "start" else result

        return call


def flaky(phase: str, settings: Any, count: int) -> Failure | None:
    """One candidate always dies under load, so that failures are among what is killed and resumed."""
    dies = settings.get("num_steps") == 2 and settings.get("disable_batch_threshold") == "never"
    return Failure("died_mid_bench", "bench", "it died") if dies and phase == "bench8" else None


def outcome(data: Any) -> Any:
    """All that must not depend on kills: trials, valid blocks, confirmation, pairs, recommendation."""
    blocks = {
        (b.candidate_id, b.concurrency, b.role, b.repetition): b.block.tokens_per_s
        for b in data.blocks.values()
        if b.block.valid
    }
    trials = [(t.number, t.candidate_id, t.kind, dict(t.params), t.value, dict(t.constraints)) for t in data.trials]
    confirmations = [(c.finalists, c.first_repetition, c.pairs) for c in data.confirmations]
    pairs = [(p.candidate_id, p.concurrency, p.role, p.index, p.log_ratio) for p in data.pairs]
    found = recommendation(data)
    return trials, blocks, confirmations, pairs, found.overall, found.per_concurrency, data.reason, data.state


def copy_database(source: Path, target: Path) -> None:
    """What a kill at this moment leaves on the disk: the file and its write-ahead log."""
    target.mkdir()
    for path in kept_files(source):
        shutil.copy(path, target / path.name)


class Moments(list[tuple[str, Path]]):
    """Copies of all that a study keeps in a folder, one of each state that it is called at: (where, folder)."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.seen: set[bytes] = set()

    def __call__(self, name: str) -> None:
        content = b"".join(path.read_bytes() for path in kept_files(self.folder))
        if content not in self.seen:
            self.seen.add(content)
            copy_database(self.folder, self.folder / f"moment-{len(self)}")
            self.append((name, self.folder / f"moment-{len(self)}"))


def kept_files(folder: Path) -> list[Path]:
    return [folder / name for name in ("study.db", "study.db-wal", FILE) if (folder / name).exists()]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """A study that ran in one go, with a copy of its database at every boundary of every call."""
    folder = tmp_path_factory.mktemp("reference")
    moments: list[tuple[str, Path]] = []
    seen: set[bytes] = set()

    def keep(name: str) -> None:
        content = b"".join(path.read_bytes() for path in kept_files(folder))
        if content not in seen:  # nothing was written since the last boundary: the same moment
            seen.add(content)
            copy_database(folder, folder / f"moment-{len(moments)}")
            moments.append((name, folder / f"moment-{len(moments)}"))

    store = study(folder, space(*SMALL))
    data = controller(Watched(store, keep), Watched(ToyMachine(fails=flaky), keep), policy=POLICY).run()
    return data, moments


def check(folder: Path, expected: Any) -> None:
    before = study(folder, space(*SMALL)).data()
    machine = ToyMachine(fails=flaky)
    store = study(folder, space(*SMALL))
    data = controller(store, machine, policy=POLICY).run()
    assert outcome(data) == outcome(expected)
    assert {stored.id: stored for stored in data.blocks.values()}.items() >= before.blocks.items(), "a block was lost"
    recorded = len((folder / FILE).read_text().splitlines()) - len(machine.measured)
    assert recorded >= len(before.blocks)
    assert len(machine.measured) == len(data.blocks) - recorded, "a block was measured twice"
    assert not [launch for launch in data.launches if launch.ended_at is None]
    assert machine.reaped[0] == {"study": data.uid}
    with sqlite3.connect(folder / "study.db") as connection:
        assert connection.execute("pragma integrity_check").fetchone() == ("ok",)
    again = ToyMachine(fails=flaky)
    assert outcome(controller(store, again, policy=POLICY).run()) == outcome(data)
    assert again.starts == []


def test_the_reference_holds_what_can_go_wrong(reference):
    data, moments = reference
    assert len(moments) > 40
    assert data.confirmations
    assert {name.partition(" ")[2] for name, _ in moments} >= {
        "begin_launch",
        "launch_record",
        "launch_started",
        "launch_ready",
        "put_block",
        "end_launch",
        "begin",
        "tell",
        "put_confirmation",
        "finish",
    }


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in (1, 2, 3))])
def test_a_kill_between_every_two_writes_changes_nothing(reference, tmp_path, part):
    data, moments = reference
    for i, (_name, moment) in list(enumerate(moments))[part::4]:
        shutil.copytree(moment, tmp_path / str(i))
        check(tmp_path / str(i), data)


@pytest.mark.slow  # the fuzz test covers the same promise in the normal tier
def test_kills_at_one_step_after_the_other_change_nothing(reference, tmp_path):
    data, _ = reference
    fuse = 2
    while True:
        left = [fuse]

        def burn(_name: str, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] <= 0:
                raise Killed  # and every later call too, so that no clean-up runs either

        store = study(tmp_path, space(*SMALL))
        try:
            end = controller(Watched(store, burn), Watched(ToyMachine(fails=flaky), burn), policy=POLICY).run()
        except StudyStopped as stopped:  # killed three times at one place: what a user would start again
            assert "ended because the tuner itself did" in str(stopped)  # noqa: PT017
            continue
        except Killed:
            store.close()
            fuse += 3
            continue
        break
    assert fuse > 12
    assert outcome(end) == outcome(data)


CHILD = """
    import sys, time
    from pathlib import Path
    from tests.tuner.study.test_study_resume import POLICY, SMALL, flaky
    from tests.tuner.study.toy_study import ToyMachine, controller, space, study
    from tuner.study.lease import hold

    class Slow(ToyMachine):
        def measure(self, *args, **kwargs):
            time.sleep(0.05)
            outcome = super().measure(*args, **kwargs)
            time.sleep(0.05)
            return outcome

    store = study(Path(sys.argv[1]), space(*SMALL))
    with hold(store.engine, store.name):
        controller(store, Slow(fails=flaky), policy=POLICY).run()
"""


@pytest.mark.slow  # the fuzz test covers the same promise in the normal tier
def test_a_process_killed_with_kill_9_again_and_again_ends_as_if_it_had_not_been(reference, tmp_path):
    data, _ = reference
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", textwrap.dedent(CHILD), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    kills = 0
    for delay in (0.3, 0.5, 0.7, None):
        process = subprocess.Popen(command, env=environment, cwd=root, stderr=subprocess.PIPE, text=True)
        if delay is None:
            assert process.wait(60) == 0, process.stderr.read()
            break
        _wait_for_start(tmp_path)
        time.sleep(delay)
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            kills += 1
        process.communicate()
    assert kills
    assert outcome(study(tmp_path, space(*SMALL)).data()) == outcome(data)


def _wait_for_start(folder: Path) -> None:
    """Until the child has begun to work: how long that takes is the machine's affair."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            with sqlite3.connect(f"file:{folder / 'study.db'}?mode=ro", uri=True) as connection:
                if connection.execute("select count(*) from tuner_launches").fetchone()[0]:
                    return
        except sqlite3.OperationalError:
            pass
        time.sleep(0.05)
    raise AssertionError("the child did not start")
