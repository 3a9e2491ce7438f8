"""A study of 5,000 stored candidates, from its database: `python -m benchmarks.many_candidates --output FILE`.

Seconds that `tuner status` takes (the whole command; its reading alone), that `resume` takes until it knows what comes
next, and that the model takes for a suggestion; and again where blocks tell what became of drafts, by depth and by the
kinds of prompts that `mixed` has. The study is simulated; the database is a real SQLite file.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy as sa

from tuner.engines.simulated.blocks import block
from tuner.records import LaunchRecord
from tuner.space import Space, parse_space
from tuner.study import tables as t
from tuner.study.data import Budget, Slot
from tuner.study.engine import illegal
from tuner.study.evidence import Reader, costs_of, evidence_of, goal_of
from tuner.study.sampler import Proposal, Proposer, proposal_of
from tuner.study.schedule import part_of
from tuner.study.score import FAILED, Score
from tuner.study.session import current_fingerprint
from tuner.study.store import StudyStore, create_study, open_study
from tuner.study.summary import summary

SPACE = """
name: many
engine: {kind: simulated, model: any}
workload: {concurrency: [1, 8, 32]}
baseline: {speculation: none}
parameters:
  speculation: {choices: [ngram, eagle3]}
  num_steps: {low: 1, high: 16}
  topk: {choices: [1, 2, 4, 8]}
  spec_version: {choices: [v1, v2]}
  disable_batch_threshold: {choices: [never, 4, 8, 16, 32, 64]}
  env.NCCL_PROTO: {choices: [unset, LL, LL128, Simple]}
budget: {launches: 6000, candidates: 6000}
"""
NAME = "many"
KINDS = 7
"""Kinds of prompts that `mixed` has."""


def counters(settings: Mapping[str, Any], kinds: int, tokens: float) -> tuple[float, dict[str, float]]:
    """Tokens per verify step, and what a server and a bench count of these settings' drafts; kinds share the tokens."""
    reached = [[(0.3 + 0.6 * kind / kinds) ** (d + 1) for d in range(settings["num_steps"])] for kind in range(kinds)]
    lengths = [1 + math.fsum(each) for each in reached]
    steps = [tokens / kinds / length for length in lengths]
    told = {"server_verify_steps": math.fsum(steps), "chunks": math.fsum(steps)}
    for depth, chances in enumerate(zip(*reached, strict=True), 1):
        told[f"accepted_at_depth_{depth}"] = math.fsum(c * n for c, n in zip(chances, steps, strict=True))
    for kind, length in enumerate(lengths):
        figures = {"requests": 8.0, "ms_per_token": 10.0, "tokens_per_chunk": length, "tokens": tokens / kinds}
        told |= {f"kind/{kind}/{name}": value for name, value in figures.items()}
    return tokens / told["server_verify_steps"], told


def made(url: str, count: int, space: Space, kinds: int = 0) -> StudyStore:
    """A study in which `count` candidates were tried, a tenth of which did not work.

    With `kinds` the blocks of those that speculate tell what became of their drafts.
    """
    budget = Budget(**space.budget.model_dump())
    store = create_study(
        NAME,
        space=space,
        space_text=SPACE,
        fingerprint=current_fingerprint(space),
        seed=1,
        budget=budget,
        storage=url,
    )
    draw = random.Random(1)
    listed = list((space.listed() or {}).values())
    draw.shuffle(listed)
    chosen = listed[:count]
    record = LaunchRecord("simulated", "1", "any", ("x",), {}, "127.0.0.1", 8000, {}, {}, "any", simulated=True)
    slots = [Slot(space.baseline.id, "screen", 0), *(Slot(one.candidate.id, "screen", 0) for one in chosen)]
    settings = {space.baseline.id: space.baseline.settings} | {o.candidate.id: o.candidate.settings for o in chosen}
    works = {slot.candidate_id: i == 0 or draw.random() < 0.9 for i, slot in enumerate(slots)}
    gains = {slot.candidate_id: draw.gauss(0.0, 0.1) if i else 0.0 for i, slot in enumerate(slots)}
    launches, blocks, names = [], [], []
    now = 1_000_000.0
    for number, slot in enumerate(slots, 1):
        if number > 1:
            names.append({"study": NAME, "id": slot.candidate_id, "settings": dict(settings[slot.candidate_id])})
        same = {"study": NAME, "candidate": slot.candidate_id, "role": "screen", "repetition": 0}
        failed = {"kind": "startup_crash", "phase": "start", "message": "it ended"}
        launches.append(
            {
                **same,
                "id": number,
                "state": "done" if works[slot.candidate_id] else "failed",
                "marker": "",
                "log_path": "",
                "record": record.to_dict(),
                "started_at": now,
                "ready_at": now + 60,
                "ended_at": now + 200,
                "failure": None if works[slot.candidate_id] else failed,
                "forgiven": False,
            }
        )
        now += 200
        for level in space.workload.concurrency if works[slot.candidate_id] else ():
            rate = 100 * level**0.7 * math.exp(gains[slot.candidate_id] + draw.gauss(0.0, 0.01))
            seen = block(level, "screen", rate, started_at=now)
            if kinds and (mine := settings[slot.candidate_id])["speculation"] != "none":
                length, told = counters(mine, kinds, seen.tokens)
                seen = replace(seen, accept_length=length, counters={**seen.counters, **told})
            blocks.append(
                {
                    **same,
                    "launch": number,
                    "concurrency": level,
                    "attempt": 0,
                    "valid": True,
                    "ended_at": now,
                    "block": seen.to_dict(),
                }
            )
    with store.engine.begin() as connection:
        connection.execute(sa.insert(t.candidates), names)
        connection.execute(sa.insert(t.launches), launches)
        connection.execute(sa.insert(t.blocks), blocks)
    _trials(store, space, [proposal_of(space, one) for one in chosen], works, gains)
    store.put_pairs(store.data().pairs)
    store.set_state("interrupted", "for the benchmark")
    return store


