"""The decision at a study's end, from its stored pairs: a winner per concurrency and overall, or the baseline."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tuner.judge.intervals import MIN_PAIRS, pair_sd
from tuner.judge.verdict import detectable_gain, holm_confidences, overall_log_ratios, verdict
from tuner.records import Candidate, Choice, Pair, Recommendation, StoredBlock, Verdict

_UNQUIET = 0.3
"""Between the slowest and the fastest launch of one configuration; a quiet machine stays within a few per cent."""

NEAR = math.log(0.95)
"""Below this in the search a candidate is not worth a confirmation: one block is seldom off by more."""

WORST_LEVEL = 0.97
FULL_PAIRS = 8
LENGTH_SHIFT = 0.1
LENGTH_NEEDS_REQUESTS = 30

__all__ = ["StoredBlock", "recommend"]


@dataclass(frozen=True)
class _Evidence:
    """The valid pairs of one finalist and what they say."""

    candidate: Candidate
    pairs: tuple[Pair, ...]
    composites: tuple[float, ...]
    verdicts: Mapping[int | None, Verdict]


def recommend(
    *,
    study: str,
    baseline: Candidate,
    candidates: Mapping[str, Candidate],
    blocks: Mapping[int, StoredBlock],
    pairs: Sequence[Pair],
    weights: Mapping[int, float],
    profile: str,
    simulated: bool = False,
    worst_level: float = WORST_LEVEL,
    composites: Callable[[Sequence[Pair]], list[float]] | None = None,
    places: Mapping[int, str] | None = None,
) -> Recommendation:
    """The recommendation of a study.

    Only pairs of role "confirm" whose two blocks passed every gate can make a winner; what the search saw is chosen
    for its luck. The winner overall also needs a speed-up of at least `worst_level` at every level. `weights` names
    the levels, and with them the family of claims (finalists × levels, and overall) over which multiplicity is
    handled. `composites` makes of one candidate's pairs a log ratio for each index, where "overall" is something else
    than the weighted mean over the levels. `places` says of launches where they ran: absolute figures of different
    places are never held against one another.
    """
    pairs = sorted(pairs, key=lambda p: (p.candidate_id, p.concurrency, p.role, p.index))
    usable = _usable(pairs, blocks)
    evidence = _weigh(_confirmed(usable, baseline), candidates, blocks, weights, composites)
    levels = sorted(weights)
    per_level = tuple(_choose_at(level, evidence, blocks) for level in levels)
    if evidence:
        overall = _choose_overall(evidence, levels, per_level, worst_level)
    else:
        why = _why_nothing_confirmed(baseline, candidates, pairs, usable, blocks)
        overall = Choice(None, None, None, None, None, why)
        per_level = tuple(
            Choice(level, None, None, _mean_rate(_baseline_blocks(usable, blocks, level)), None, why)
            for level in levels
        )
    return Recommendation(
        study=study,
        overall=overall,
        per_concurrency=per_level,
        profile=profile,
        simulated=simulated,
        advice=tuple(_advice(profile, simulated, evidence, blocks, overall, per_level, places or {})),
    )


def confirmed_verdicts(
    *,
    baseline: Candidate,
    candidates: Mapping[str, Candidate],
    blocks: Mapping[int, StoredBlock],
    pairs: Sequence[Pair],
    weights: Mapping[int, float],
    composites: Callable[[Sequence[Pair]], list[float]] | None = None,
) -> tuple[Verdict, ...]:
    """What `recommend` weighs, all of it: every finalist at every level and overall, at the confidences used there."""
    pairs = sorted(pairs, key=lambda p: (p.candidate_id, p.concurrency, p.role, p.index))
    evidence = _weigh(_confirmed(_usable(pairs, blocks), baseline), candidates, blocks, weights, composites)
    return tuple(found for one in evidence for found in one.verdicts.values())


def _usable(pairs: Sequence[Pair], blocks: Mapping[int, StoredBlock]) -> list[Pair]:
    return [p for p in pairs if blocks[p.baseline_block].block.valid and blocks[p.candidate_block].block.valid]


def _confirmed(pairs: Sequence[Pair], baseline: Candidate) -> list[Pair]:
    return [p for p in pairs if p.role == "confirm" and p.candidate_id != baseline.id]


def _weigh(
    pairs: Sequence[Pair],
    candidates: Mapping[str, Candidate],
    blocks: Mapping[int, StoredBlock],
    weights: Mapping[int, float],
    composites: Callable[[Sequence[Pair]], list[float]] | None = None,
) -> list[_Evidence]:
    claims: dict[tuple[str, int | None], list[float]] = {}
    of: dict[str, tuple[Pair, ...]] = {}
    for candidate_id in sorted({p.candidate_id for p in pairs}):
        mine = tuple(p for p in pairs if p.candidate_id == candidate_id and p.concurrency in weights)
        of[candidate_id] = mine
        for level in weights:
            claims[candidate_id, level] = [p.log_ratio for p in mine if p.concurrency == level]
        claims[candidate_id, None] = composites(mine) if composites else overall_log_ratios(mine, weights)
    # With one level, "overall" is the same claim as the level's and must not be counted twice.
    family = {key: values for key, values in claims.items() if len(weights) > 1 or key[1] is not None}
    confidences = holm_confidences(family)
    if len(weights) == 1:
        (only,) = weights
        confidences |= {(c, None): confidences[c, only] for c in of}

    def judged(candidate_id: str, level: int | None) -> Verdict:
        return verdict(
            candidate_id,
            level,
            claims[candidate_id, level],
            confidence=confidences[candidate_id, level],
            series=[_series(p, blocks) for p in of[candidate_id] if level in (None, p.concurrency)],
        )

    return [
        _Evidence(
            candidates[c],
            of[c],
            tuple(claims[c, None]),
            {level: judged(c, level) for level in [*sorted(weights), None]},
        )
        for c in sorted(of)
    ]


def _choose_at(level: int, evidence: Sequence[_Evidence], blocks: Mapping[int, StoredBlock]) -> Choice:
    best = _best(evidence, level)
    if best is None:
        return Choice(level, None, None, None, None, f"no valid confirmation pair at concurrency {level}")
    found = best.verdicts[level]
    mine = [p for p in best.pairs if p.concurrency == level]
    base_rate = _mean_rate([blocks[p.baseline_block] for p in mine])
    if found.outcome == "better":
        rate = _mean_rate([blocks[p.candidate_block] for p in mine])
        return Choice(level, best.candidate, found, base_rate, rate, "its whole interval lies above the baseline + 1 %")
    return Choice(level, None, found, base_rate, None, _why_not(found), best.candidate)


def _choose_overall(
    evidence: Sequence[_Evidence], levels: Sequence[int], per_level: Sequence[Choice], worst_level: float
) -> Choice:
    better = [e for e in evidence if e.verdicts[None].outcome == "better"]
    passing = [e for e in better if all((e.verdicts[level].speedup or 0.0) >= worst_level for level in levels)]
    best = _best(passing, None)
    if best is not None:
        # Tokens per second of several levels have no common meaning; ratios do.
        only = per_level[0] if len(levels) == 1 else None
        return Choice(
            None,
            best.candidate,
            best.verdicts[None],
            only.baseline_tokens_per_s if only else None,
            only.winner_tokens_per_s if only else None,
            _why_overall(best, levels, worst_level) + _without_guard(best, _best(better, None), levels),
        )
    blocked = _best(better, None)
    if blocked is not None:
        level = min(levels, key=lambda at: blocked.verdicts[at].speedup or 0.0)
        speed = blocked.verdicts[level].speedup or 0.0
        why = (
            f"the fastest overall ({percent(blocked.verdicts[None].speedup)}) is at {percent(speed)} at concurrency "
            f"{level}, below the limit of {percent(worst_level)} for any level"
        )
        return Choice(None, None, blocked.verdicts[None], None, None, why, blocked.candidate)
    best = _best(evidence, None)
    if best is None:
        return Choice(None, None, None, None, None, "no finalist was confirmed at every concurrency")
    return Choice(None, None, best.verdicts[None], None, None, _why_not(best.verdicts[None]), best.candidate)


def _best(evidence: Sequence[_Evidence], level: int | None) -> _Evidence | None:
    """The fastest of those called better, else the fastest of all that were measured there."""
    measured = [e for e in evidence if e.verdicts[level].speedup is not None]
    return max(
        measured,
        key=lambda e: (e.verdicts[level].outcome == "better", e.verdicts[level].speedup or 0.0, e.candidate.id),
        default=None,
    )


def _why_overall(best: _Evidence, levels: Sequence[int], worst_level: float) -> str:
    if len(levels) == 1:
        return "its whole interval lies above the baseline + 1 %"
    worst = min(levels, key=lambda at: best.verdicts[at].speedup or 0.0)
    return (
        f"its whole interval lies above the baseline + 1 %, and at its worst level (concurrency {worst}) it is at "
        f"{percent(best.verdicts[worst].speedup)} (limit {percent(worst_level)})"
    )


def _without_guard(best: _Evidence, fastest: _Evidence | None, levels: Sequence[int]) -> str:
    """What the decision would be if no level had a limit, where that is another one."""
    if fastest is None or fastest is best:
        return ""
    level = min(levels, key=lambda at: fastest.verdicts[at].speedup or 0.0)
    return (
        f"; without that limit it would be {fastest.candidate.id} ({percent(fastest.verdicts[None].speedup)} overall, "
        f"{percent(fastest.verdicts[level].speedup)} at concurrency {level})"
    )


def _why_not(found: Verdict) -> str:
    if found.n < MIN_PAIRS:
        return (
            f"not separated: {found.n} confirmation pair{'s' * (found.n != 1)} of the {MIN_PAIRS} that an interval "
            f"needs; {_could_see(found)}"
        )
    if found.outcome == "worse":
        return "even the best finalist is slower than the baseline"
    if found.outcome == "equivalent":
        return "the best finalist is equivalent to the baseline (within 2 %)"
    return (
        f"not separated: the interval of the best finalist over {found.n} pairs reaches below +1 %; {_could_see(found)}"
    )


def _could_see(found: Verdict) -> str:
    if found.detectable is None:
        return "the noise is not known"
    who = f"{MIN_PAIRS} pairs" if found.n < MIN_PAIRS else "they"
    return f"at the noise seen, {who} would show a gain of {percent(1 + found.detectable)} four times in five"


def _why_nothing_confirmed(
    baseline: Candidate,
    candidates: Mapping[str, Candidate],
    pairs: Sequence[Pair],
    usable: Sequence[Pair],
    blocks: Mapping[int, StoredBlock],
) -> str:
    others = len(candidates.keys() - {baseline.id})
    if not others:
        return "no candidate has been measured yet"
    if any(p.role == "confirm" for p in pairs):
        return "no confirmation pair is valid: each has a block that failed a gate"
    if usable:
        best = max(_in_the_search(usable).values())
        if best < NEAR:
            return (
                "no candidate was confirmed, for none came near the baseline in the search: at the load where one came "
                f"nearest it had {percent(math.exp(best))}"
            )
        seen = detectable_gain(pair_sd((), [_series(p, blocks) for p in usable]), MIN_PAIRS)
        return (
            "not separated: no candidate was confirmed, and the search's own figures favour the lucky; at the noise "
            f"seen, {MIN_PAIRS} confirmation pairs would show a gain of {percent(1 + seen)} four times in five"
        )
    noun = "the only candidate" if others == 1 else f"none of {others} candidates"
    verb = "has no valid pair" if others == 1 else "has a valid pair"
    return f"no comparison possible: {noun} {verb} of blocks so far"


def _in_the_search(pairs: Sequence[Pair]) -> dict[tuple[str, int], float]:
    """(candidate, level) → the mean log ratio of its pairs."""
    found: dict[tuple[str, int], list[float]] = {}
    for pair in pairs:
        found.setdefault((pair.candidate_id, pair.concurrency), []).append(pair.log_ratio)
    return {key: math.fsum(logs) / len(logs) for key, logs in found.items()}


def _advice(
    profile: str,
    simulated: bool,
    evidence: Sequence[_Evidence],
    blocks: Mapping[int, StoredBlock],
    overall: Choice,
    per_level: Sequence[Choice],
    places: Mapping[int, str],
) -> list[str]:
    lines = _noise(blocks, places)
    if simulated:
        lines.append("Simulated: these figures come from a model of a machine, not from a measurement.")
    if profile != "full":
        lines.append(
            f"A full profile (--profile full) measures longer windows and confirms with {FULL_PAIRS} pairs over fresh "
            f"launches.{_full_would_show(overall.verdict, evidence, blocks)}"
        )
    elif overall.winner is None and overall.verdict is not None and overall.verdict.n < FULL_PAIRS:
        lines.append("More pairs narrow the interval: continue with `tuner resume`.")
    winners = {c.winner.id for c in per_level if c.winner is not None}
    if len(winners) > 1 or (winners and any(c.winner is None for c in per_level)):
        lines.append(
            "Levels differ: if your traffic stays near one of them, take its setting; a batch threshold "
            "(disable_batch_threshold, steps_by_batch) can join them in one server."
        )
    lines += _length_alarms(evidence, blocks)
    return lines


def _length_alarms(evidence: Sequence[_Evidence], blocks: Mapping[int, StoredBlock]) -> list[str]:
    """Answers that became longer or shorter are no speed-up but a question about their quality."""
    found = []
    for one in evidence:
        base = _mean_length([blocks[p.baseline_block] for p in one.pairs])
        mine = _mean_length([blocks[p.candidate_block] for p in one.pairs])
        if base and mine and abs(mine / base - 1) > LENGTH_SHIFT:
            found.append(
                f"Candidate {one.candidate.id} gives answers of {mine:.0f} tokens where the baseline gives {base:.0f}: "
                "compare the texts before deploying it."
            )
    return found


def _mean_length(blocks: Sequence[StoredBlock]) -> float | None:
    requests = sum(b.block.requests for b in blocks)
    if requests < LENGTH_NEEDS_REQUESTS:
        return None
    return sum(b.block.mean_output_tokens * b.block.requests for b in blocks) / requests


def _noise(blocks: Mapping[int, StoredBlock], places: Mapping[int, str]) -> list[str]:
    """Said where one candidate's confirmation blocks at one level lie too far apart to be the candidate's doing."""
    rates: dict[tuple[str, int, str], list[float]] = defaultdict(list)
    for stored in blocks.values():
        if stored.block.valid and stored.block.role == "confirm":
            place = places.get(stored.launch_id, "")
            rates[stored.candidate_id, stored.block.concurrency, place].append(stored.block.tokens_per_s)
    spread = {key: max(values) / min(values) - 1 for key, values in rates.items() if min(values) > 0}
    if not spread or max(spread.values()) < _UNQUIET:
        return []
    (candidate, level, place), _ = max(spread.items(), key=lambda item: item[1])
    low, high = min(rates[candidate, level, place]), max(rates[candidate, level, place])
    where = place if len({place for *_, place in rates}) > 1 and place else "This machine"
    return [
        f"{where} was not quiet: launches of one and the same configuration ({candidate}) ranged from {low:.1f} "
        f"to {high:.1f} tok/s at concurrency {level}. Stop what else runs on it and measure again under a new name."
    ]


def _full_would_show(found: Verdict | None, evidence: Sequence[_Evidence], blocks: Mapping[int, StoredBlock]) -> str:
    mine = next((e for e in evidence if found and e.candidate.id == found.candidate_id), None)
    if mine is None or found is None or not found.n:
        return ""
    sd = pair_sd(mine.composites, [_series(p, blocks) for p in mine.pairs])
    gain = percent(1 + detectable_gain(sd, FULL_PAIRS, found.confidence))
    return f" At the noise seen here, these would show gains from {gain}."


def _series(pair: Pair, blocks: Mapping[int, StoredBlock]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    return blocks[pair.baseline_block].block.series, blocks[pair.candidate_block].block.series


def _baseline_blocks(pairs: Sequence[Pair], blocks: Mapping[int, StoredBlock], level: int) -> list[StoredBlock]:
    return [blocks[i] for i in sorted({p.baseline_block for p in pairs if p.concurrency == level})]


def _mean_rate(blocks: Sequence[StoredBlock]) -> float | None:
    return sum(b.block.tokens_per_s for b in blocks) / len(blocks) if blocks else None


def percent(ratio: float | None) -> str:
    """A ratio as a signed change: 1.101 is "+10.1 %"."""
    return "unknown" if ratio is None else f"{100 * (ratio - 1):+.1f} %".replace("-", "−")
