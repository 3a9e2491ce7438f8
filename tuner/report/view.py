"""What a report shows, as plain data: a pure function of a study's records. Every rendering starts from it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Literal

from tuner.judge.quality import Quality
from tuner.records import SEARCH, Block, Failure, Recommendation, Role, Setting, Verdict
from tuner.report import evidence as ev
from tuner.report.importance import Effect, Importance, effects, importances
from tuner.report.model import Expected, expected
from tuner.study.data import StudyData
from tuner.study.decide import level_verdicts, pareto_set, recommendation, verdicts_of
from tuner.study.looks import OUT
from tuner.study.places import PlaceShare, shares
from tuner.study.planner import launches_used, whole_pairs
from tuner.study.policy import policy_of
from tuner.study.quality import verdicts as answers
from tuner.study.score import level_ratios, weights

Standing = Literal[
    "baseline", "winner", "finalist", "screened", "out of the race", "failed", "ruled out", "not measured"
]


@dataclass(frozen=True)
class Latency:
    """Of a whole request, in milliseconds. `p99` is None under 100 requests in each block."""

    mean: float | None
    p50: float | None
    p99: float | None


@dataclass(frozen=True)
class LevelRow:
    """One candidate at one level, over the valid blocks of its best role: the confirmation's, else the search's.

    Args:
        tokens_per_s: mean output tokens per second.
        per_request_tokens_per_s: the same for one stream.
        latency: of a whole request: `mean` weighted by requests, the percentiles medians over blocks.
        requests, failed_requests: summed over blocks.
        change: geometric mean of candidate / baseline over `pairs` pairs; None without a pair, 1.0 for the baseline.
        verdict: with an interval, where the decision rests on one.
        attempts: blocks measured at this level in any role, invalid ones included.
    """

    concurrency: int
    role: Role | None
    blocks: int
    attempts: int
    tokens_per_s: float | None
    per_request_tokens_per_s: float | None
    latency: Latency
    ttft_p50_ms: float | None
    accept_length: float | None
    requests: int
    failed_requests: int
    change: float | None
    pairs: int
    verdict: Verdict | None


@dataclass(frozen=True)
class CandidateView:
    """One candidate. `overall` is the weighted geometric mean of its changes; None unless every level has one."""

    id: str
    settings: Mapping[str, Setting]
    standing: Standing
    wins_at: tuple[int, ...]
    rows: tuple[LevelRow, ...]
    overall: float | None
    why: str


@dataclass(frozen=True)
class FailureView:
    """Launches of one candidate that failed in the same way."""

    candidate_id: str
    failure: Failure
    launches: tuple[int, ...]
    log_path: str


@dataclass(frozen=True)
class InvalidBlock:
    """A block that a gate has invalidated; `repeated` tells whether a later attempt was valid."""

    candidate_id: str
    concurrency: int
    role: Role
    gate: str
    value: float
    limit: float
    detail: str
    repeated: bool


@dataclass(frozen=True)
class StudyView:
    """A study, ready to be shown.

    `rounds` has the finalists and the whole pairs of each round of confirmation.
    """

    name: str
    state: str
    reason: str
    profile: str
    simulated: bool
    created_at: float
    elapsed_s: float
    recommendation: Recommendation
    levels: tuple[int, ...]
    level_weights: Mapping[int, float]
    candidates: tuple[CandidateView, ...]
    failures: tuple[FailureView, ...]
    invalid: tuple[InvalidBlock, ...]
    launches: Mapping[str, int]
    launches_used: int
    budget_launches: int
    pairs: int
    valid_blocks: int
    rounds: tuple[tuple[int, int], ...]
    engine: str
    engine_version: str
    model: str
    fixed_args: Mapping[str, Any]
    fixed_env: Mapping[str, str | None]
    machine: Mapping[str, Any]
    places: tuple[PlaceShare, ...]
    prompts: str
    max_tokens: int
    temperature: float
    objective: str
    window_s: float | None
    warmup_s: float | None
    rules: tuple[tuple[str, str], ...]
    baseline_id: str
    shown: tuple[str, ...]
    answers: Mapping[str, Quality]
    evidence: tuple[ev.Evidence, ...]
    latencies: tuple[ev.LatencyChange, ...]
    axes: tuple[ev.AxisChange, ...]
    acceptance: tuple[ev.Acceptance, ...]
    round_times: tuple[ev.RoundTime, ...]
    importances: tuple[Importance, ...]
    effects: tuple[Effect, ...]
    untried: Mapping[str, tuple[Setting, ...]]
    """Setting → values that no measured candidate has; only of settings with a list of values."""
    ranges: Mapping[str, tuple[float, float]]
    """Setting → lowest and highest value, of settings with a range."""
    pareto: tuple[str, ...] | None
    """The Pareto set, the baseline's id among them where it is in it; None where the objective is another one."""
    confirmed: Mapping[str, Mapping[int, Verdict]]
    """Candidate → level → what its confirmation pairs say there, whatever is claimed beside it."""
    predicted: Mapping[str, tuple[Expected, ...]]
    """Candidate of `shown` → what the search's model expects, at the levels and between them."""

    def candidate(self, candidate_id: str) -> CandidateView:
        """A candidate by its id."""
        return next(candidate for candidate in self.candidates if candidate.id == candidate_id)


