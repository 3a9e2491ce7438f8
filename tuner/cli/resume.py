"""`tuner resume`: continues a study to its target."""

from __future__ import annotations

from contextlib import closing

from tuner.cli import options
from tuner.cli.run import carry_out


def command(
    study: options.Study,
    launches: options.Launches = None,
    candidates: options.Candidates = None,
    more: options.More = None,
    hours: options.Hours = None,
    devices: options.Devices = None,
    workers: options.Workers = None,
    gpus: options.Gpus = None,
    cpus: options.Cpus = None,
    at_most: options.AtMost = None,
    storage: options.Storage = None,
    no_crash_memory: options.NoCrashMemory = False,
    quiet: options.Quiet = False,
    json_log: options.JsonLog = False,
) -> None:
    """Continue a study to its target, without being told it again; --more extends it."""
    from tuner.cli.cluster import Asked, limit_options, local_files, run_on_ray
    from tuner.study.names import check_name
    from tuner.study.preflight import require_free
    from tuner.study.session import Limits, here, named_devices, reopen
    from tuner.study.store import open_study

    limits = Limits(launches=launches, candidates=candidates, hours=hours, more=more)
    asked = Asked(workers, gpus, cpus, at_most, devices)
    if asked.ray:
        later = ["resume", check_name(study), *(["--no-crash-memory"] if no_crash_memory else [])]
        with closing(open_study(study, storage)) as known:
            space = known.data().space
        run_on_ray(
            asked,
            study=study,
            space=space,
            first=[*later, *limit_options(limits)],
            later=later,
            copies={},
            files=local_files(space.workload.prompts),
            storage=storage,
            quiet=quiet,
            json_log=json_log,
        )
        return
    only = named_devices(devices)
    with closing(open_study(check_name(study), storage)) as known:
        require_free(known.data().space, only)
    store = reopen(study, storage=storage, limits=limits, devices=only)
    place = here(store.data().space, only)
    carry_out(store, storage=storage, no_crash_memory=no_crash_memory, quiet=quiet, json_log=json_log, place=place)
