"""`tuner recompute`: every published number of a study, derived again from its records."""

from __future__ import annotations

import typer

from tuner.cli import options
from tuner.cli.console import say, say_json


def command(study: options.Study, as_json: options.AsJson = False, storage: options.Storage = None) -> None:
    """Derive blocks, pairs, scores and verdicts again; ends with 1 when a stored number does not follow."""
    from contextlib import closing

    from tuner.records import mark
    from tuner.study.names import check_name, study_folder
    from tuner.study.recompute import recompute
    from tuner.study.store import open_study

    with closing(open_study(check_name(study), storage)) as store:
        data, pairs = store.data(), store.stored_pairs()
    found = recompute(data, pairs, study_folder(data.name))
    if as_json:
        differences = [{"what": d.what, "stored": str(d.stored), "derived": str(d.derived)} for d in found.differences]
        say_json(
            {
                "study": data.name,
                "derived": found.counts,
                "differences": differences,
                "missing": list(found.missing),
                "simulated": data.simulated,
            }
        )
    else:
        said = ", ".join(f"{count} {name}" for name, count in found.counts.items())
        say(f"Derived again for {data.name}: {said}{mark(data.simulated)}")
        for difference in found.differences:
            say(f"  differs: {difference}")
        for sentence in found.missing:
            say(f"  not derived: {sentence}")
        if not found.differences:
            say("Every one of them is what is stored; the report and the recommendation are made of these.")
    if found.differences:
        raise typer.Exit(1)