def study_view(data: StudyData) -> StudyView:
    """The view of a study at any moment, also while it runs, and when everything in it has failed."""
    found = recommendation(data)
    shown = ev.shown(data, found)
    verdicts = {(v.candidate_id, v.concurrency): v for v in (*data.verdicts, *verdicts_of(found))}
    # What was measured beside a change of a schedule alone was never in the race.
    slots = [*data.by_slot, *data.launched_for, *data.changed_to]
    beside = {slot.candidate_id for slot in slots if slot.role == "edge"}
    beside -= {data.baseline.id, *(trial.candidate_id for trial in data.trials)}
    candidates = [_candidate(data, found, verdicts, one) for one in data.candidates if one not in beside]
    valid = [stored.block for stored in data.blocks.values() if stored.block.valid]
    states = [launch.state for launch in data.launches]
    return StudyView(
        name=data.name,
        state=data.state,
        reason=data.reason,
        profile=data.space.profile,
        simulated=found.simulated,
        created_at=data.created_at,
        elapsed_s=data.elapsed_s,
        recommendation=found,
        levels=tuple(sorted(data.levels)),
        level_weights=weights(data),
        candidates=tuple(sorted(candidates, key=_order)),
        failures=_failures(data),
        invalid=_invalid(data),
        launches={state: states.count(state) for state in dict.fromkeys(states)},
        launches_used=launches_used(data),
        budget_launches=data.budget.launches,
        pairs=policy_of(data).pairs,
        valid_blocks=len(valid),
        rounds=tuple((len(each.finalists), whole_pairs(data, each)) for each in data.confirmations),
        engine=data.space.kind,
        engine_version=str(data.fingerprint.get("engine_version", "unknown")),
        model=data.space.model,
        fixed_args=data.space.args,
        fixed_env=data.space.env,
        machine=dict(data.fingerprint.get("hardware", {})),
        places=shares(data),
        pareto=pareto_set(data) if data.space.objective.maximize == "pareto" else None,
        confirmed=level_verdicts(data),
        prompts=data.space.workload.prompts,
        max_tokens=data.space.workload.max_tokens,
        temperature=data.space.workload.temperature,
        objective=data.space.objective.maximize,
        window_s=median(block.window_s for block in valid) if valid else None,
        warmup_s=median(block.warmup_s for block in valid) if valid else None,
        rules=tuple((rule.forbid.text, rule.because) for rule in data.space.rules),
        baseline_id=data.baseline.id,
        shown=shown,
        answers=answers(data),
        evidence=ev.evidence(data),
        latencies=ev.latencies(data, shown),
        axes=ev.axes(data, shown),
        acceptance=ev.acceptance(data, shown),
        round_times=ev.round_times(data, shown),
        importances=importances(data),
        effects=effects(data),
        untried=_untried(data),
        ranges={p.name: p.ends for p in data.space.parameters if p.choices is None},
        predicted=expected(data, shown),
    )


def _untried(data: StudyData) -> dict[str, tuple[Setting, ...]]:
    measured = [data.settings_of(candidate) for candidate in {s.candidate_id for s in data.blocks.values()}]
    found = {}
    for parameter in data.space.parameters:
        seen = [settings.get(parameter.name) for settings in measured]
        found[parameter.name] = tuple(value for value in parameter.domain or () if value not in seen)
    return {name: values for name, values in found.items() if values}


def _order(candidate: CandidateView) -> tuple[bool, bool, bool, float, str]:
    """The baseline, the winner, then by speed; what has no figure comes last."""
    return (
        candidate.standing != "baseline",
        candidate.standing != "winner",
        candidate.overall is None,
        -(candidate.overall or 0.0),
        candidate.id,
    )


def _candidate(
    data: StudyData,
    found: Recommendation,
    verdicts: Mapping[tuple[str, int | None], Verdict],
    candidate_id: str,
) -> CandidateView:
    rows = tuple(_row(data, verdicts, candidate_id, level) for level in sorted(data.levels))
    wins_at = tuple(
        choice.concurrency
        for choice in found.per_concurrency
        if choice.winner is not None and choice.winner.id == candidate_id and choice.concurrency is not None
    )
    changes = {row.concurrency: row.change for row in rows if row.change is not None}
    share = weights(data)
    overall = None
    if changes.keys() == share.keys() and candidate_id not in data.failed:
        overall = math.exp(math.fsum(share[level] * math.log(change) for level, change in changes.items()))
    standing, why = _standing(data, found, candidate_id, rows)
    return CandidateView(candidate_id, data.settings_of(candidate_id), standing, wins_at, rows, overall, why)


