"""`tuner check`: validates a space file and starts nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tuner.cli import options
from tuner.cli.console import say

if TYPE_CHECKING:
    from tuner.space import Space


def command(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Space file, or the name of one that ships.")],
    overrides: options.Overrides = None,
    profile: options.Profile = None,
) -> None:
    """Validate a space file: every problem at once, with its line and the nearest valid name."""
    from tuner.bench.prompts import doubts, load_prompts
    from tuner.study.calibrate import known_pairs
    from tuner.study.policy import POLICIES, planned_pairs
    from tuner.study.preflight import kept_secret, preflight, refuse
    from tuner.study.session import current_fingerprint, read_space
    from tuner.study.words import described

    space = read_space(file, tuple(overrides or ()), profile)
    count, none = _to_try(space)
    levels = ", ".join(map(str, space.workload.concurrency))
    pairs = planned_pairs(space.budget.launches, POLICIES[space.profile])
    parameters, rules = len(space.parameters), len(space.rules)
    rest = f"{parameters} parameter{'s' * (parameters != 1)}, {rules} rule{'s' * (rules != 1)}"
    say(f"{file}: valid. {count}, {rest}.")
    say(f"baseline: {described(space.baseline)}")
    say(f"workload: {space.workload.prompts}, {space.workload.max_tokens} tokens, concurrency {levels}")
    say(f"budget: {space.budget.launches} launches, {2 * pairs} of them to confirm the best ({space.profile} profile)")
    if none:
        say(f"note: {none}")
    for doubt in doubts(load_prompts(space.workload.prompts, split="all")):
        say(f"note: {doubt}")
    if pairs < 4:
        say("note: a claim needs 4 pairs of confirmation, so at least 10 launches")
    if warning := kept_secret(space):
        say(f"note: {warning}")
    found = preflight(space)
    refuse(found)
    for note in found.notes:
        say(f"note: {note}")
    if found.missing:
        # The file is right all the same: it may be meant for another machine.
        say(f"cannot run here: {'; '.join(found.missing)}")
        return
    # Raises for what a launch needs and is not here: an engine, a key, a container runtime, an image.
    now = current_fingerprint(space)
    if asked := known_pairs(space, now):
        say(f"note: the calibration of this space asks for {asked} pairs, {2 * asked} launches of a new study")


def _to_try(space: Space) -> tuple[str, str]:
    """How many candidates there are beside the baseline, equal ones counted once; and a note where there are none."""
    from tuner.study.plan import to_try
    from tuner.study.session import engine_here

    count = to_try(space, engine_here(space))
    if count is None:
        return "more candidates than can be listed", ""
    none = "" if count else "nothing is left to try: every combination is ruled out, or is the baseline in effect"
    return f"{count} candidate{'s' * (count != 1)} beside the baseline", none
