"""How much a search costs until it has found the best: ours against what others do, replayed on whole tables.

A table holds the true speed of every candidate of a space at three levels, and which of them crash. Strategies see
measured speeds only (noise is drawn anew for every visit), are told of no rule and of no crash beforehand, and pay for
launches. A server is kept while only hot settings change (`hot`), or every candidate is launched (`cold`).

    python -m benchmarks.search --seeds 200 --output benchmarks/results/search.json

Tables come from the simulator: `physics` is the machine as it is simulated, which the model of the search resembles,
and `strange` is the same with effects laid over it that no formula of ours has a place for. A third comes from the
bundled engine, measured on a whole grid; it takes hours, and goes on where it was left:

    python -m benchmarks.search --measure benchmarks/results/search_grid.jsonl [--hours 2]
    python -m benchmarks.search --table benchmarks/results/search_grid.jsonl --output ...
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import optuna
from scipy import linalg, optimize

from tuner.engines.simulated.machine import Work, accept_length, fault_at_start, fault_under_load, plan, predict
from tuner.engines.simulated.profiles import profile_named
from tuner.engines.speculation import capacity
from tuner.records import Candidate
from tuner.search.evidence import Evidence, Measurement
from tuner.search.guide import Costs, Goal, Guide, pays
from tuner.space import Space, parse_space
from tuner.space.space import visible
from tuner.study.policy import Policy

optuna.logging.set_verbosity(optuna.logging.ERROR)

BLOCK_S = 45.0
LAUNCH_S = (10.0, 600.0)
BLOCK_SD, LAUNCH_SD = 0.012, 0.006
PATIENCE = 2
"""Suggestions in a row that are not expected to pay, after which ours ends: a study asks twice in its own way."""
FEWEST = Policy().fewest
"""Candidates that work, before which a study does not end by what its model expects."""
FINALISTS, PAIRS = 2, 4
"""What a study launches again at its end, against its baseline as often: only these can then be chosen."""

FRACTIONS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)

SPACE = """
name: search
engine: {kind: simulated, model: any, args: {tp: 8}}
workload: {concurrency: [1, 8, 30]}
baseline: {speculation: none, allreduce: nccl_ring, page: 1}
parameters:
  speculation: {choices: [none, ngram, eagle3]}
  num_steps: {low: 1, high: 6, when: speculation != 'none'}
  topk: {choices: [1, 2, 4], when: speculation == 'eagle3'}
  num_draft_tokens: {choices: [6, 12, 24], when: topk > 1}
  spec_version: {choices: [v1, v2], when: speculation != 'none'}
  disable_batch_threshold: {choices: [never, 8], when: speculation != 'none'}
  allreduce: {choices: [nccl_ring, nccl_tree, custom]}
  page: {choices: [1, 64]}
"""
HOT = frozenset(
    {"speculation", "num_steps", "topk", "num_draft_tokens", "spec_version", "disable_batch_threshold"}
    | {"steps_by_batch", "policy"}
)


@dataclass
class Table:
    """True log speed-ups over the baseline, by candidate: a list over the levels, or None for a crash."""

    name: str
    space: Space
    rates: dict[str, list[float] | None]
    accepts: dict[str, list[float | None]] = field(default_factory=dict)
    noise: Sequence[Sequence[float]] = ()
    """Deviations of log rates, all levels of a visit together, to draw from; none: of a normal distribution."""

    def __post_init__(self) -> None:
        listed = self.space.listed()
        assert listed is not None
        self.listed = listed
        self.candidates = {i: each.candidate for i, each in listed.items() if i in self.rates}
        self.baseline = self.space.baseline
        base = self.rates[self.baseline.id]
        assert base is not None
        weights = self.space.workload.weights
        self.value = {
            i: None
            if rates is None
            else math.fsum(w * math.log(r / b) for w, r, b in zip(weights, rates, base, strict=True))
            for i, rates in self.rates.items()
        }
        self.best = max(v for v in self.value.values() if v is not None)

    @property
    def legal(self) -> int:
        return sum(v is not None for v in self.value.values())

    def cold(self, candidate: Candidate) -> tuple[Any, ...]:
        return tuple((name, value) for name, value in sorted(candidate.settings.items()) if name not in HOT)


def simulated(name: str, strange: bool) -> Table:
    """A table of the simulator. `strange`: with effects that are neither in its physics nor in the search's."""
    space = parse_space(SPACE, source="search.yaml")
    profile = profile_named("pcie_blackwell_8gpu_70b")
    draw = random.Random(7)
    odd = {
        key: draw.gauss(0, sd)
        for key, sd in [
            *(((("topk", k), ("level", at)), 0.08) for k in (1, 2, 4) for at in (1, 8, 30)),
            *(((("depth", d), ("drafter", k)), 0.06) for d in range(1, 7) for k in ("ngram", "eagle3")),
            *(((("page", p), ("version", v)), 0.06) for p in (1, 64) for v in ("v1", "v2", None)),
            *(((("ring", a), ("depth", d)), 0.05) for a in ("nccl_ring", "nccl_tree", "custom") for d in range(7)),
        ]
    }
    listed = space.listed()
    assert listed is not None
    rates: dict[str, list[float] | None] = {}
    accepts: dict[str, list[float | None]] = {}
    for i, each in {**{space.baseline.id: None}, **listed}.items():
        candidate = each.candidate if each is not None else space.baseline
        settings = {**space.args, **candidate.settings}
        if _crashes(profile, settings, space.workload.concurrency):
            rates[i] = None
            continue
        found: list[float] = []
        told: list[float | None] = []
        for level in space.workload.concurrency:
            rate = predict(profile, settings, level, Work()).tokens_per_s
            chosen = plan(profile, settings, level)
            effect = -0.04 if settings["page"] == 64 and level == 1 else 0.02 if settings["page"] == 64 else 0.0
            if strange:
                depth = chosen.depth
                effect += odd.get((("topk", settings.get("topk")), ("level", level)), 0.0)
                effect += odd.get((("depth", depth), ("drafter", settings["speculation"])), 0.0)
                effect += odd[("page", settings["page"]), ("version", settings.get("spec_version"))]
                effect += odd[("ring", settings["allreduce"]), ("depth", depth)]
                effect += random.Random(f"{i}/{level}").gauss(0, 0.015)
            found.append(rate * math.exp(effect))
            told.append(accept_length(chosen) if chosen.depth else None)
        rates[i], accepts[i] = found, told
    return Table(name, space, rates, accepts)


