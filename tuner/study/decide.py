"""The answer of a study, from its records; any time, also while it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from tuner.bench.gates import pair_gates
from tuner.judge.pareto import front
from tuner.judge.recommend import confirmed_verdicts as judged
from tuner.judge.recommend import recommend
from tuner.judge.verdict import overall_log_ratios, verdict
from tuner.records import Block, Choice, Gate, Pair, Recommendation, Verdict
from tuner.study.data import StudyData
from tuner.study.edges import crossing_note
from tuner.study.goodput import composites, nobody_keeps, tpot_p90, unknown_limits
from tuner.study.places import place_differences
from tuner.study.planner import disqualified
from tuner.study.policy import policy_of
from tuner.study.quality import notes as quality_notes
from tuner.study.quality import refused
from tuner.study.score import weights


def recommendation(data: StudyData) -> Recommendation:
    """The winner per concurrency and overall, or to keep the baseline.

    A finalist that failed in confirmation cannot win, however fast it was before; nor can one at a level where it
    breaks a guard on latencies, or was not measured as the baseline was.
    """
    dropped = disqualified(data, policy_of(data))
    guard = data.space.objective.guard
    found = recommend(
        study=data.name,
        baseline=data.baseline,
        candidates=data.candidates,
        blocks=data.blocks,
        pairs=_eligible(data),
        weights=weights(data),
        profile=data.space.profile,
        simulated=data.simulated,
        worst_level=guard.min_speedup or 0.0,
        composites=_composites(data),
        places={launch.id: launch.place for launch in data.launches},
    )
    if found.overall.finalist is not None and _nobody_keeps(data):
        why = "nobody has goodput: no block keeps the limits of objective.slo"
        found = replace(found, overall=Choice(None, None, None, None, None, why))
    notes = [f"Candidate {candidate} failed in confirmation and was left out." for candidate in sorted(dropped)]
    notes += [
        f"Candidate {candidate} was left out at concurrency {level}: {why}."
        for (candidate, level), why in _spoiled(data).items()
    ]
    notes += _baseline_too_slow(data)
    notes += _not_held(data)
    notes += quality_notes(data)
    notes += [each.sentence for each in place_differences(data)]
    notes += _objective_notes(data)
    best = found.overall.winner or found.overall.finalist
    notes += [note] if best is not None and (note := crossing_note(data, best)) else []
    if found.overall.winner is not None and not any(choice.winner for choice in found.per_concurrency):
        notes.append(
            "Overall there is a winner, and at no single level: a launch's mean over the levels is steadier than its "
            "figure at one of them. Deploy the winner overall."
        )
    return replace(found, advice=(*notes, *found.advice)) if notes else found


def _composites(data: StudyData) -> Callable[[Sequence[Pair]], list[float]] | None:
    slo = data.space.objective.slo
    if slo is None:
        return None
    return lambda pairs: composites(pairs, data.levels, data.blocks, slo)


def _objective_notes(data: StudyData) -> list[str]:
    """What "overall" means where it is no mean over the levels, and the Pareto set where one was asked for."""
    objective = data.space.objective
    if (level := data.space.objective_level) is not None:
        return [f"Overall means {objective.maximize} at concurrency {level}."]
    if objective.slo is not None:
        limits = ", ".join(f"{name} {value:g}" for name, value in objective.slo if value is not None)
        said = f"Overall means goodput: tokens per second at the best load where nine in ten requests keep {limits}."
        return [said, none] if (none := _nobody_keeps(data)) else [said]
    return [_pareto_note(data)] if objective.maximize == "pareto" else []


def _nobody_keeps(data: StudyData) -> str:
    """That no valid block keeps the limits of `goodput`, in a sentence; "" where one does, or nothing is limited so."""
    slo = data.space.objective.slo
    blocks = [b.block for b in data.blocks.values() if b.block.valid and b.concurrency in data.levels]
    return nobody_keeps(blocks, slo) if slo is not None else ""


def _pareto_note(data: StudyData) -> str:
    named = ["the baseline" if one == data.baseline.id else one for one in pareto_set(data)]
    return f"Pareto set over the levels, as far as pairs tell: {', '.join(named)}."


def pareto_set(data: StudyData) -> tuple[str, ...]:
    """The ids of the confirmed candidates, the baseline among them, that no other is better than at every level."""
    spoiled = {candidate for candidate, _ in _spoiled(data)}
    found = {one: levels for one, levels in level_verdicts(data).items() if one not in spoiled}
    return tuple(one or data.baseline.id for one in front(found))


def level_verdicts(data: StudyData) -> dict[str, dict[int, Verdict]]:
    """Candidate → level → what its confirmation pairs say there; of those that could be deployed."""
    ratios: dict[str, dict[int, list[float]]] = {}
    for pair in _eligible(data):
        if pair.role == "confirm":
            ratios.setdefault(pair.candidate_id, {}).setdefault(pair.concurrency, []).append(pair.log_ratio)
    return {c: {at: verdict(c, at, some) for at, some in sorted(levels.items())} for c, levels in ratios.items()}


def overall_ratios(data: StudyData, pairs: Sequence[Pair]) -> list[float]:
    """What one candidate's pairs come to over all levels, as the objective has it: a log ratio per launch."""
    together = _composites(data)
    return together(pairs) if together is not None else overall_log_ratios(pairs, weights(data))


