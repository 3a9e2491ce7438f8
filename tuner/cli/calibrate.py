"""`tuner calibrate`: how noisy this machine is, and how many pairs a study of it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tuner.cli import options
from tuner.cli.console import complain, outlive_output, say, say_json
from tuner.errors import UsageError


def command(
    space: Annotated[str, typer.Option("--space", metavar="FILE", help="Space file, or the name of one that ships.")],
    launches: Annotated[int, typer.Option("--launches", metavar="N", help="Launches of the baseline.")] = 8,
    windows: Annotated[int, typer.Option("--windows", metavar="N", help="Windows per launch and level.")] = 2,
    gain: Annotated[
        float, typer.Option("--gain", metavar="G", help="The true gain that studies are to find, 0.05 for 5 %.")
    ] = 0.05,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of the requests.")] = 0,
    overrides: options.Overrides = None,
    profile: options.Profile = None,
    quiet: options.Quiet = False,
    as_json: options.AsJson = False,
) -> None:
    """Measure the baseline against itself: the noise of this machine. New studies take their pairs from it."""
    from tuner.engines.base import get_engine
    from tuner.judge.calibration import MAX_PAIRS
    from tuner.judge.intervals import MIN_PAIRS
    from tuner.records import mark
    from tuner.study.calibrate import FOLDER, keep, measure_noise
    from tuner.study.interrupt import Interrupts
    from tuner.study.session import current_fingerprint, read_space
    from tuner.study.simulated_world import world_of

    if launches < MIN_PAIRS:
        raise UsageError(f"--launches {launches}: at least {MIN_PAIRS}; noise between launches needs launches")
    if windows < 1:
        raise UsageError(f"--windows {windows}: must be at least 1")
    if not 0.01 < gain <= 1:
        raise UsageError(f"--gain {gain}: must be above 0.01, below which no gain counts as one, and at most 1")
    chosen = read_space(space, tuple(overrides or ()), profile)
    now = current_fingerprint(chosen)
    outlive_output()
    with Interrupts().installed():
        measured, simulated = measure_noise(
            chosen,
            get_engine(chosen.kind),
            world_of(chosen, seed),
            launches=launches,
            windows=windows,
            seed=seed,
            logs=Path(FOLDER) / "logs",
            say=(lambda _line: None) if quiet or as_json else complain,
        )
    found, path = keep(chosen, now, measured, simulated=simulated, gain=gain)
    if as_json:
        say_json({"simulated": simulated, "file": str(path), **found.to_dict()})
        return
    say(f"Noise of {chosen.name} ({chosen.profile} profile, {launches} launches){mark(simulated)}")
    for level in found.levels:
        between = "not measured" if level.between_windows is None else f"{100 * level.between_windows:.2f} %"
        say(
            f"  concurrency {level.concurrency}: within a window {100 * level.within_window:.2f} %, between windows "
            f"{between}, between launches {100 * level.between_launches:.2f} %"
        )
    say(f"  a pair of launches: {100 * found.pair_sd:.2f} %, at most {100 * found.pair_sd_high:.2f} % (80 % bound)")
    if found.pairs is None:
        say(
            f"Even {MAX_PAIRS} pairs would show only gains from {100 * found.detectable:.1f} %, not {100 * gain:g} %: "
            "quiet the machine, lengthen the windows, or settle for larger gains (--gain). With eight candidates "
            f"{MAX_PAIRS} pairs are --launches {found.launches}."
        )
    else:
        say(
            f"{found.pairs} pairs find a true gain of {100 * gain:g} % four times in five (they show gains from "
            f"{100 * found.detectable:.1f} %); with eight candidates that is --launches {found.launches}."
        )
    say(f"Kept in {path}; new studies of this space take their pairs from it.")