def _crashes(profile: Any, settings: Mapping[str, Any], levels: Sequence[int]) -> bool:
    """By the machine's own faults, and by two rules more: a tree that cannot be, and a region that nobody documents."""
    if fault_at_start(profile, settings) or any(fault_under_load(profile, settings, at, Work()) for at in levels):
        return True
    rows = settings.get("num_draft_tokens")
    if rows is not None and rows > capacity(settings["num_steps"], settings["topk"]):
        return True
    return settings["page"] == 64 and settings.get("num_steps", 0) >= 5


# -- paying and measuring --------------------------------------------------------------------------------------------


@dataclass
class Visit:
    """One candidate tried. `seconds` are its blocks; `launch` says whether it needed a launch if servers are kept."""

    candidate: str
    launch: bool
    failed: bool
    incumbent: float
    """The true value of what would be chosen now."""


class Bench:
    """Measures on a table, with noise, and keeps account."""

    def __init__(self, table: Table, seed: int) -> None:
        self.table = table
        self.draw = random.Random(seed)
        self.visits: list[Visit] = []
        self.seen: dict[str, list[list[float]]] = {}
        self.values: dict[str, float] = {}
        self.failed: list[Candidate] = []
        self.measured: list[Measurement] = []
        self.up: tuple[Any, ...] | None = None
        self._effect = 0.0
        self._held: str | None = None
        """What is chosen while it is being confirmed."""

    def visit(self, candidate: Candidate) -> float | None:
        """The measured value; None where it crashed."""
        table, cold = self.table, self.table.cold(candidate)
        launch = cold != self.up
        if launch:
            self._effect = self.draw.gauss(0, LAUNCH_SD)
        rates = table.rates[candidate.id]
        if rates is None:
            self.failed.append(candidate)
            self.up = None
            self.visits.append(Visit(candidate.id, True, True, self._chosen()))
            return None
        self.up = cold
        found = [rate * math.exp(off) for rate, off in zip(rates, self._noise(len(rates)), strict=True)]
        self.seen.setdefault(candidate.id, []).append(found)
        if candidate.id == table.baseline.id:
            self.values.clear()
        self.values.pop(candidate.id, None)
        told = table.accepts.get(candidate.id) or [None] * len(found)
        for level, rate, length in zip(table.space.workload.concurrency, found, told, strict=True):
            self.measured.append(Measurement(candidate, level, rate, length))
        self.visits.append(Visit(candidate.id, launch, False, self._chosen()))
        return self.value(candidate.id)

    def _noise(self, levels: int) -> list[float]:
        """What a visit is off by: of what was seen, what launches differ by included, or as it is assumed."""
        if self.table.noise:
            sign = self.draw.choice((-1, 1))
            return [sign * one for one in self.draw.choice(self.table.noise)]
        return [self._effect + self.draw.gauss(0, BLOCK_SD) for _ in range(levels)]

    def value(self, candidate: str) -> float:
        if candidate not in self.values:
            self.values[candidate] = self._value(candidate)
        return self.values[candidate]

    def _value(self, candidate: str) -> float:
        base, mine = self._mean(self.table.baseline.id), self._mean(candidate)
        return math.fsum(w * (m - b) for w, m, b in zip(self.table.space.workload.weights, mine, base, strict=True))

    def _mean(self, candidate: str) -> list[float]:
        return [statistics.fmean(map(math.log, at)) for at in zip(*self.seen[candidate], strict=True)]

    @property
    def working(self) -> int:
        """Candidates that were measured, without the baseline."""
        return len(self.seen.keys() - {self.table.baseline.id})

    def confirm(self, pairs: int, most: int) -> None:
        """Launches the best again, and the baseline as often, on servers of their own; these figures alone decide."""
        base = self.table.baseline
        best = sorted(self.seen.keys() - {base.id}, key=self.value, reverse=True)[:most]
        self._held = self._choice()
        self.seen.clear()
        self.values.clear()
        for _ in range(pairs):
            for one in (base, *(self.table.candidates[i] for i in best)):
                self.up = None
                self.visit(one)
        self._held = None
        self.visits[-1] = replace(self.visits[-1], incumbent=self._chosen())

    def _choice(self) -> str:
        return self._held or max(self.seen, key=self.value, default=self.table.baseline.id)

    def _chosen(self) -> float:
        return self.table.value[self._choice()] or 0.0


