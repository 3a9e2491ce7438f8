"""The answer of a study, from its records; any time, also while it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

from tuner.judge.pareto import front
from tuner.judge.recommend import confirmed_verdicts as judged
from tuner.judge.recommend import recommend
from tuner.judge.verdict import overall_log_ratios, verdict
from tuner.records import Choice, Pair, Recommendation, Verdict
from tuner.study.data import StudyData
from tuner.study.goodput import composites
from tuner.study.places import place_differences
from tuner.study.planner import disqualified
from tuner.study.policy import policy_of
from tuner.study.quality import notes as quality_notes
from tuner.study.quality import refused
from tuner.study.score import weights


def recommendation(data: StudyData) -> Recommendation:
    """The winner per concurrency and overall, or to keep the baseline.

    A finalist that failed in confirmation cannot win, however fast it was before; nor can one at a level where it
    breaks the guard on the time to the first token.
    """
    dropped = disqualified(data, policy_of(data))
    slow = _too_slow_to_answer(data)
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
    notes = [f"Candidate {candidate} failed in confirmation and was left out." for candidate in sorted(dropped)]
    notes += [
        f"Candidate {candidate} was left out at concurrency {level}: p90 of the time to the first token {ms:.0f} ms, "
        f"limit {guard.ttft_p90_ms:g} ms."
        for (candidate, level), ms in sorted(slow.items())
    ]
    notes += _baseline_too_slow(data)
    notes += quality_notes(data)
    notes += [each.sentence for each in place_differences(data)]
    notes += _objective_notes(data)
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
        return [f"Overall means goodput: tokens per second at the best load where nine in ten requests keep {limits}."]
    return [_pareto_note(data)] if objective.maximize == "pareto" else []


def _pareto_note(data: StudyData) -> str:
    named = ["the baseline" if one == data.baseline.id else one for one in pareto_set(data)]
    return f"Pareto set over the levels, as far as pairs tell: {', '.join(named)}."


def pareto_set(data: StudyData) -> tuple[str, ...]:
    """The ids of the confirmed candidates, the baseline among them, that no other is better than at every level."""
    return tuple(one or data.baseline.id for one in front(level_verdicts(data)))


def level_verdicts(data: StudyData) -> dict[str, dict[int, Verdict]]:
    """Candidate → level → what its confirmation pairs say there; of those that could be deployed."""
    ratios: dict[str, dict[int, list[float]]] = {}
    dropped = disqualified(data, policy_of(data)) | refused(data).keys()
    for pair in data.pairs:
        if pair.role == "confirm" and pair.candidate_id not in dropped:
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
    slow = _too_slow_to_answer(data)
    return [
        pair
        for pair in data.pairs
        if pair.role != "confirm" or not (pair.candidate_id in out or (pair.candidate_id, pair.concurrency) in slow)
    ]


def _too_slow_to_answer(data: StudyData) -> dict[tuple[str, int], float]:
    limit = data.space.objective.guard.ttft_p90_ms
    if limit is None:
        return {}
    seen: dict[tuple[str, int], list[float]] = {}
    for pair in data.pairs:
        p90 = data.blocks[pair.candidate_block].block.ttft_ms.p90
        if pair.role == "confirm" and p90 is not None:
            seen.setdefault((pair.candidate_id, pair.concurrency), []).append(p90)
    return {key: median(values) for key, values in seen.items() if median(values) > limit}


def _baseline_too_slow(data: StudyData) -> list[str]:
    """What the user should know where plain decoding breaks the guard too: no candidate has to."""
    limit = data.space.objective.guard.ttft_p90_ms
    if limit is None:
        return []
    seen: dict[int, list[float]] = {}
    for stored in data.blocks.values():
        p90 = stored.block.ttft_ms.p90
        if stored.candidate_id == data.baseline.id and stored.block.valid and p90 is not None:
            seen.setdefault(stored.block.concurrency, []).append(p90)
    return [
        f"The baseline itself breaks the guard at concurrency {level}: p90 of the time to the first token "
        f"{median(values):.0f} ms, limit {limit:g} ms. If no candidate keeps it either, raise ttft_p90_ms or leave "
        f"that load out."
        for level, values in sorted(seen.items())
        if median(values) > limit
    ]


def verdicts_of(found: Recommendation) -> list[Verdict]:
    """The verdicts that a recommendation rests on."""
    choices: list[Choice] = [found.overall, *found.per_concurrency]
    return [choice.verdict for choice in choices if choice.verdict is not None]
