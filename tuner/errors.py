"""The exceptions a user can meet. Each carries what happened, what was lost (nothing) and what to do."""

from __future__ import annotations

from tuner.records import Failure


class TunerError(Exception):
    """Base of all errors with a message for a person. `exit_code` is what the command ends with."""

    exit_code = 1


class UsageError(TunerError):
    """Wrong usage, or a space file that cannot be used. Nothing was started."""

    exit_code = 2


class StudyStopped(TunerError):
    """The study ended without what was asked, for instance because the baseline failed."""

    exit_code = 1


class EnvironmentBroken(TunerError):
    """The machine, not a candidate, is at fault: no port, no disk, no engine."""

    exit_code = 3


class LaunchFailed(TunerError):
    """A server did not come up, or did not answer as asked. `failure` says how and whose fault."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.kind} ({failure.phase}): {failure.message}")
        self.failure = failure
