"""`tuner drift`: a verification to repeat, for a scheduler."""

from __future__ import annotations

from tuner.cli import options, verify
from tuner.cli.console import say_json


def command(
    target: verify.Target,
    record: verify.Record = None,
    port: verify.Port = None,
    launches: verify.Launches = 1,
    allow_simulated: verify.AllowSimulated = False,
    as_json: options.AsJson = False,
) -> None:
    """Verify again later: the same exit codes, and the change since the last time, which is kept beside the export."""
    from tuner.export.verify import history

    folder, verified = verify.run(target, record, port, launches, allow_simulated, quiet=True)
    earlier = history(folder)
    before = earlier[-1] if earlier else None
    if as_json:
        say_json({**verified.to_dict(), "before": before})
    else:
        verify.show(verified, before)
    verify.finish(folder, verified)
