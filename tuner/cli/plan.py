"""`tuner plan`: what a study would come to. Starts nothing."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from tuner.cli import options
from tuner.cli.console import say


def command(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Space file, or the name of one that ships.")],
    overrides: options.Overrides = None,
    profile: options.Profile = None,
    as_json: options.AsJson = False,
) -> None:
    """Say what a study would come to: launches, hours, what is ruled out and by which rule. Starts nothing."""
    from tuner.study.session import outlook, read_space

    space = read_space(file, tuple(overrides or ()), profile)
    found = outlook(space)
    if as_json:
        say(json.dumps({"space": space.name, **found.to_dict()}, ensure_ascii=False))
        return
    if found.combinations is None:
        say(f"{file}: more combinations than can be listed")
    else:
        say(f"{file}: {found.combinations} combinations, {found.legal} candidates to try beside the baseline")
    if found.merged:
        say(f"  {found.merged} are equal in effect to others, or to the baseline, and are not launched again")
    for rule in found.ruled_out:
        say(f"  {rule.combinations} ruled out ({rule.source}): {rule.rule}")
    if found.hot:
        groups = "" if found.groups is None else f", {found.groups} combinations of all others"
        say(f"hot (changed on a running server): {', '.join(found.hot)}{groups}")
    say(
        f"launches: about {found.launches} of at most {space.budget.launches}: {found.search} to search among "
        f"{found.candidates} candidates, {found.confirmation} to confirm the best"
    )
    if found.saved:
        saved_h = found.saved * found.timing.startup_s / 3600
        say(f"  about {found.saved} launches saved by hot settings, {saved_h:.2g} hours of starting servers")
    most = "" if found.budget_hours is None else f", at most {found.budget_hours:g}"
    say(f"hours: about {found.hours:.2g}{most} ({found.timing.source})")
    for note in found.notes:
        say(f"note: {note}")
