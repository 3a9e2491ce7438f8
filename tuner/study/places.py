"""Which place has measured what: a pure function of a study's records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from tuner.study.data import StudyData

if TYPE_CHECKING:
    from tuner.judge.places import Difference


@dataclass(frozen=True)
class PlaceWork:
    """How much was done at one place.

    `last_at` is the time (Unix) of the last thing that is known of it; `now` the candidate whose server it is at, None
    where none runs.
    """

    name: str
    launches: int
    blocks: int
    pairs: int
    failures: int
    last_at: float
    now: str | None


@dataclass(frozen=True)
class PlaceShare(PlaceWork):
    """What was done there; `baseline` is the median of its baseline's tokens per second by concurrency."""

    candidates: int
    baseline: Mapping[int, float]


def shares(data: StudyData) -> tuple[PlaceShare, ...]:
    """Every place that has launched something, by name; what was imported is of no place."""
    own = [launch for launch in data.launches if launch.state != "imported"]
    return tuple(_share(data, name) for name in sorted({launch.place for launch in own if launch.place}))


def _share(data: StudyData, name: str) -> PlaceShare:
    launches = [launch for launch in data.at(name) if launch.state != "imported"]
    blocks = [b for launch in launches for b in data.on_launch.get(launch.id, ()) if b.block.valid]
    known = {block.id for block in blocks}
    rates: dict[int, list[float]] = {}
    for stored in blocks:
        if stored.candidate_id == data.baseline.id and stored.concurrency in data.levels:
            rates.setdefault(stored.concurrency, []).append(stored.block.tokens_per_s)
    times = [t for launch in launches for t in (launch.started_at, launch.ready_at, launch.ended_at) if t is not None]
    times += [stored.block.started_at + stored.block.window_s for stored in blocks]
    running = [launch for launch in launches if launch.state == "running"]
    return PlaceShare(
        name=name,
        launches=len(launches),
        candidates=len({launch.slot.candidate_id for launch in launches} - {data.baseline.id}),
        blocks=len(blocks),
        pairs=sum(pair.role == "confirm" and pair.candidate_block in known for pair in data.pairs),
        failures=sum(launch.failure is not None for launch in launches),
        baseline={level: median(each) for level, each in sorted(rates.items())},
        last_at=max(times),
        now=running[-1].slot.candidate_id if running else None,
    )


def place_differences(data: StudyData) -> list[Difference]:
    """Finalists whose speed-ups in the confirmation differ between places."""
    from tuner.judge.places import differences

    ratios: dict[tuple[str, int], dict[str, list[float]]] = {}
    for pair in data.pairs:
        if pair.role == "confirm":
            place = data.launch[data.blocks[pair.candidate_block].launch_id].place
            places = ratios.setdefault((pair.candidate_id, pair.concurrency), {})
            places.setdefault(place, []).append(pair.log_ratio)
    return differences(ratios)