Strategy = Callable[[Bench, int, int, Costs], None]
"""Bench, seed, most visits, costs: visits candidates after the baseline until it ends."""


def ours(bench: Bench, seed: int, most: int, costs: Costs) -> None:
    """The tuner's own: the model, asked for what promises most a second; then the finalists are confirmed."""
    space = bench.table.space
    goal = Goal(space.workload.weights)
    guide = _guide(bench.table)
    tried = {space.baseline.id}
    idle = 0
    while len(bench.visits) < most and idle < PATIENCE:
        running = dict(bench.up) if bench.up is not None else None
        now = Costs(costs.launch_s, costs.blocks_s, costs.hot, running)
        found = guide.suggest(Evidence(tuple(bench.measured), tuple(bench.failed)), tried, goal, now)
        if found is None:
            break
        idle = 0 if pays(found) or bench.working < FEWEST else idle + 1
        tried.add(found.candidate.id)
        bench.visit(found.candidate)
    bench.confirm(PAIRS, FINALISTS)


_guides: dict[str, Guide] = {}


def _guide(table: Table) -> Guide:
    if table.name not in _guides:
        space = table.space
        candidates = tuple(table.candidates.values())
        _guides[table.name] = Guide(candidates, space.baseline, space.workload.concurrency, visible(space.args))
    return _guides[table.name]


def with_optuna(sampler: Callable[[int], optuna.samplers.BaseSampler], *, constrained: bool) -> Strategy:
    """An Optuna study as others run it. Not constrained: a crash is a trial that failed."""

    def strategy(bench: Bench, seed: int, most: int, costs: Costs) -> None:
        study = optuna.create_study(direction="maximize", sampler=sampler(seed))
        while len(bench.visits) < most:
            trial = study.ask()
            candidate = bench.table.space.suggest(trial)
            value = bench.visit(candidate) if candidate.id in bench.table.rates else None
            if constrained:
                trial.set_constraint("launch", 1.0 if value is None else -1.0)
                study.tell(trial, math.log(0.5) if value is None else value)
            elif value is None:
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
            else:
                study.tell(trial, value)

    return strategy


def one_factor_at_a_time(bench: Bench, seed: int, most: int, costs: Costs) -> None:
    """From a usual configuration, each setting through all its values in turn; the best of each is kept."""
    space = bench.table.space
    values: dict[str, Any] = {p.name: (p.domain or (None,))[0] for p in space.parameters}
    values |= {"speculation": "eagle3", "num_steps": 3, "topk": 1, "spec_version": "v1"}
    values = {name: value for name, value in values.items() if name in {p.name for p in space.parameters}}
    names = [p.name for p in space.parameters]
    random.Random(seed).shuffle(names)
    best = bench.visit(_made(bench.table, values))
    for name in names:
        parameter = next(p for p in space.parameters if p.name == name)
        for value in parameter.domain or ():
            candidate = _made(bench.table, {**values, name: value})
            if value == values[name] or candidate.id in bench.seen or candidate.id not in bench.table.rates:
                continue
            if len(bench.visits) >= most:
                return
            found = bench.visit(candidate)
            if found is not None and (best is None or found > best):
                best, values = found, {**values, name: value}


def _made(table: Table, values: Mapping[str, Any]) -> Candidate:
    return table.space.suggest(optuna.trial.FixedTrial(dict(values)))


def full_grid(bench: Bench, seed: int, most: int, costs: Costs) -> None:
    """Every candidate, those of one launch together."""
    order = sorted(bench.table.candidates.values(), key=lambda one: (repr(bench.table.cold(one)), one.id))
    for candidate in order:
        if len(bench.visits) >= most:
            return
        if candidate.id != bench.table.baseline.id:
            bench.visit(candidate)


def tpe(seed: int) -> optuna.samplers.BaseSampler:
    return optuna.samplers.TPESampler(multivariate=True, group=True, seed=seed)


STRATEGIES: Mapping[str, tuple[Strategy, int]] = {
    "ours": (ours, 45),
    "TPE, crashes as FAIL": (with_optuna(tpe, constrained=False), 60),
    "TPE, constraints": (with_optuna(tpe, constrained=True), 60),
    "GP": (with_optuna(lambda seed: optuna.samplers.GPSampler(seed=seed), constrained=True), 30),
    "random": (with_optuna(lambda seed: optuna.samplers.RandomSampler(seed=seed), constrained=False), 120),
    "one factor at a time": (one_factor_at_a_time, 10_000),
    "full grid": (full_grid, 10_000),
}
"""Each with the visits after which a replay is cut off: what it would find later is not counted against it."""


