"""How often a study errs on a real machine: `python -m benchmarks.trust_engine --folder DIR --output FILE`.

A/A studies compare the bundled engine with itself, under another label; of ten, at most one may name a winner. Others
compare it with itself stopped for a tenth of the time (`benchmarks.slowed`): as the candidate, which must be found
slower, and as the baseline, against which the plain engine must win. What is done already in DIR is not done again.
"""

from __future__ import annotations

import argparse
import json
import math
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


def space(name: str, level: int, baseline: float, candidate: float) -> dict[str, Any]:
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
        "budget": {"launches": 12, "candidates": 2},
        "profile": "short",
    }


def study(folder: Path, name: str, level: int, baseline: float, candidate: float) -> dict[str, Any]:
    """Runs one, or goes on with it; its decision."""
    done = folder / f"{name}.json"
    if done.exists():
        return json.loads(done.read_text())
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(space(name, level, baseline, candidate)))
    tuner = [sys.executable, "-m", "tuner"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
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
    parser.add_argument("--alike", type=int, default=10, help="A/A studies")
    parser.add_argument("--slowed", type=int, default=4, help="studies with a slow-down, half of them of the baseline")
    parser.add_argument("--level", type=int, default=8, help="concurrency")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    alike = [study(given.folder, f"alike-{i}", given.level, 0.0, 0.0) for i in range(given.alike)]
    slowed = [
        study(given.folder, f"slowed-{i}", given.level, *((0.0, SLOWED) if i % 2 else (SLOWED, 0.0)))
        for i in range(given.slowed)
    ]
    print(json.dumps({"alike": alike, "slowed": slowed}, indent=1)[:2000])
    given.output.write_text(
        json.dumps({"expected_log_ratio": math.log(1 - SLOWED), "alike": alike, "slowed": slowed}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