def confirmed_verdicts(data: StudyData) -> tuple[Verdict, ...]:
    """Every finalist at every level and overall, as the recommendation weighs them; its choices are among these."""
    return judged(
        baseline=data.baseline,
        candidates=data.candidates,
        blocks=data.blocks,
        pairs=_eligible(data),
        weights=weights(data),
        composites=_composites(data),
    )


def _eligible(data: StudyData) -> list[Pair]:
    """The pairs without those of confirmations that cannot win."""
    out = disqualified(data, policy_of(data)) | refused(data).keys()
    spoiled = _spoiled(data)
    return [
        pair
        for pair in data.pairs
        if pair.role != "confirm" or not (pair.candidate_id in out or (pair.candidate_id, pair.concurrency) in spoiled)
    ]


@dataclass(frozen=True)
class _Guard:
    """A latency that may not exceed a limit at any level: its key in the space file, and what it is called."""

    key: str
    said: str
    limit_ms: float
    of: Callable[[Block], float | None]


def _guards(data: StudyData) -> list[_Guard]:
    guard = data.space.objective.guard
    found = [
        ("ttft_p90_ms", "the time to the first token", guard.ttft_p90_ms, lambda block: block.ttft_ms.p90),
        ("tpot_p90_ms", "the time for each further token", guard.tpot_p90_ms, tpot_p90),
    ]
    return [_Guard(key, said, limit, of) for key, said, limit, of in found if limit is not None]


def compared(data: StudyData) -> dict[str, dict[int, tuple[Gate, ...]]]:
    """Candidate → level → the gates between its blocks of the confirmation and the baseline's, where there are any."""
    found: dict[str, dict[int, tuple[Gate, ...]]] = {}
    for (candidate, level), sides in sorted(_sides(data).items()):
        if gates := pair_gates(*sides):
            found.setdefault(candidate, {})[level] = gates
    return found


def _sides(data: StudyData) -> dict[tuple[str, int], tuple[list[Block], list[Block]]]:
    """(candidate, level) → the baseline's blocks of its pairs in the confirmation, and its own."""
    sides: dict[tuple[str, int], tuple[list[Block], list[Block]]] = {}
    for pair in data.pairs:
        if pair.role == "confirm":
            baseline, mine = sides.setdefault((pair.candidate_id, pair.concurrency), ([], []))
            baseline.append(data.blocks[pair.baseline_block].block)
            mine.append(data.blocks[pair.candidate_block].block)
    return sides


def _spoiled(data: StudyData) -> dict[tuple[str, int], str]:
    """(candidate, level) → why its pairs of the confirmation do not count there: a latency breaks a guard, or the two
    sides were not measured alike."""
    gates = compared(data)
    found = {}
    for (candidate, level), (_, mine) in sorted(_sides(data).items()):
        why = [
            f"p90 of {guard.said} {_p90(guard, mine):.4g} ms, limit {guard.limit_ms:g} ms"
            for guard in _guards(data)
            if _p90(guard, mine) > guard.limit_ms
        ]
        why += [
            f"{gate.name} {gate.value:.3f}, limit {gate.limit:g} ({gate.detail})"
            for gate in gates.get(candidate, {}).get(level, ())
            if not gate.ok
        ]
        if why:
            found[candidate, level] = "; ".join(why)
    return found


def _p90(guard: _Guard, blocks: Sequence[Block]) -> float:
    """The median over blocks; 0 where none tells."""
    told = [p90 for block in blocks if (p90 := guard.of(block)) is not None]
    return median(told) if told else 0.0


def _baseline_too_slow(data: StudyData) -> list[str]:
    """What the user should know where plain decoding breaks a guard too: no candidate has to."""
    mine: dict[int, list[Block]] = {}
    for stored in data.blocks.values():
        asked_for = stored.concurrency in data.levels
        if stored.candidate_id == data.baseline.id and stored.block.valid and asked_for:
            mine.setdefault(stored.block.concurrency, []).append(stored.block)
    return [
        f"The baseline itself breaks the guard at concurrency {level}: p90 of {guard.said} {_p90(guard, blocks):.4g} "
        f"ms, limit {guard.limit_ms:g} ms. If no candidate keeps it either, raise {guard.key} or leave that load out."
        for guard in _guards(data)
        for level, blocks in sorted(mine.items())
        if _p90(guard, blocks) > guard.limit_ms
    ]


def _not_held(data: StudyData) -> list[str]:
    """What the objective limits and no block of the study tells."""
    blocks = [stored.block for stored in data.blocks.values() if stored.block.valid]
    if not blocks:
        return []
    unknown = [f"guard.{guard.key}" for guard in _guards(data) if all(guard.of(block) is None for block in blocks)]
    slo = data.space.objective.slo
    unknown += [f"slo.{name}" for name in (unknown_limits(blocks, slo) if slo is not None else ())]
    why = ": blocks of a virtual clock have no latencies (simulation.clock: real has)" if data.simulated else ""
    return [f"Nothing was held against objective.{name}, for no block tells that latency{why}." for name in unknown]


def verdicts_of(found: Recommendation) -> list[Verdict]:
    """The verdicts that a recommendation rests on."""
    choices: list[Choice] = [found.overall, *found.per_concurrency]
    return [choice.verdict for choice in choices if choice.verdict is not None]
