"""The constants by which a study is run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_low
from typing import Any

from tuner.judge.intervals import MIN_PAIRS
from tuner.study.data import StudyData


@dataclass(frozen=True)
class Policy:
    """The constants of a profile.

    Args:
        pairs: pairs of blocks per finalist and level in the confirmation.
        environment_retries: launches repeated when the machine was at fault, before the study stops.
        candidate_retries: launches repeated after a failure of the candidate's that may be chance.
        spare_pairs: pairs measured beyond `pairs`, and beyond the budget, in place of those whose gates failed.
        block_attempts: measurements of one block, within a launch, until it passes its gates. Where the machine is
            to blame, `environment_retries` launches more try once each.
        max_finalists: candidates confirmed in one round.
        max_idle_trials: proposals in a row that need no launch before the search ends.
        same_failures: candidates in a row that fail alike before the study stops, while none has ever been measured.
        same_failures_later: the same once one has: a setting that never works, and is tried again and again, is then
            the likelier reason, and the search learns to leave it.
        interruptions: launches of one candidate in a row that ended because the tuner did, without a new block.
        no_gain: candidates in a row that bring no gain worth having, after which more search is not expected to pay.
        fewest: candidates that work, before the model of the search is believed that more cannot pay.
        look: share of a block's window that the first look at a candidate takes; the rest is measured of those alone
            that can still win. 0: every block is whole.
    """

    pairs: int = 4
    environment_retries: int = 2
    candidate_retries: int = 1
    spare_pairs: int = 2
    block_attempts: int = 3
    max_finalists: int = 3
    max_idle_trials: int = 50
    same_failures: int = 3
    same_failures_later: int = 8
    interruptions: int = 3
    no_gain: int = 20
    fewest: int = 8
    look: float = 0.0


POLICIES = {"short": Policy(pairs=4), "full": Policy(pairs=8, look=1 / 3)}
"""The windows of `short` are as short as gates allow; half of them would be warmed up for as long as it lasts."""

BASELINE_EVERY = {"short": 0, "full": 6}
"""In the search the baseline is measured again after so many candidates, so that slow drift cancels; 0: once."""

HOT_BASELINE_EVERY = {"short": 4, "full": 3}
"""The same on one running server."""

LEAST_ROW, MOST_ROW = 4, 16
"""Candidates in a row that are sought among those a running server can serve, at least and at most."""

CLAIM_PAIRS = MIN_PAIRS
"""Pairs of a confirmation without which nothing is claimed."""

CONFIRM_SHARE = 3
"""Pairs that a calibration asks for beyond the profile's take at most 2 of so many launches of the budget."""


def policy_of(data: StudyData) -> Policy:
    """The constants of a study: its profile's, with the pairs that a calibration found when the study began."""
    return policy_for(data.space.profile, data.fingerprint, data.budget.launches)


def policy_for(profile: str, fingerprint: Mapping[str, Any], launches: int) -> Policy:
    """As `policy_of`, from what a study keeps of itself; `launches` is its budget."""
    policy = POLICIES[profile]
    pairs = fingerprint.get("pairs")
    if not isinstance(pairs, int):
        return policy
    return replace(policy, pairs=min(pairs, max(policy.pairs, launches // CONFIRM_SHARE)))


def planned_pairs(launches: int, policy: Policy) -> int:
    """Pairs that a budget leaves room for beside the baseline and one candidate."""
    return max(0, min(policy.pairs, (launches - 2) // 2))


def usual(seconds: Sequence[float]) -> float:
    """The median of durations, of two in the middle the shorter: a first start into a cold cache soon counts no more.

    Raises:
        StatisticsError: there are none.
    """
    return median_low(seconds)


def pairs_within(pairs: int, launches: int) -> int:
    """How many of `pairs` the time of so many launches holds, two each; 0 where that is too few for a claim."""
    held = min(pairs, launches // 2)
    return held if held >= min(pairs, CLAIM_PAIRS) else 0