# -- accounts --------------------------------------------------------------------------------------------------------


def seconds_of(visits: Sequence[Visit], launch_s: float, hot: bool) -> list[float]:
    """Engine-seconds after each visit. A crash costs its launch."""
    total, out = 0.0, []
    for visit in visits:
        total += launch_s if visit.launch or not hot else 0.0
        total += 0.0 if visit.failed else 3 * BLOCK_S
        out.append(total)
    return out


@dataclass(frozen=True)
class Run:
    """One replay."""

    visits: tuple[Visit, ...]
    best: float

    def regret_at(self, seconds: float, launch_s: float, hot: bool) -> float:
        """exp of it is what is lost; the baseline is what one has before anything is measured."""
        now = 0.0
        for at, visit in zip(seconds_of(self.visits, launch_s, hot), self.visits, strict=True):
            if at > seconds:
                break
            now = visit.incumbent
        return 1 - math.exp(now - self.best)

    def time_to(self, regret: float, launch_s: float, hot: bool) -> float:
        """Engine-seconds until what is chosen is within `regret` and stays so to the end of the replay."""
        times = seconds_of(self.visits, launch_s, hot)
        reached = math.inf
        for at, visit in zip(reversed(times), reversed(self.visits), strict=True):
            if 1 - math.exp(visit.incumbent - self.best) > regret:
                break
            reached = at
        return reached

    def launches_to(self, regret: float, hot: bool) -> float:
        times = seconds_of(self.visits, 1e6, hot)
        reached = self.time_to(regret, 1e6, hot)
        if math.isinf(reached):
            return math.inf
        return sum((v.launch or not hot) for at, v in zip(times, self.visits, strict=True) if at <= reached)

    def invalid(self, first: int) -> int:
        return sum(visit.failed for visit in self.visits[:first])

    def repeated_crashes(self) -> int:
        failed = [visit.candidate for visit in self.visits if visit.failed]
        return len(failed) - len(set(failed))


def replay(table: Table, name: str, seeds: range, costs: Costs, most: int | None = None) -> list[Run]:
    strategy, cut = STRATEGIES[name]
    runs = []
    for seed in seeds:
        bench = Bench(table, seed)
        bench.visit(table.baseline)
        strategy(bench, seed, min(cut, most or cut), costs)
        runs.append(Run(tuple(bench.visits), table.best))
    return runs


def summary(table: Table, runs: Sequence[Run], launch_s: float, hot: bool) -> dict[str, Any]:
    grid = grid_seconds(table, launch_s, hot)

    def spread(values: Sequence[float]) -> dict[str, float | None]:
        ordered = sorted(values)
        median, high = ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, math.ceil(0.9 * len(ordered)) - 1)]
        return {key: None if math.isinf(v) else round(v, 4) for key, v in (("median", median), ("p90", high))}

    return {
        "regret_at_share_of_grid_hours": {
            str(share): spread([run.regret_at(share * grid, launch_s, hot) for run in runs]) for share in FRACTIONS
        },
        "hours_to_regret": {
            str(regret): spread([run.time_to(regret, launch_s, hot) / 3600 for run in runs]) for regret in (0.01, 0.02)
        },
        "launches_to_2_percent": spread([run.launches_to(0.02, hot) for run in runs]),
        "candidates_tried": spread([len({visit.candidate for visit in run.visits}) - 1 for run in runs]),
        "invalid_launches": spread([run.invalid(10_000) for run in runs]),
        "repeated_crashes": spread([run.repeated_crashes() for run in runs]),
        "seeds": len(runs),
    }


def grid_seconds(table: Table, launch_s: float, hot: bool) -> float:
    """Of measuring every candidate that works once, and launching every one that does not."""
    crashes = sum(value is None for value in table.value.values())
    launches = len({table.cold(c) for c in table.candidates.values()}) if hot else table.legal
    return (launches + crashes) * launch_s + table.legal * 3 * BLOCK_S


# -- the toy of half a space that crashes ----------------------------------------------------------------------------

TOY = """
name: toy
engine: {kind: simulated, model: any}
workload: {concurrency: [1]}
baseline: {num_steps: 1, topk: 1, num_draft_tokens: 2}
parameters:
  num_steps: {low: 1, high: 7}
  topk: {choices: [1, 2, 4, 8]}
  num_draft_tokens: {choices: [2, 8, 32]}
"""


def toy() -> Table:
    """84 configurations of three settings, half of which crash, with the optimum beside the cliff."""
    space = parse_space(TOY, source="toy.yaml")
    listed = space.listed()
    assert listed is not None
    # The space writes a chain's number of rows away; here every combination is its own.
    rates: dict[str, list[float] | None] = {}
    for i, each in listed.items():
        steps, topk, rows = (each.values[name] for name in ("num_steps", "topk", "num_draft_tokens"))
        assert isinstance(steps, int)
        assert isinstance(topk, int)
        assert isinstance(rows, int)
        speed = 50 + 8 * min(steps, 5) - 4 * max(0, steps - 5) + 3 * math.log2(topk) + 2 * math.log2(rows)
        bad = steps * topk > 20 or rows > 8
        rates[i] = None if bad else [speed]
    return Table("toy", space, rates)


