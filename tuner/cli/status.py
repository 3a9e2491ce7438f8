"""`tuner status`: where a study stands."""

from __future__ import annotations

from tuner.cli import options
from tuner.cli.console import duration, say


def command(study: options.Study, storage: options.Storage = None) -> None:
    """Show counts per state and failure class, the incumbent, and the time spent and left."""
    from contextlib import closing

    from tuner.study.controller import change, described
    from tuner.study.lease import holder
    from tuner.study.names import check_name
    from tuner.study.store import open_study
    from tuner.study.summary import summary

    with closing(open_study(check_name(study), storage)) as store:
        data = store.data()
        working = holder(store.engine, store.name)
    found = summary(data, working=working is not None)
    state: str = data.state
    if state == "running" and working is None:
        state = "killed; go on with tuner resume " + study
    say(f"study:       {data.name} ({data.space.profile} profile, seed {data.seed})")
    say(f"state:       {state}" + (f", by process {working.pid} on {working.host}" if working else ""))
    if data.reason and data.state != "running":
        say(f"             {data.reason}")
    say(f"model:       {data.space.model} on {data.space.kind}, concurrency {', '.join(map(str, data.levels))}")
    say(f"trials:      {_counts(found.trials)}")
    more = f" (and {found.interrupted} interrupted)" if found.interrupted else ""
    say(f"launches:    {found.launches_used} of {data.budget.launches}{more}")
    say(f"failures:    {_counts(found.failures)}")
    say(f"blocks:      {found.blocks} valid, {found.invalid_blocks} not")
    if found.incumbent is not None:
        best = found.incumbent
        say(f"incumbent:   {described(best.candidate)}: {change(best.score.value)} in the search, unconfirmed")
    left = f", about {duration(found.left_s)} left" if found.left_s and data.state != "done" else ""
    say(f"time:        {duration(found.elapsed_s)} with a server{left}")
    for event in data.events[-5:]:
        if event.message:
            say(f"  {event.kind}: {event.message}")


def _counts(counts: object) -> str:
    assert isinstance(counts, dict)
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())) or "none"