def _standing(
    data: StudyData, found: Recommendation, candidate_id: str, rows: Sequence[LevelRow]
) -> tuple[Standing, str]:
    failed = [launch.failure for launch in data.launches if launch.slot.candidate_id == candidate_id and launch.failure]
    why = f"{failed[-1].kind}: {failed[-1].message}" if failed else ""
    complete = all(row.tokens_per_s is not None for row in rows)
    if candidate_id == data.baseline.id:
        return "baseline", "" if complete else why
    if found.overall.winner is not None and found.overall.winner.id == candidate_id:
        return "winner", ""
    if any(candidate_id in confirmation.finalists for confirmation in data.confirmations):
        return ("finalist", "") if complete else ("failed", why)
    if complete and candidate_id not in data.failed:
        left = next((trial.why for trial in data.measured if trial.candidate_id == candidate_id), "")
        return ("out of the race", left) if left.startswith(OUT) else ("screened", "")
    if failed:
        return "failed", why
    trials = [trial for trial in data.trials if trial.candidate_id == candidate_id]
    illegal = next((trial.why for trial in trials if trial.kind in ("illegal", "known_crash")), None)
    if illegal is not None:
        return "ruled out", illegal
    gates = [row for row in rows if row.attempts and row.tokens_per_s is None]
    if gates:
        return "failed", f"no valid block at concurrency {', '.join(str(row.concurrency) for row in gates)}"
    told = next((trial.why for trial in data.measured if trial.candidate_id == candidate_id), "")
    return ("failed", told) if candidate_id in data.failed else ("not measured", "")


def _row(
    data: StudyData, verdicts: Mapping[tuple[str, int | None], Verdict], candidate_id: str, level: int
) -> LevelRow:
    mine = [s for s in data.blocks.values() if s.candidate_id == candidate_id and s.concurrency == level]
    role, blocks = _best_role([(s.role, s.block) for s in mine if s.block.valid])
    pairs = [
        pair
        for pair in data.pairs
        if pair.candidate_id == candidate_id
        and pair.concurrency == level
        and (pair.role == "confirm") == (role == "confirm")
    ]
    change = math.exp(fmean(pair.log_ratio for pair in pairs)) if pairs else None
    if role in SEARCH and pairs:
        change = math.exp(level_ratios(data, candidate_id)[level])
    if candidate_id == data.baseline.id and blocks:
        change = 1.0
    ttft = [block.ttft_ms.p50 for block in blocks if block.ttft_ms.p50 is not None]
    accept = [block.accept_length for block in blocks if block.accept_length is not None]
    return LevelRow(
        concurrency=level,
        role=role,
        blocks=len(blocks),
        attempts=len(mine),
        tokens_per_s=fmean(block.tokens_per_s for block in blocks) if blocks else None,
        per_request_tokens_per_s=fmean(block.per_stream_tokens_per_s for block in blocks) if blocks else None,
        latency=_latency(blocks),
        ttft_p50_ms=median(ttft) if ttft else None,
        accept_length=fmean(accept) if accept else None,
        requests=sum(block.requests for block in blocks),
        failed_requests=sum(block.failed_requests for block in blocks),
        change=change,
        pairs=len(pairs),
        verdict=verdicts.get((candidate_id, level)) if role == "confirm" else None,
    )


def _best_role(blocks: Sequence[tuple[Role, Block]]) -> tuple[Role | None, list[Block]]:
    confirmed = [block for role, block in blocks if role == "confirm"]
    if confirmed:
        return "confirm", confirmed
    searched = [block for role, block in blocks if role in SEARCH]
    if not searched:
        return None, []
    return "screen" if any(role == "screen" for role, _ in blocks) else "look", searched


def _latency(blocks: Sequence[Block]) -> Latency:
    told = [block.e2e_ms for block in blocks if block.e2e_ms.n and block.e2e_ms.mean is not None]
    total = sum(latency.n for latency in told)
    p50 = [latency.p50 for latency in told if latency.p50 is not None]
    p99 = [latency.p99 for latency in told if latency.p99 is not None]
    return Latency(
        mean=math.fsum((latency.mean or 0.0) * latency.n for latency in told) / total if total else None,
        p50=median(p50) if p50 else None,
        p99=median(p99) if p99 else None,
    )


def _failures(data: StudyData) -> tuple[FailureView, ...]:
    groups: dict[tuple[str, str, str, str], list[Any]] = {}
    for launch in data.launches:
        if launch.failure is not None:
            failure = launch.failure
            key = (launch.slot.candidate_id, failure.kind, failure.phase, failure.message)
            groups.setdefault(key, []).append(launch)
    return tuple(
        FailureView(key[0], launches[0].failure, tuple(each.id for each in launches), launches[0].log_path)
        for key, launches in groups.items()
    )


def _invalid(data: StudyData) -> tuple[InvalidBlock, ...]:
    found = []
    for slot, stored_blocks in data.by_slot.items():
        for stored in stored_blocks:
            repeated = data.block(slot, stored.concurrency) is not None
            found += [
                InvalidBlock(
                    stored.candidate_id,
                    stored.concurrency,
                    stored.role,
                    gate.name,
                    gate.value,
                    gate.limit,
                    gate.detail,
                    repeated,
                )
                for gate in stored.block.gates
                if not gate.ok
            ]
    return tuple(found)
