"""Whether a candidate gains as much at one place (a host, or devices of it) as at another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, sqrt
from statistics import fmean

from tuner.judge.recommend import percent

ALPHA = 0.05
"""Of all comparisons of a study together: so often places that are alike would be said to differ."""


@dataclass(frozen=True)
class Difference:
    """One candidate's speed-ups differ between places by more than chance explains.

    `speedups` are the mean ratios by place, `p` is of the F test that they are one (corrected for the number of tests).
    `low` and `high` are the ends of a 95 % interval of how much more is gained where most is than where least is, as a
    ratio; it is corrected for the number of tests and of places that could have been compared.
    """

    candidate_id: str
    concurrency: int
    speedups: Mapping[str, float]
    p: float
    low: float
    high: float

    @property
    def sentence(self) -> str:
        """For a person."""
        each = ", ".join(f"{percent(ratio)} at {place or 'an unnamed place'}" for place, ratio in self.speedups.items())
        ordered = sorted(self.speedups, key=lambda place: self.speedups[place])
        least, most = (place or "the unnamed place" for place in (ordered[0], ordered[-1]))
        ratio = self.speedups[ordered[-1]] / self.speedups[ordered[0]]
        return (
            f"Places differ: candidate {self.candidate_id} gains {each} (concurrency {self.concurrency}, p = "
            f"{self.p:.2g}); {most} beside {least}: {percent(ratio)} (95 % interval {percent(self.low)} to "
            f"{percent(self.high)}). What is said of it over all is a mean of these: look for what differs between the "
            "places, or run a study at each."
        )


def differences(ratios: Mapping[tuple[str, int], Mapping[str, Sequence[float]]]) -> list[Difference]:
    """Candidates and levels at which places differ, the surest first.

    A one-way analysis of variance for each. The spread of pairs within a place is taken of all candidates together, by
    level: a few pairs of one candidate would hardly tell.

    Args:
        ratios: (candidate, concurrency) → place → log ratios of its pairs there.
    """
    from scipy.stats import f, t

    several = {key: places for key, places in ratios.items() if sum(len(each) > 0 for each in places.values()) > 1}
    found = []
    for (candidate, level), places in several.items():
        groups = {place: list(each) for place, each in sorted(places.items()) if each}
        within = [each for (_, at), others in ratios.items() if at == level for each in others.values() if each]
        freedom = sum(len(each) - 1 for each in within)
        noise = sum((x - fmean(each)) ** 2 for each in within for x in each)
        if freedom < 2 or noise <= 0:
            continue
        everything = [x for each in groups.values() for x in each]
        between = sum(len(each) * (fmean(each) - fmean(everything)) ** 2 for each in groups.values())
        statistic = (between / (len(groups) - 1)) / (noise / freedom)
        p = min(1.0, float(f.sf(statistic, len(groups) - 1, freedom)) * len(several))
        if p < ALPHA:
            means = {place: fmean(x) for place, x in groups.items()}
            least, most = min(means, key=lambda x: means[x]), max(means, key=lambda x: means[x])
            comparisons = len(several) * len(groups) * (len(groups) - 1) / 2
            half = float(t.isf(ALPHA / comparisons / 2, freedom))
            half *= sqrt(noise / freedom * (1 / len(groups[least]) + 1 / len(groups[most])))
            gap = means[most] - means[least]
            speedups = {place: exp(mean) for place, mean in means.items()}
            found.append(Difference(candidate, level, speedups, p, exp(gap - half), exp(gap + half)))
    return sorted(found, key=lambda each: (each.p, each.candidate_id, each.concurrency))
