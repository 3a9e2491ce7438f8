"""How often a study errs on a real machine: `python -m benchmarks.trust_engine --folder DIR --output FILE`.

A/A studies compare the bundled engine with itself, under another label; of ten, at most one may name a winner. Others
compare it with itself stopped for a tenth of the time (`benchmarks.slowed`): as the candidate, which must be found
slower, and as the baseline, against which the plain engine must win. What is done already in DIR is not done again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SERVE = [
    sys.executable, "-m", "benchmarks.slowed", "--share", "{share}", "--label", "{label?}", "--",
    sys.executable, "-m", "engine", "serve", "--model", "{model}", "--port", "{port}", "--host", "{host}",
]  # fmt: skip
ROOT = Path(__file__).parents[1]
SLOWED = 0.1
CALIBRATION = ["--launches", "16", "--windows", "1", "--gain", "0.08"]
"""Sixteen launches, since the pairs asked for come from an upper bound of the noise, which few launches leave wide.
Asked for is less than the slowing, since a gain that is found four times in five is missed once."""


def space(name: str, level: int, baseline: float, candidate: float, launches: int) -> dict[str, Any]:
    """A study of one candidate, which differs from the baseline by its label, and by the share it stands still."""
    return {
        "name": name,
        "engine": {
            "kind": "command",
            "model": "smollm2-135m",
            "args": {"command": SERVE, "ready_path": "/health", "served_model": "smollm2-135m"},
        },
        "workload": {"prompts": "mixed", "max_tokens": 64, "temperature": 0, "concurrency": [level]},
        "baseline": {"share": baseline, "label": "a"},
        "parameters": {"share": {"choices": [candidate]}, "label": {"choices": ["b"]}},
        "objective": {"maximize": "speedup", "guard": {"min_speedup": 0.5}},
        "budget": {"launches": launches, "candidates": 2},
        "profile": "short",
    }


def study(
    folder: Path, name: str, level: int, baseline: float, candidate: float, launches: int, calibrated: bool
) -> dict[str, Any]:
    """Runs one, or goes on with it; its decision."""
    done = folder / f"{name}.json"
    if done.exists():
        return json.loads(done.read_text())
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(space(name, level, baseline, candidate, launches)))
    tuner = [sys.executable, "-m", "tuner"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    once = folder / "calibrated.json"  # of the slowed baseline: all these studies have the same
    if calibrated and not once.exists():
        asked = ["calibrate", "--space", str(file), *CALIBRATION, "--json"]
        told = subprocess.run([*tuner, *asked], cwd=folder, env=env, check=True, stdout=subprocess.PIPE, text=True)
        once.write_text(told.stdout)
    ended = subprocess.run([*tuner, "run", str(file), "--quiet"], cwd=folder, env=env, check=False)
    told = subprocess.run(
        [*tuner, "recommend", name, "--json"], cwd=folder, env=env, check=False, capture_output=True, text=True
    )
    decision = json.loads(told.stdout)
    decision["exit"] = ended.returncode
    done.write_text(json.dumps(decision))
    return decision


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--alike", type=int, default=10, help="A/A studies, of 12 launches")
    parser.add_argument("--slower-baseline", type=int, default=4, help="studies with a slowed baseline, of 96 launches")
    parser.add_argument("--slower-candidate", type=int, default=2, help="with a slowed candidate, of 12")
    parser.add_argument("--level", type=int, default=8, help="concurrency")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    found = {
        kind: [study(given.folder, f"{kind}-{i}", given.level, *shares, launches, calibrated) for i in range(count)]
        for kind, count, shares, launches, calibrated in (
            ("alike", given.alike, (0.0, 0.0), 12, False),
            ("slower-candidate", given.slower_candidate, (0.0, SLOWED), 12, False),
            ("slower-baseline", given.slower_baseline, (SLOWED, 0.0), 96, True),
        )
    }
    winners = {kind: sum(bool(each["overall"]["winner"]) for each in studies) for kind, studies in found.items()}
    calibration = given.folder / "calibrated.json"
    kept = json.loads(given.output.read_text()).get("not_counted", []) if given.output.exists() else []
    document = {
        "expected_gain_over_a_slowed_baseline": 1 / (1 - SLOWED) - 1,
        "calibrated_by": ["tuner", "calibrate", *CALIBRATION],
        "calibration": json.loads(calibration.read_text()) if calibration.exists() else None,
        "studies": {kind: len(studies) for kind, studies in found.items()},
        "named_a_winner": winners,
        **found,
        "not_counted": kept,
    }
    given.output.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps({"studies": document["studies"], "named_a_winner": winners}))


if __name__ == "__main__":
    main()
