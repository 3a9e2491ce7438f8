"""Plain decoding is always in the race: where the baseline speculates, it is a candidate of its own. Pure functions."""

from __future__ import annotations

from collections.abc import Callable

from tuner.engines.base import UNSET
from tuner.records import Candidate, Setting
from tuner.search.evidence import complete
from tuner.space import Space
from tuner.space.space import COMMAND, SPECULATIVE
from tuner.study.data import StudyData
from tuner.study.engine import StudyEngine, illegal
from tuner.study.planner import budget_since

NO_PLAIN = "plain"
"""The event that says why plain decoding is not in the race."""


def baseline_speculates(space: Space) -> bool:
    """Whether the baseline speculates, by its own settings or by the fixed ones."""
    return complete(space.baseline.settings, space.args).get("speculation", "none") not in ("none", False)


def plain_candidate(space: Space) -> Candidate | None:
    """The baseline without speculation and without what only matters with it, whether the space lists it or not.

    None where the baseline does not speculate, or where nobody knows how its server is started without.
    """
    if not baseline_speculates(space):
        return None
    made = Candidate(dict(sorted(_without(space).items())))
    listed = space.near_baseline({"speculation": "none"})
    if listed is not None and _spoken_of(listed.candidate) == _spoken_of(made):
        return listed.candidate
    offered = any(one.name == "speculation" and one.offered("none") == "none" for one in space.parameters)
    return made if offered or space.kind != COMMAND else None


def _without(space: Space) -> dict[str, Setting]:
    """The baseline's settings but for speculation, and for parameters whose condition holds only with that."""
    baseline = space.baseline.settings
    plain = {name: value for name, value in baseline.items() if name not in SPECULATIVE} | {"speculation": "none"}
    for parameter in space.parameters:  # each behind those that its condition mentions
        if parameter.name in plain and space.active(parameter, baseline) and not space.active(parameter, plain):
            del plain[parameter.name]
    return plain


def _spoken_of(candidate: Candidate) -> dict[str, Setting]:
    """Its settings; a variable that is unset is one that is not spoken of."""
    return {name: value for name, value in candidate.settings.items() if value != UNSET}


def out_of_race(space: Space, engine: StudyEngine) -> str:
    """Why plain decoding cannot be tried beside a baseline that speculates, in a sentence; "" where it can."""
    if not baseline_speculates(space):
        return ""
    found = plain_candidate(space)
    why = "the baseline speculates, and 'none' is no choice of speculation"
    if found is not None:
        why = illegal(space, engine, found) or ""
    return f"plain decoding is not in the race: {why}" if why else ""


def plain_due(data: StudyData, effect: Callable[[Candidate], str]) -> Candidate | None:
    """Plain decoding, where a first candidate has been begun and nothing that starts the same server was measured.

    `effect` is equal for candidates that start the same server. What was ruled out was not tried, and what had no
    launch left is due again with a larger budget.
    """
    found = plain_candidate(data.space)
    if found is None or len(data.trials) < 2:
        return None
    mine, first = effect(found), budget_since(data)
    for trial in data.trials:
        if trial.launched and effect(data.candidates[trial.candidate_id]) == mine:
            return None
        if trial.kind == "out_of_launches" and trial.candidate_id == found.id and trial.number >= first:
            return None
    return found