def _trials(
    store: StudyStore, space: Space, proposals: list[Proposal], works: dict[str, bool], gains: dict[str, float]
) -> None:
    """The rows that Optuna would write, in one go: one by one takes minutes."""
    store.trials.begin("baseline", space.baseline.id, None)
    store.trials.tell(0, Score(0.0, {"launch": -1.0}, {}))
    rows: dict[str, list[dict[str, Any]]] = {}

    def add(table: str, **row: Any) -> None:
        rows.setdefault(table, []).append(row)

    for number, each in enumerate(proposals, 1):
        name, trial = each.candidate.id, number + 1
        found = Score(gains[name], {"launch": -1.0}, {}) if works[name] else FAILED
        add("trials", trial_id=trial, number=number, study_id=1, state="COMPLETE")
        add("trial_values", trial_id=trial, objective=0, value=found.value, value_type="FINITE")
        for key, told in (("candidate", name), ("kind", "measured"), ("why", "")):
            add("trial_user_attributes", trial_id=trial, key=key, value_json=json.dumps(told))
        for key, value in found.constraints.items():
            add("trial_system_attributes", trial_id=trial, key=f"constraints:{key}", value_json=json.dumps(value))
        for key, distribution in each.distributions.items():
            add(
                "trial_params",
                trial_id=trial,
                param_name=key,
                param_value=distribution.to_internal_repr(each.params[key]),
                distribution_json=optuna.distributions.distribution_to_json(distribution),
            )
    with store.engine.begin() as connection:
        for table, several in rows.items():
            connection.execute(sa.insert(sa.table(table, *map(sa.column, several[0]))), several)


def timed(act: Callable[[], Any], times: int = 3) -> float:
    """The median of some tries, in seconds."""
    seen = []
    for _ in range(times):
        began = time.perf_counter()
        act()
        seen.append(time.perf_counter() - began)
    return sorted(seen)[times // 2]


def measure(folder: Path, count: int) -> dict[str, Any]:
    space = parse_space(SPACE, source="many.yaml")
    url = f"sqlite:///{folder / 'study.db'}"
    made(url, count, space).close()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "tuner", "status", NAME, "--storage", url]
    status_s = timed(lambda: subprocess.run(command, check=True, capture_output=True, env=environment))
    bare_s = timed(lambda: subprocess.run([*command[:3], "--help"], check=True, capture_output=True, env=environment))

    def read() -> None:
        store = open_study(NAME, url)
        summary(store.data())
        store.close()

    read_s = timed(read)
    found = resumed(url, folder)
    telling = f"sqlite:///{folder / 'telling.db'}"
    made(telling, count, space, KINDS).close()
    return {
        "candidates": count,
        "status_command_s": round(status_s, 3),
        "a_command_that_does_nothing_s": round(bare_s, 3),
        "status_reading_s": round(read_s, 3),
        **found,
        "of_blocks_that_tell_acceptance": {"kinds": KINDS, **resumed(telling, folder)},
    }


def resumed(url: str, folder: Path) -> dict[str, float]:
    """Seconds until the study is open and it is known what comes next; of the first suggestion, of one after that."""
    from tuner.engines.base import get_engine
    from tuner.study.controller import Controller
    from tuner.study.policy import POLICIES
    from tuner.study.simulated_world import world_of

    began = time.perf_counter()
    store = open_study(NAME, url)
    data = store.data()
    engine = get_engine(data.space.kind)
    worker = Controller(store, engine, world_of(data.space, 1), policy=POLICIES["full"], folder=folder)
    worker._next(worker._recover())
    ready_s = time.perf_counter() - began
    listed = data.space.listed()
    part = part_of(data.space, lambda one: illegal(data.space, engine, one) is None)
    proposer, reader = Proposer(data.space, data.seed, listed, None, part), Reader()

    def suggest() -> None:
        tried = [trial.candidate_id for trial in data.trials]
        costs = costs_of(data, frozenset(), None)
        proposer.propose(tried, store.trials.history, evidence_of(data, reader), goal_of(data), costs)

    first_s = timed(suggest, 1)
    later_s = timed(suggest, 9)
    store.close()
    return {
        "resume_ready_s": round(ready_s, 3),
        "first_suggestion_s": round(first_s, 3),
        "suggestion_s": round(later_s, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--candidates", type=int, default=5000)
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="spec-tuner-many-") as folder:
        found = measure(Path(folder), chosen.candidates)
    found["command"] = "python -m benchmarks.many_candidates " + " ".join(sys.argv[1:])
    found["machine"] = {"cores": os.cpu_count(), "python": platform.python_version()}
    text = json.dumps(found, indent=1) + "\n"
    if chosen.output:
        chosen.output.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
