"""Which configuration of a kernel is fastest for a shape on a device: measured once, and kept in the user's cache."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from engine.cache import cache_dir

log = logging.getLogger(__name__)

T = TypeVar("T", bound=Any)
_VERSION = 1  # raise when kernels change


class Tuned:
    """Choices by shape, for one device.

    Args:
        device: its name and whatever else tells it from others; None: nothing is measured, the first candidate is
            taken.
        measure: seconds that a call takes on the device.
        folder: where choices are kept.
        exchange: every rank's value, by rank. All ranks ask for the same shapes in the same order, and take rank 0's
            choice: with others, what all compute would differ in its last bits.
    """

    def __init__(
        self,
        device: str | None,
        measure: Callable[[Callable[[], object]], float] | None = None,
        folder: Path | None = None,
        exchange: Callable[[Any], Sequence[Any]] = lambda value: [value],
    ) -> None:
        self._measure = measure if device is not None else None
        self._chosen: dict[str, Any] = {}
        self._exchange = exchange
        self._file: Path | None = None
        if device is not None:
            key = hashlib.sha256(f"{_VERSION}|{device}".encode()).hexdigest()[:16]
            self._file = (folder or cache_dir() / "tuned") / f"{key}.json"
        self._kept = self._read()

    def pick(self, shape: str, candidates: Sequence[T], run: Callable[[T], object]) -> T:
        """The candidate (a dataclass) to use for this shape. Never measured twice on a device, also by a later process.

        A candidate that cannot run there (too much shared memory) is passed over.
        """
        if shape not in self._chosen:
            mine = self._look_up(shape, candidates) or self._compare(shape, candidates, run)
            self._chosen[shape] = self._exchange(mine)[0]
        chosen: T = self._chosen[shape]
        return chosen

    def _look_up(self, shape: str, candidates: Sequence[T]) -> T | None:
        return next((one for one in candidates if asdict(one) == self._kept.get(shape)), None)

    def _compare(self, shape: str, candidates: Sequence[T], run: Callable[[T], object]) -> T:
        if self._measure is None:
            return candidates[0]
        times: dict[Hashable, float] = {}
        for one in candidates:
            try:
                times[one] = self._measure(lambda one=one: run(one))  # type: ignore[misc]
            except RuntimeError as error:
                log.info("%s: %s cannot run here: %s", shape, one, error)
        if not times:
            raise RuntimeError(f"{shape}: none of {len(candidates)} configurations can run on this device")
        best: Any = min(times, key=lambda one: times[one])
        self._keep(shape, best)
        return best

    def _read(self) -> dict[str, Any]:
        if self._file is None:
            return {}
        try:
            found = json.loads(self._file.read_text())
        except (OSError, ValueError):
            return {}  # none yet, or damaged: measured again
        return found if isinstance(found, dict) else {}

    def _keep(self, shape: str, chosen: Any) -> None:
        if self._file is None:
            return
        self._kept = {**self._read(), shape: asdict(chosen)}
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            fresh = self._file.with_suffix(f".{id(self)}")
            fresh.write_text(json.dumps(self._kept, indent=1))
            fresh.replace(self._file)
        except OSError as error:
            log.warning("the choice for %s could not be kept: %s", shape, error)