def toy_result(seeds: range) -> dict[str, Any]:
    table = toy()
    found: dict[str, Any] = {
        "configurations": len(table.candidates),
        "crash": sum(v is None for v in table.value.values()),
        "launches_at_most": 60,
        "note": "ours ends when more cannot pay; the others do not know when to",
    }
    for name in ("ours", "TPE, crashes as FAIL", "TPE, constraints", "random"):
        runs = replay(table, name, seeds, Costs(600.0, 45.0), most=61)
        found[name] = {
            "launches": statistics.fmean(len(run.visits) - 1 for run in runs),
            "invalid_launches": statistics.fmean(run.invalid(61) for run in runs),
            "invalid_most": max(run.invalid(61) for run in runs),
            "repeated_crashes": statistics.fmean(run.repeated_crashes() for run in runs),
            "regret": statistics.fmean(1 - math.exp(run.visits[-1].incumbent - run.best) for run in runs),
            "seeds": len(runs),
        }
    return found


# -- measuring the bundled engine ------------------------------------------------------------------------------------

GRID = """
name: search_grid
engine: {kind: bundled, model: smollm2-135m}
workload: {concurrency: [1, 4, 16], max_tokens: 64, temperature: 0}
baseline: {speculation: none, weights: bf16}
parameters:
  speculation: {choices: [none, ngram, eagle3, hybrid]}
  num_steps: {choices: [1, 2, 3, 4, 6, 8], when: speculation != 'none'}
  spec_version: {choices: [v1, v2], when: speculation != 'none'}
  disable_batch_threshold: {choices: [never, 4], when: speculation != 'none'}
  weights: {choices: [bf16, int8, int4]}
rules:
  - {forbid: speculation == 'eagle3' and num_steps > 6, because: drafts of the head alone rarely hold so deep}
quality: {allow_lossy: true}
profile: full
"""
BATCHES = 6
"""Launches that the candidates of one set of weights are spread over, by chance: what one launch or one hour differs by
falls on candidates of every kind, and is seen by the reference that each launch measures first."""


@dataclass(frozen=True)
class Cell:
    """One candidate on one launch, at all levels. The reference of a launch is its weights without speculation."""

    candidate: Candidate
    replicate: int
    batch: int
    reference: bool = False


