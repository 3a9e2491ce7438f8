"""`tuner plan`: what a study would come to. Starts nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Annotated

import typer

from tuner.cli import options
from tuner.cli.console import by_the_clock, duration, say


def command(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Space file, or the name of one that ships.")],
    overrides: options.Overrides = None,
    profile: options.Profile = None,
    as_json: options.AsJson = False,
) -> None:
    """Say what a study would come to: launches, hours, what is ruled out and by which rule. Starts nothing."""
    from tuner.records import mark
    from tuner.study.session import outlook, read_space
    from tuner.study.simulated_world import virtual

    space = read_space(file, tuple(overrides or ()), profile)
    found = outlook(space)
    if as_json:
        say(
            json.dumps(
                {"space": space.name, "simulated": space.kind == "simulated", **found.to_dict()}, ensure_ascii=False
            )
        )
        return
    if space.kind == "simulated":
        say(f"{file}:{mark(True)}")
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
    most = "" if found.budget_hours is None else f"; the budget allows {duration(3600 * found.budget_hours)}"
    seconds = 3600 * found.hours
    ends = " on its virtual clock" if virtual(space) else f"; begun now, it ends about {by_the_clock(seconds)}"
    say(f"time: about {duration(seconds)}{ends}{most}")
    say(f"  {found.timing.source}")
    for note in (*found.notes, *_there(file, space.name)):
        say(f"note: {note}")


def _there(file: str, name: str) -> Iterator[str]:
    """What to know where the study of this name has begun: the figures are of a new one."""
    from tuner.study.glance import glance
    from tuner.study.lease import working_since
    from tuner.study.names import local_studies
    from tuner.study.store import open_study

    if name not in local_studies():
        return
    with closing(open_study(name, None)) as store:
        working = bool(working_since(store.engine, name))
        with store.engine.connect() as connection:
            found = glance(connection, name, store.trials.outline(), working=working)
    used = f"{found.summary.launches_used} of {found.budget.launches} launches"
    if found.state == "done":
        yield (
            f"study {name} is done ({used}; {found.reason}): tuner run {file} measures nothing more, and the figures "
            f"above are of a new study (--study NAME)"
        )
    else:
        left = f", about {duration(found.summary.left_s)} left" if found.summary.left_s else ""
        yield f"study {name} has begun ({used}{left}): tuner run {file} goes on with it; the figures above are of all"
