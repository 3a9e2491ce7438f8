"""What an unattended study on the bundled engine has found, against the best of the whole grid: measured side by side.

The study is of the grid's own space (`python -m benchmarks.search --space > grid.yaml`, `tuner run grid.yaml`).
Its decision and the grid's best are launched side by side, a pair of servers for each pair, and measured by turns, in
mirrored order, on prompts that neither has seen; every pair counts.

    python -m benchmarks.search_real --grid benchmarks/results/search_grid.jsonl --study NAME --pairs 8 --output FILE
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.search import GRID, Cell, Grid, measured_table
from tuner.judge.intervals import t_interval
from tuner.records import Candidate
from tuner.space import parse_space
from tuner.study.decide import recommendation
from tuner.study.looks import looks_saved
from tuner.study.planner import launches_used
from tuner.study.store import open_study


class Side(Grid):
    """One of the two, on a server of its own."""

    def begin(self, candidate: Candidate, pair: int) -> None:
        """Launches it, for a pair."""
        self.stop()
        self.put(Cell(candidate, pair, pair))

    def rate(self, level: int, pair: int) -> float:
        """Tokens per second at a level; a block that fails its gates is measured once more."""
        for attempt in range(2):
            outcome = self.world.measure(
                self.server, self.up, concurrency=level, role="confirm", seed=pair, on_progress=lambda _: None
            )
            assert outcome.block is not None, outcome.failure
            if outcome.block.valid or attempt:
                break
        return outcome.block.tokens_per_s


def measured(sides: Mapping[str, tuple[Side, Candidate]], pair: int, levels: Sequence[int]) -> dict[str, list[float]]:
    """Both sides of a pair: two servers are up, and take turns at every level, so that what drifts is nearly equal."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for side, candidate in sides.values():
        side.begin(candidate, pair)
    for turn, level in enumerate(levels):
        for name in list(sides)[:: 1 if (pair.bit_count() + turn) % 2 == 0 else -1]:
            found[name].append(sides[name][0].rate(level, pair))
    return found


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", type=Path, required=True)
    parser.add_argument("--study", required=True)
    parser.add_argument("--storage")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    table = measured_table(given.grid)
    best = table.candidates[max((v, i) for i, v in table.value.items() if v is not None)[1]]
    with closing(open_study(given.study, given.storage)) as store:
        data = store.data()
    decided = recommendation(data).overall
    winner = decided.winner or data.baseline
    finalist = decided.winner or decided.finalist or data.baseline
    facts: dict[str, Any] = {
        "study": {
            "winner": dict(winner.settings),
            "speedup": decided.verdict and [decided.verdict.speedup, decided.verdict.low, decided.verdict.high],
            "ended": data.reason,
            "candidates": len(data.measured),
            "launches": launches_used(data),
            "hours": round(data.elapsed_s / 3600, 3),
            "looks": looks_saved(data).sentence,
        },
        "grid_best": dict(best.settings),
        "behind_by_the_grid": _behind(table.value, finalist.id, best.id),
    }
    with tempfile.TemporaryDirectory() as folder:
        space = parse_space(GRID, source="grid.yaml")
        sides = {
            name: (Side(Path(folder) / f"{name}.jsonl", space), candidate)
            for name, candidate in (("best", best), ("study", winner))
        }
        facts["pairs"] = []
        try:
            for pair in range(given.pairs if winner.id != best.id else 0):
                facts["pairs"].append(measured(sides, pair, space.workload.concurrency))
                print(json.dumps(facts["pairs"][-1]), flush=True)
        finally:
            for side, _ in sides.values():
                side.stop()
    facts |= compared(facts["pairs"], table.space.workload.weights)
    text = json.dumps(facts, indent=1) + "\n"
    if given.output:
        given.output.write_text(text)
    print(text)


def compared(pairs: Sequence[dict[str, list[float]]], weights: Sequence[float]) -> dict[str, Any]:
    """The study's decision as a multiple of the grid's best, in the weighted mean over the levels, with 95 %."""
    if not pairs:
        return {"study_over_best": 1.0, "note": "the study has found the grid's best itself"}
    logs = [
        math.fsum(w * math.log(s / b) for w, s, b in zip(weights, one["study"], one["best"], strict=True))
        for one in pairs
    ]
    found = t_interval(logs, 0.95)
    low, high = math.exp(found.low), math.exp(found.high)
    return {"study_over_best": math.exp(math.fsum(logs) / len(logs)), "low": low, "high": high}


def _behind(values: dict[str, float | None], mine: str, best: str) -> float | None:
    """The share that a candidate lacks of the best, by the grid; None where the grid does not have it."""
    here, top = values.get(mine), values[best]
    return None if here is None or top is None else 1 - math.exp(here - top)


if __name__ == "__main__":
    main()
