"""`tuner resume`: continues a study to its target."""

from __future__ import annotations

from tuner.cli import options
from tuner.cli.run import carry_out


def command(
    study: options.Study,
    launches: options.Launches = None,
    candidates: options.Candidates = None,
    more: options.More = None,
    hours: options.Hours = None,
    devices: options.Devices = None,
    storage: options.Storage = None,
    no_crash_memory: options.NoCrashMemory = False,
    quiet: options.Quiet = False,
    json_log: options.JsonLog = False,
) -> None:
    """Continue a study to its target, without being told it again; --more extends it."""
    from tuner.study.session import Limits, here, named_devices, reopen

    limits = Limits(launches=launches, candidates=candidates, hours=hours, more=more)
    only = named_devices(devices)
    store = reopen(study, storage=storage, limits=limits, devices=only)
    place = here(store.data().space, only)
    carry_out(store, storage=storage, no_crash_memory=no_crash_memory, quiet=quiet, json_log=json_log, place=place)
