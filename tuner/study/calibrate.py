"""A/A runs of a space's baseline, kept beside the studies, and the number of pairs that studies take from them."""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tuner.errors import EnvironmentBroken, LaunchFailed
from tuner.files import write_whole
from tuner.judge.calibration import GAIN, MAX_PAIRS, Calibration, Window, calibrate
from tuner.records import LaunchRecord, short_hash
from tuner.space import Space
from tuner.study.engine import StudyEngine, launch_record, not_in_effect
from tuner.study.names import STUDIES
from tuner.study.world import World

FOLDER = STUDIES / "calibrations"
ATTEMPTS = 3
"""Measurements of one window until it passes its gates."""

HOST = "127.0.0.1"


def calibration_key(space: Space, now: Mapping[str, Any]) -> str:
    """What a calibration is of: baseline, workload, engine and machine; `now` is the space's fingerprint."""
    workload = space.workload
    return short_hash(
        {
            "engine": [space.kind, now.get("engine_version")],
            "hardware": now.get("hardware"),
            "model": space.model,
            "args": space.args,
            "env": space.env,
            "baseline": dict(space.baseline.settings),
            "workload": [workload.prompts, workload.max_tokens, workload.temperature, list(workload.concurrency)],
            "profile": space.profile,
        }
    )


def known_pairs(space: Space, now: Mapping[str, Any], folder: Path = FOLDER) -> int | None:
    """The pairs that a calibration of this space asks for; None when there is none, or it cannot be read.

    Where no number of pairs would do, as many as are of any use: fewer would show less still.
    """
    if known_pair_sd(space, now, folder) is None:
        return None
    pairs = _known(space, now, "pairs", folder)
    if pairs is None:
        return MAX_PAIRS
    return pairs if isinstance(pairs, int) and not isinstance(pairs, bool) and pairs >= 1 else None


def known_pair_sd(space: Space, now: Mapping[str, Any], folder: Path = FOLDER) -> float | None:
    """The SD of a pair's log ratio by a calibration of this space; None when there is none, or it cannot be read."""
    sd = _known(space, now, "pair_sd", folder)
    return float(sd) if isinstance(sd, (int, float)) and not isinstance(sd, bool) and sd > 0 else None


def _known(space: Space, now: Mapping[str, Any], name: str, folder: Path) -> Any:
    try:
        stored = json.loads((folder / f"{calibration_key(space, now)}.json").read_text(encoding="utf-8"))
        return stored["calibration"][name]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # a study does without, as it does when nobody has calibrated


def measure_noise(
    space: Space,
    engine: StudyEngine,
    world: World,
    *,
    launches: int,
    windows: int,
    seed: int,
    logs: Path,
    say: Callable[[str], None] = lambda _line: None,
) -> tuple[list[Window], bool]:
    """Launches the baseline again and again and measures every level; the windows, and whether they are simulated.

    Raises:
        LaunchFailed: the baseline does not come up, or does not hold.
        EnvironmentBroken: windows do not pass their gates.
    """
    run = uuid.uuid4().hex
    found: list[Window] = []
    simulated = False
    for launch in range(launches):
        record = launch_record(space, engine, space.baseline, host=HOST, port=world.free_port())
        simulated = simulated or record.simulated
        marker = {"study": run, "launch": str(launch)}
        server = world.start(record, marker=marker, log_path=logs / f"calibration-{launch}.log")
        try:
            server.wait_ready()
            server.smoke()
            info = server.server_info()
            if info is not None and (failure := not_in_effect(engine.mismatches(record, info))):
                raise LaunchFailed(failure)
            for number in range(windows):
                for level in space.workload.concurrency:
                    # Both launches of a pair get the same requests, as in a study.
                    each = _seed(seed, launch // 2, level)
                    window = _window(world, server, record, level, each, launch, number)
                    say(f"launch {launch + 1} of {launches}: {window.tokens_per_s:.1f} tokens/s at {level}")
                    found.append(window)
        finally:
            server.stop()
            world.reap(marker)
    return found, simulated


def _window(world: World, server: Any, record: LaunchRecord, level: int, seed: int, launch: int, number: int) -> Window:
    red = ""
    for _ in range(ATTEMPTS):
        outcome = world.measure(
            server, record, concurrency=level, role="screen", seed=seed, on_progress=lambda _progress: None
        )
        block = outcome.block
        if block is None:
            if outcome.failure is None:
                raise EnvironmentBroken(f"the window at concurrency {level} gave no figures; nothing was kept")
            raise LaunchFailed(outcome.failure)
        if block.valid:
            return Window(launch, level, number, block.tokens_per_s, block.series)
        red = ", ".join(gate.name for gate in block.gates if not gate.ok)
    raise EnvironmentBroken(
        f"no valid window at concurrency {level} in {ATTEMPTS} attempts ({red}). Nothing was kept; stop what else runs "
        "on this machine, or use a longer profile"
    )


def _seed(seed: int, pair: int, level: int) -> int:
    digest = hashlib.sha256(f"{seed}/calibration/{pair}/{level}".encode()).digest()
    return int.from_bytes(digest[:4], "big")


def keep(
    space: Space, now: Mapping[str, Any], windows: list[Window], *, simulated: bool, gain: float, folder: Path = FOLDER
) -> tuple[Calibration, Path]:
    """Judges the windows and writes both down, in place of an earlier calibration of the same.

    Raises:
        EnvironmentBroken: the file cannot be written.
    """
    found = calibrate(windows, space.workload.weight_of, gain=gain)
    path = folder / f"{calibration_key(space, now)}.json"
    document = {
        "what": f"A/A calibration of {space.name}",
        "simulated": simulated,
        "at": time.time(),
        "space": space.to_dict(),
        "fingerprint": dict(now),
        "calibration": found.to_dict(),
        "windows": [asdict(window) for window in windows],
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole({path: json.dumps(document, ensure_ascii=False, indent=1) + "\n"})
    except OSError as error:
        raise EnvironmentBroken(f"{path} cannot be written: {error.strerror}; the calibration is lost") from error
    return found, path


__all__ = ["GAIN", "calibration_key", "keep", "known_pairs", "measure_noise"]
