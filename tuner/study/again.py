"""Measures a launch record again, outside of any study: a fresh server, or one that runs, at every level."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tuner.errors import EnvironmentBroken, LaunchFailed
from tuner.judge.quality import Answers
from tuner.records import Block, Failure, LaunchRecord, Role
from tuner.study.engine import StudyEngine, not_in_effect, pointless, speculates
from tuner.study.probe import HttpProbe, NoAnswer
from tuner.study.world import RunningServer, World

ATTEMPTS = 3
"""Measurements of one block until it passes its gates."""


@dataclass
class Measured:
    """What one launch came to.

    Args:
        blocks: level → the valid block.
        effective: what the server says about itself; None: it does not say.
        answers: to the output-quality gate's prompts; None: not asked, or not given (`no_answers` says why).
        judged: the recorded answers with the likelihoods that this server gives them.
        failure: that a setting is not in effect, or speculation does nothing.
    """

    blocks: dict[int, Block] = field(default_factory=dict)
    effective: dict[str, Any] | None = None
    answers: Answers | None = None
    judged: Answers | None = None
    no_answers: str = ""
    failure: Failure | None = None


class Started(Protocol):
    """How a server comes up, as a context."""

    def __enter__(self) -> RunningServer:
        """The server, ready or not."""

    def __exit__(self, *error: object) -> None:
        """Ends it, where it is ours."""


class Fresh:
    """A server that is started for the measurement, and ended after it."""

    def __init__(self, world: World, record: LaunchRecord, log: Path) -> None:
        self._world, self._record, self._log = world, record, log
        self._marker = {"study": f"again-{uuid.uuid4().hex[:12]}", "launch": "0"}

    def __enter__(self) -> RunningServer:
        self._server = self._world.start(self._record, marker=self._marker, log_path=self._log)
        return self._server

    def __exit__(self, *error: object) -> None:
        self._server.stop()
        self._world.reap(self._marker)


def measure_again(
    started: Started,
    world: World,
    record: LaunchRecord,
    engine: StudyEngine,
    levels: Sequence[int],
    *,
    seed: int,
    role: Role = "confirm",
    probe: HttpProbe | None = None,
    recorded: Answers | None = None,
    say: Callable[[str], None] = lambda _line: None,
) -> Measured:
    """One launch: readiness, a real completion, what is in effect, the answers, and one valid block a level.

    A setting that is not in effect ends it, with `failure`: figures of something else would tell nothing.

    Raises:
        LaunchFailed: the server does not come up, or does not hold.
        EnvironmentBroken: no block of a level passes its gates.
    """
    found = Measured()
    with started as server:
        server.wait_ready()
        server.smoke()
        found.effective = server.server_info()
        if found.effective is not None:
            found.failure = not_in_effect(engine.mismatches(record, found.effective))
            if found.failure is not None:
                return found
        if probe is not None:
            _ask(found, probe, record, recorded)
        for level in levels:
            block = _block(world, server, record, level, role, seed)
            gate = speculates(record, block)
            if gate is not None and not gate.ok:
                found.failure = pointless(gate, level)
                return found
            say(f"concurrency {level}: {block.tokens_per_s:.1f} tokens/s")
            found.blocks[level] = block
    return found


def _ask(found: Measured, probe: HttpProbe, record: LaunchRecord, recorded: Answers | None) -> None:
    try:
        found.answers = probe.answers(record)
        if recorded is not None and recorded.texts != found.answers.texts:
            # They differ: this server says how unlikely each side's answers are to it.
            found.judged, found.answers = probe.judged(record, recorded), probe.judged(record, found.answers)
    except NoAnswer as error:
        found.no_answers = str(error)


def _block(world: World, server: RunningServer, record: LaunchRecord, level: int, role: Role, seed: int) -> Block:
    red = ""
    for _ in range(ATTEMPTS):
        outcome = world.measure(
            server, record, concurrency=level, role=role, seed=seed, on_progress=lambda _progress: None
        )
        block = outcome.block
        if block is None:
            if outcome.failure is None:
                raise EnvironmentBroken(f"the block at concurrency {level} gave no figures")
            raise LaunchFailed(outcome.failure)
        if block.valid:
            return block
        red = ", ".join(f"{gate.name} ({gate.detail})" for gate in block.gates if not gate.ok)
    raise EnvironmentBroken(
        f"no valid block at concurrency {level} in {ATTEMPTS} attempts: {red}. Nothing is lost; stop what else runs on "
        "this machine and run it again"
    )
