"""`tuner remeasure`: one candidate of a study again, beside what was recorded."""

from __future__ import annotations

from typing import Annotated

import typer

from tuner.cli import options
from tuner.cli.console import complain, outlive_output, say, say_json


def command(
    study: options.Study,
    candidate: Annotated[str, typer.Argument(metavar="CANDIDATE", help="Id of a candidate, or 'baseline'.")],
    launches: Annotated[int, typer.Option("--launches", metavar="N", help="Fresh starts to measure.")] = 1,
    as_json: options.AsJson = False,
    storage: options.Storage = None,
) -> None:
    """Launch a candidate afresh and compare with its record: 0 when noise explains the change, 1 when it is slower."""
    import json
    import time
    from contextlib import closing
    from dataclasses import asdict

    from tuner.engines.base import get_engine
    from tuner.errors import UsageError
    from tuner.export.choose import reference_of
    from tuner.files import write_whole
    from tuner.judge.holds import WITHIN, level_holds
    from tuner.records import Candidate, mark
    from tuner.study.again import Fresh, measure_again
    from tuner.study.calibrate import HOST, known_pair_sd
    from tuner.study.engine import launch_record
    from tuner.study.interrupt import Interrupts
    from tuner.study.names import check_name, study_folder
    from tuner.study.place import measuring
    from tuner.study.session import container_image, current_fingerprint, here, refuse_changes
    from tuner.study.simulated_world import world_of
    from tuner.study.store import open_study

    if launches < 1:
        raise UsageError(f"--launches {launches}: must be at least 1")
    with closing(open_study(check_name(study), storage)) as store:
        data = store.data()
    reference = reference_of(data, candidate, known_pair_sd(data.space, data.fingerprint), here(data.space).name)
    refuse_changes(data, data.space, current_fingerprint(data.space))
    wanted = data.baseline if candidate == "baseline" else Candidate(data.settings_of(candidate))
    engine, image = get_engine(data.space.kind), container_image(data.space)
    folder = study_folder(data.name)
    outlive_output()
    rates: dict[int, list[float]] = {level.concurrency: [] for level in reference.levels}
    wrong = ""
    with Interrupts().installed(), measuring(f"remeasurement of {data.name}") as other:
        if other:
            complain(other)
        world = world_of(data.space, data.seed + 1)
        for number in range(launches):
            record = launch_record(data.space, engine, wanted, host=HOST, port=world.free_port(), image=image)
            run = measure_again(
                Fresh(world, record, folder / "logs" / "remeasured.log"),
                world,
                record,
                engine,
                list(rates),
                seed=data.seed + 1 + number,
                say=(lambda _line: None) if as_json else complain,
            )
            if run.failure is not None:
                wrong = f"{run.failure.kind}: {run.failure.message}"
                break
            for level, block in run.blocks.items():
                rates[level].append(block.tokens_per_s)
    found = [
        level_holds(
            level.concurrency,
            level.tokens_per_s,
            rates[level.concurrency],
            within=level.within,
            pair_sd=reference.pair_sd,
            claims=len(reference.levels),
        )
        for level in reference.levels
        if rates[level.concurrency]
    ]
    document = {
        "study": data.name,
        "candidate": wanted.id,
        "at": time.time(),
        "simulated": data.simulated,
        "levels": [asdict(each) for each in found],
        "failure": wrong,
    }
    path = folder / "remeasured.jsonl"
    try:
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        write_whole({path: f"{before}{json.dumps(document, ensure_ascii=False)}\n"})
    except OSError as error:
        complain(f"the measurement could not be kept in {path}: {error.strerror or error}")
    if as_json:
        say_json(document)
    else:
        say(f"Candidate {wanted.id} of {data.name}, measured again{mark(data.simulated)}")
        for each in found:
            say(
                f"  concurrency {each.concurrency}: {each.measured:.1f} tokens/s ({each.blocks[1]} blocks), recorded "
                f"{each.recorded:.1f} ({each.blocks[0]}): {100 * (each.ratio - 1):+.1f} %, within "
                f"{100 * each.tolerance:.1f} %: {each.outcome}"
            )
        if found:
            say(f"  {WITHIN}")
        if wrong:
            say(f"  {wrong}")
        say(f"The study is as it was; this measurement is in {path}.")
    if wrong or any(each.outcome == "slower" for each in found):
        raise typer.Exit(1)
