"""`tuner status`: where a study stands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tuner.cli import options
from tuner.cli.console import duration, remaining, say

if TYPE_CHECKING:
    from tuner.study.glance import Glance
    from tuner.study.lease import Sign
    from tuner.study.store import StudyStore


FEW_BLOCKS = 1000
"""A decision is worked out for a study of so many blocks; of thousands it would take seconds."""


def command(study: options.Study, storage: options.Storage = None) -> None:
    """Show counts per state and failure class, the incumbent, and the time spent and left."""
    from contextlib import closing

    from tuner.records import mark
    from tuner.study.glance import glance
    from tuner.study.lease import working_since
    from tuner.study.names import check_name
    from tuner.study.store import open_study
    from tuner.study.words import change, described

    with closing(open_study(check_name(study), storage)) as store:
        workers = working_since(store.engine, store.name)
        with store.engine.connect() as connection:
            data = glance(connection, store.name, store.trials.outline(), working=bool(workers))
        pareto = _pareto_set(store) if data.space["objective"]["maximize"] == "pareto" else ""
        done = data.state == "done" and data.summary.blocks <= FEW_BLOCKS
        decision = _decision(store) if done else ""
        now = store.clock()
    found = data.summary
    state: str = data.state
    if state == "running" and not workers:
        state = "killed; go on with tuner resume " + study
    marked = mark(data.space["engine"]["kind"] == "simulated")
    say(f"study:       {data.name} ({data.space['profile']} profile, seed {data.seed}){marked}")
    first = f", by process {workers[0].holder.pid} on {workers[0].holder.host}" if workers else ""
    others = len(workers) - 1
    more_of_them = f" and {others} other worker{'s' * (others != 1)}" if others > 0 else ""
    say(f"state:       {state}{first}{more_of_them}")
    if data.reason and data.state != "running":
        say(f"             {data.reason}")
    levels = ", ".join(map(str, data.space["workload"]["concurrency"]))
    say(f"model:       {data.space['engine']['model']} on {data.space['engine']['kind']}, concurrency {levels}")
    say(f"trials:      {_counts(found.trials)}")
    more = f" (and {found.interrupted} interrupted)" if found.interrupted else ""
    say(f"launches:    {found.launches_used} of {data.budget.launches}{more}")
    say(f"failures:    {_counts(found.failures)}")
    say(f"blocks:      {found.blocks} valid, {found.invalid_blocks} not")
    if found.looks:
        say(f"race:        {found.looks}")
    for trial in data.out:
        say(f"             {described(data.settings[trial.candidate_id])}: {trial.why}")
    if found.incumbent is not None:
        best = found.incumbent
        say(f"incumbent:   {described(best.candidate)}: {change(best.value)} in the search, unconfirmed")
    if decision:
        say(f"decision:    {decision}")
    if pareto:
        say(pareto)
    for line in _places(data, workers, now):
        say(line)
    left = ""
    if found.left_s and data.state != "done":
        virtual = (data.space.get("simulation") or {}).get("clock") == "virtual"
        left = (
            f", {remaining(found.left_s, virtual=virtual)}"
            if workers
            else f", about {duration(found.left_s)} left once it goes on"
        )
    say(f"time:        {duration(found.elapsed_s)} with a server so far{left}")
    for kind, message in data.events:
        if message:
            say(f"  {kind}: {message}")


def _decision(store: StudyStore) -> str:
    """The decision over all levels; it needs every record."""
    from tuner.judge.text import verdict_phrase
    from tuner.study.decide import recommendation
    from tuner.study.words import described

    overall = recommendation(store.data()).overall
    if overall.winner is None or overall.verdict is None:
        return f"no winner overall: keep the baseline; levels by tuner recommend {store.name}"
    return f"{described(overall.winner)}: {verdict_phrase(overall.verdict)}, confirmed"


def _pareto_set(store: StudyStore) -> str:
    """The line that names it; its verdicts need every record."""
    from tuner.study.decide import pareto_set

    data = store.data()
    named = ["the baseline" if one == data.baseline.id else one for one in pareto_set(data)]
    return f"pareto set:  {', '.join(named)}, as far as confirmation pairs tell"


def _places(data: Glance, workers: Sequence[Sign], now: float) -> Iterator[str]:
    """One line a place: what it has measured, and what is known of its worker."""
    from tuner.study.words import described

    alive = {each.place.name: each for each in workers}
    known = {share.name: share for share in data.places}
    for name in sorted({*alive, *known}):
        share, sign = known.get(name), alive.get(name)
        parts = []
        if share is not None:
            parts += [f"{share.launches} launches", f"{share.blocks} blocks", f"{share.pairs} confirmation pairs"]
            parts += [f"{share.failures} failures"] * bool(share.failures)
        if sign is not None:
            parts.append(f"process {sign.holder.pid} at work, lease renewed {duration(max(0.0, sign.age_s))} ago")
            if share is not None and share.now is not None:
                candidate = data.settings.get(share.now)
                other = candidate is not None and share.now != data.baseline
                parts.append(f"now: {described(candidate) if candidate and other else 'the baseline'}")
        elif share is not None:
            parts.append(f"no worker; last heard of {duration(max(0.0, now - share.last_at))} ago")
        yield f"place:       {name}: {', '.join(parts)}"


def _counts(counts: object) -> str:
    assert isinstance(counts, dict)
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())) or "none"
