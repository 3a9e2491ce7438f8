"""`tuner recommend`: the decision of a study."""

from __future__ import annotations

from tuner.cli import options
from tuner.cli.console import complain, say, say_json


def command(study: options.Study, as_json: options.AsJson = False, storage: options.Storage = None) -> None:
    """Print the winner per concurrency and overall, with interval, or that there is none."""
    from contextlib import closing

    from tuner.judge.text import recommendation_dict, recommendation_lines
    from tuner.study.decide import recommendation
    from tuner.study.names import check_name
    from tuner.study.store import open_study

    with closing(open_study(check_name(study), storage)) as store:
        data = store.data()
    found = recommendation(data)
    if as_json:
        say_json({"state": data.state, **recommendation_dict(found)})
    else:
        for line in recommendation_lines(found):
            say(line)
    if data.state != "done":
        complain(
            f"The study is not done ({data.state}); this is what its records say so far. Go on: tuner resume {study}"
        )