def cells(space: Space, hot: frozenset[str]) -> list[Cell]:
    """Every candidate, and a fifth of them once more on another launch, in batches of one launch each."""
    listed = space.listed()
    assert listed is not None
    every = {**{space.baseline.id: space.baseline}, **{i: each.candidate for i, each in listed.items()}}

    def drawn(one: Candidate) -> str:
        return hashlib.sha256(one.id.encode()).hexdigest()

    twice = set(sorted(every, key=lambda i: drawn(every[i]))[: math.ceil(len(every) / 5)])
    groups: dict[str, list[Candidate]] = {}
    for one in sorted(every.values(), key=drawn):
        cold = repr(sorted((name, value) for name, value in one.settings.items() if name not in hot))
        groups.setdefault(cold, []).append(one)
    out = []
    for at, (_, mine) in enumerate(sorted(groups.items())):
        reference = next(one for one in mine if one.settings["speculation"] == "none")
        slots: list[list[Cell]] = [[] for _ in range(BATCHES)]
        for i, one in enumerate(mine):
            slots[i % BATCHES].append(Cell(one, 0, 0))
            if one.id in twice:
                slots[(i + BATCHES // 2) % BATCHES].append(Cell(one, 1, 0))
        for turn, slot in enumerate(slots):
            batch = turn * len(groups) + at
            mixed = sorted(slot, key=lambda cell: drawn(cell.candidate)[::-1])
            out += [replace(cell, batch=batch) for cell in (Cell(reference, batch, 0, True), *mixed)]
    return sorted(out, key=lambda cell: cell.batch)


class Grid:
    """Measures cells, by changing the running server where no launch is needed; every block is a line of the file."""

    def __init__(self, path: Path, space: Space) -> None:
        from tuner.bench.plan import window_plan
        from tuner.engines.base import Reconfigurable, get_engine
        from tuner.study.world import Machine

        engine = get_engine(space.kind)
        assert isinstance(engine, Reconfigurable)
        self.path, self.space, self.engine = path, space, engine
        self.world = Machine(space)
        self.world._plan = replace(
            window_plan("full"),
            **{"ramp_s": 1.0, "warmup_s": 2.0, "steady_span_s": 1.0, "tail_s": 2.0},
            **{"window_s": 15.0, "window_requests": 2.0, "window_cap_s": 30.0},
        )
        self.server: Any = None
        self.up: Any = None
        self.batch: int | None = None
        self.launch = max((line.get("launch", 0) for line in _lines(path)), default=0)

    def run(self, seconds: float) -> None:
        """Measures what the file lacks, until so many seconds have passed."""
        ends = time.monotonic() + seconds
        tries: dict[tuple[str, int, int], int] = {}
        for line in _lines(self.path):
            if line["reference"]:
                continue
            key = (line["candidate"], line["replicate"], line["level"])
            # A block that failed a gate is measured again when the command is: twice, then it has to do.
            tries[key] = tries.get(key, 0) + (1 if line.get("red") else 3)
        done = {key for key, count in tries.items() if count >= 3}
        left: dict[int, list[tuple[Cell, list[int]]]] = {}
        for cell in cells(self.space, self.engine.hot):
            levels = self.space.workload.concurrency
            missing = [at for at in levels if cell.reference or (cell.candidate.id, cell.replicate, at) not in done]
            if missing:
                left.setdefault(cell.batch, []).append((cell, missing))
        left = {batch: mine for batch, mine in left.items() if any(not cell.reference for cell, _ in mine)}
        print(f"{sum(len(mine) - 1 for mine in left.values())} cells left on {len(left)} launches", flush=True)
        try:
            for cell, missing in (each for mine in left.values() for each in mine):
                if time.monotonic() > ends:
                    break
                self.cell(cell, missing)
        finally:
            self.stop()

    def cell(self, cell: Cell, levels: Sequence[int]) -> None:
        from tuner.errors import LaunchFailed
        from tuner.study.engine import illegal

        if why := illegal(self.space, self.engine, cell.candidate):
            self.keep(cell, levels, {"illegal": why})
            return
        try:
            self.put(cell)
            for level in levels:
                seed = 0 if cell.reference else cell.replicate
                found = self.world.measure(
                    self.server, self.up, concurrency=level, role="screen", seed=seed, on_progress=lambda _: None
                )
                if (block := found.block) is None:
                    self.keep(cell, [level], {"failure": found.failure.kind})
                    continue
                facts = {
                    "tokens_per_s": round(block.tokens_per_s, 3),
                    "window_s": round(block.window_s, 2),
                    "accept_length": block.accept_length,
                    "red": [gate.name for gate in block.gates if not gate.ok],
                }
                self.keep(cell, [level], facts)
        except LaunchFailed as error:
            self.keep(cell, levels, {"failure": error.failure.kind})
            self.stop()

    def put(self, cell: Cell) -> None:
        """A server with these settings: the running one changed, or another."""
        from tuner.study.engine import launch_record

        kept = self.server is not None and cell.batch == self.batch
        port = self.up.port if kept else self.world.free_port()
        record = launch_record(self.space, self.engine, cell.candidate, host="127.0.0.1", port=port)
        if kept:
            self.world.reconfigure(self.server, record, self.engine.change(record))
            self.up = record
            return
        self.stop()
        log = self.path.with_suffix(".log")
        self.launch += 1
        self.server = self.world.start(record, marker={"study": "benchmark", "launch": "1"}, log_path=log)
        self.up, self.batch = record, cell.batch
        self.server.wait_ready()

    def keep(self, cell: Cell, levels: Sequence[int], facts: Mapping[str, Any]) -> None:
        """A line for each level."""
        candidate = cell.candidate
        with open(self.path, "a", encoding="utf-8") as file:
            for level in levels:
                line = {"candidate": candidate.id, "settings": dict(candidate.settings), "replicate": cell.replicate}
                line |= {"reference": cell.reference, "launch": self.launch, "batch": cell.batch}
                line |= {"at": round(time.time()), "level": level, **facts}
                file.write(json.dumps(line) + "\n")
                print(json.dumps(line), flush=True)

    def stop(self) -> None:
        if self.server is not None:
            self.server.stop()
        self.server = None


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)


def _settled(blocks: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Of blocks of one candidate at one level on one launch those that passed their gates; all where none did."""
    return [one for one in blocks if not one["red"]] or list(blocks)


def in_effect(settings: Mapping[str, Any], level: int) -> str:
    """What runs at a level: a threshold that is not reached does not matter there."""
    threshold = settings.get("disable_batch_threshold", "never")
    kept = {k: v for k, v in settings.items() if k != "disable_batch_threshold"}
    return json.dumps([kept, threshold != "never" and level > threshold], sort_keys=True)


@dataclass(frozen=True)
class Fitted:
    """Of one level: log rate by what is in effect, what it varies by (standard deviations, `drift_s` in seconds), and
    what blocks are left with: by candidate, as (launch, deviation)."""

    rates: Mapping[str, float]
    varies: Mapping[str, float]
    left: Mapping[str, Sequence[tuple[int, float]]]


_VARIES = ("settings", "candidate", "launch", "drift", "block")
_START = (0.3, 0.03, 0.03, 0.05, 0.03)
_DRIFT_S = 900.0
_DIFFER = ("drafter", "active", "version", "weights", "steps")


def _features(settings: Mapping[str, Any], level: int) -> tuple[Any, ...]:
    drafter = settings["speculation"]
    threshold = settings.get("disable_batch_threshold", "never")
    active = drafter != "none" and (threshold == "never" or level <= threshold)
    steps = math.log1p(settings["num_steps"]) if active else 0.0
    return drafter, active, settings.get("spec_version"), settings["weights"], steps


def fitted(rows: Sequence[Mapping[str, Any]], level: int, *, smooth: bool = True) -> Fitted:
    """What candidates are worth, apart from what launches and the hours differed by: a Gaussian process.

    A block's log rate is a function of the settings, near where they are near, a part of the candidate's own, a part of
    its launch's, a drift of the machine over time, and noise; how large each is, is what makes the blocks most likely.
    Not `smooth`: candidates owe nothing to others.
    """
    y = np.array([math.log(row["tokens_per_s"]) for row in rows])
    whose = [in_effect(row["settings"], level) for row in rows]
    kinds = sorted(set(whose))
    of = np.array([kinds.index(one) for one in whose])
    features = [_features(rows[whose.index(kind)]["settings"], level) for kind in kinds]
    apart = np.array([[[float(a != b) for b in column] for a in column] for column in zip(*features, strict=True)])
    steps = np.array([each[-1] for each in features])
    apart[-1] = abs(steps[:, None] - steps)
    launch = np.array([row["launch"] for row in rows])
    at = np.array([row["at"] for row in rows], float)
    together, seconds = launch[:, None] == launch, abs(at[:, None] - at)
    count = len(_VARIES)

    def parts(log: Any) -> tuple[Any, Any]:
        var = np.exp(2 * log[:count])
        near = var[0] * np.exp(-np.tensordot(np.exp(log[count : count + len(_DIFFER)]), apart, 1))
        kind = near + (var[1] if smooth else 100.0) * np.eye(len(kinds))
        other = var[2] * together + var[3] * np.exp(-seconds / np.exp(log[-1])) + var[4] * np.eye(len(rows))
        return kind, kind[np.ix_(of, of)] + other

    def solved(log: Any) -> tuple[float, Any, Any]:
        kind, cover = parts(log)
        factor = linalg.cho_factor(cover, lower=True)
        ones = linalg.cho_solve(factor, np.ones(len(rows)))
        mean = float(ones @ y / ones.sum())
        solution = linalg.cho_solve(factor, y - mean)
        loss = float((y - mean) @ solution) + 2 * float(np.log(np.diag(factor[0])).sum())
        return loss, mean, kind[:, of] @ solution

    begin = np.log([*_START, *([0.3] * len(_DIFFER)), _DRIFT_S])
    bounds = [(math.log(0.002), math.log(2.0))] * count + [(math.log(0.003), math.log(10.0))] * len(_DIFFER)
    bounds.append((math.log(60.0), math.log(7200.0)))
    best = optimize.minimize(lambda log: solved(log)[0], begin, method="L-BFGS-B", bounds=bounds).x
    _, mean, own = solved(best)
    rates = dict(zip(kinds, (mean + own).tolist(), strict=True))
    left: dict[str, list[tuple[int, float]]] = {}
    for row, one, log_rate in zip(rows, whose, y, strict=True):
        left.setdefault(row["candidate"], []).append((row["launch"], float(log_rate - rates[one])))
    varies = dict(zip(_VARIES, np.exp(best[:count]).tolist(), strict=True))
    return Fitted(rates, {**varies, "drift_s": math.exp(best[-1])}, left)


def fits(path: Path, *, smooth: bool = True) -> dict[int, Fitted]:
    """The levels of a measured grid; of a block that was measured again only what passed its gates."""
    cell: dict[tuple[str, int, int], list[dict[str, Any]]] = {}
    for line in _lines(path):
        if line.get("tokens_per_s"):
            cell.setdefault((line["candidate"], line["level"], line["launch"]), []).append(line)
    levels = sorted({level for _, level, _ in cell})
    return {
        level: fitted(
            [row for (_, at, _), rows in cell.items() if at == level for row in _settled(rows)], level, smooth=smooth
        )
        for level in levels
    }


def measured_table(path: Path, *, smooth: bool = True) -> Table:
    """The table of a grid that was measured; what has no figure at a level does not work.

    Candidates that are the same in effect at a level share its rate. Noise is what a candidate differed by between its
    two launches: all levels of it together, since they follow one another within a minute.
    """
    space = parse_space(GRID, source="grid.yaml")
    levels = space.workload.concurrency
    lines, by_level = list(_lines(path)), fits(path, smooth=smooth)
    rates: dict[str, list[float] | None] = {}
    told: dict[str, list[float | None]] = {}
    for line in lines:
        if (i := line["candidate"]) in rates:
            continue
        known = all(i in by_level[level].left for level in levels)
        mine = [by_level[level].rates[in_effect(line["settings"], level)] for level in levels] if known else []
        rates[i] = [math.exp(one) for one in mine] if known else None
        accepts = {each["level"]: each.get("accept_length") for each in lines if each["candidate"] == i}
        told[i] = [accepts.get(level) for level in levels]
    noise = []
    for i in rates:
        by_launch = [dict(by_level[level].left.get(i, ())) for level in levels]
        common = sorted(set.intersection(*(set(one) for one in by_launch)))
        noise += [
            [(one[after] - one[before]) / math.sqrt(2) for one in by_launch]
            for before, after in itertools.pairwise(common)
        ]
    return Table("smoothed" if smooth else "as measured", space, rates, told, noise)


def measured_tables(path: Path) -> Iterator[Table]:
    """The grid smoothed and as it was measured, each with the noise that was seen, and with that of a quiet machine.

    Smoothed rates owe something to their neighbours, which is what a model counts on; rates as they were measured have
    the noise of their own blocks in them for a truth, which nobody can foresee.
    """
    for smooth in (True, False):
        table = measured_table(path, smooth=smooth)
        yield table
        yield replace(table, name=f"{table.name}, quiet", noise=())


def grid_facts(path: Path) -> dict[str, Any]:
    """How a grid was measured, and how noisy that was."""
    table = measured_table(path)
    lines = [line for line in _lines(path) if line.get("tokens_per_s")]
    spread = np.array(table.noise)
    return {
        "blocks": len(lines),
        "launches": len({line["launch"] for line in lines}),
        "window_s_least": min(line["window_s"] for line in lines),
        "failed_a_gate": sum(bool(line["red"]) for line in lines),
        "candidates": len(table.candidates),
        "repeated": len(table.noise),
        "noise_sd_by_level": [round(float(one), 4) for one in np.sqrt((spread**2).mean(axis=0))],
        "varies": {level: {k: round(v, 4) for k, v in fit.varies.items()} for level, fit in fits(path).items()},
        "noise_sd_of_the_mean": round(float(np.sqrt((spread.mean(axis=1) ** 2).mean())), 4),
    }


# -- the whole -------------------------------------------------------------------------------------------------------


def compare(table: Table, seeds: Mapping[str, range], names: Sequence[str]) -> dict[str, Any]:
    """All strategies on a table. Ours plans with the costs that it is charged; nobody else knows of costs."""
    out: dict[str, Any] = {
        "candidates": len(table.candidates),
        "work": table.legal,
        "best_speedup": round(math.exp(table.best), 4),
        "grid_hours": {
            f"{launch_s:g} s, {'hot' if hot else 'cold'}": round(grid_seconds(table, launch_s, hot) / 3600, 2)
            for launch_s in LAUNCH_S
            for hot in (True, False)
        },
        "strategies": {},
    }
    for name in names:
        began = time.process_time()
        known: dict[float, list[Run]] = {}
        found = {}
        for launch_s in LAUNCH_S:
            for hot in (True, False):
                # Where nothing is hot all candidates cost the same, and the order does not hang on how much.
                plans = launch_s if name == "ours" and hot else 0.0
                if plans not in known:
                    costs = Costs(launch_s, 3 * BLOCK_S, HOT if hot else frozenset())
                    known[plans] = replay(table, name, seeds[name], costs)
                runs = known[plans]
                found[f"{launch_s:g} s, {'hot' if hot else 'cold'}"] = summary(table, runs, launch_s, hot)
        out["strategies"][name] = found
        print(f"{table.name}: {name}: {time.process_time() - began:.0f} s of CPU", file=sys.stderr, flush=True)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--gp-seeds", type=int, default=10, help="Optuna's GP takes a second or more a proposal")
    parser.add_argument("--only", nargs="*", default=list(STRATEGIES), help="strategies")
    parser.add_argument("--tables", nargs="*", help="some of the tables: physics, strange, toy; or of a measured grid")
    parser.add_argument("--table", type=Path, help="a measured grid in place of the simulator's tables")
    parser.add_argument("--measure", type=Path, help="measure the grid into this file")
    parser.add_argument("--hours", type=float, default=1000.0, help="stop measuring after so many")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--space", action="store_true", help="print the space of the measured grid")
    chosen = parser.parse_args()
    if chosen.space:
        print(GRID.strip())
        return
    if chosen.measure:
        Grid(chosen.measure, parse_space(GRID, source="grid.yaml")).run(3600 * chosen.hours)
        return
    seeds = {name: range(chosen.gp_seeds if name == "GP" else chosen.seeds) for name in STRATEGIES}
    seeds["full grid"] = range(min(chosen.seeds, 5))
    result: dict[str, Any] = {
        "command": "python -m benchmarks.search " + " ".join(sys.argv[1:]),
        "quiet_noise": {"block_sd": BLOCK_SD, "launch_sd": LAUNCH_SD},
        "block_s": BLOCK_S,
        "tables": {},
    }
    if chosen.table:
        result["grid"] = grid_facts(chosen.table)
        for table in measured_tables(chosen.table):
            if chosen.tables is None or table.name in chosen.tables:
                result["tables"][table.name] = compare(table, seeds, chosen.only)
    else:
        result["simulated"] = True
        for name in chosen.tables or ("physics", "strange", "toy"):
            if name == "toy":
                result["toy"] = toy_result(range(chosen.seeds))
            else:
                result["tables"][name] = compare(simulated(name, name == "strange"), seeds, chosen.only)
    text = json.dumps(result, indent=1) + "\n"
    if chosen.output:
        chosen.output.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
