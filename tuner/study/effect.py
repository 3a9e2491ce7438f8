"""Which candidates are the same in effect: what starts the same server is the same candidate, however it is spelled."""

from __future__ import annotations

from tuner.errors import UsageError
from tuner.records import Candidate, short_hash
from tuner.space import Space
from tuner.study.engine import StudyEngine, launch_record


class Effects:
    """The effect of a space's candidates: a hash of what is launched, after defaults and derived values.

    An environment variable that is unset, one that is "0" and one that is left alone are three effects.
    """

    def __init__(self, space: Space, engine: StudyEngine) -> None:
        self._space = space
        self._engine = engine
        self._known: dict[str, str] = {}

    def of(self, candidate: Candidate) -> str:
        """Equal for candidates that start the same server; of one that cannot be started, its own id."""
        if candidate.id not in self._known:
            try:
                record = launch_record(self._space, self._engine, candidate, host="127.0.0.1", port=1)
                told = {"argv": list(record.argv), "env": dict(record.env), "files": dict(record.files)}
                self._known[candidate.id] = short_hash(told)
            except UsageError:
                self._known[candidate.id] = candidate.id
        return self._known[candidate.id]
