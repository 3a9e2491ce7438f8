"""Speculation that silently accepts nothing leaves a healthy, correct and slow server; this says so, and why."""

from __future__ import annotations

import logging

from engine.spec.base import Drafter

log = logging.getLogger(__name__)

_WINDOW = 1000
"""Verify steps looked at together."""


class AcceptanceAlarm:
    """Watches how often the first draft of a round is right."""

    def __init__(self) -> None:
        self._verified = self._right = 0
        self._drafter = ""
        self._message = ""

    def observe(self, drafter: Drafter, verified: int, right: int) -> None:
        """A round verified drafts of so many requests; of so many the first draft was right."""
        if drafter.name != self._drafter:
            self._drafter, self._verified, self._right, self._message = drafter.name, 0, 0, ""
        self._verified += verified
        self._right += right
        if self._verified < _WINDOW:
            return
        share = self._right / self._verified
        self._verified = self._right = 0
        before, self._message = self._message, ""
        if share < drafter.alarm_floor:
            self._message = (
                f"only {share:.1%} of first drafts were right in the last {_WINDOW} verify steps; likely causes: a "
                "draft head or model of another target, features of the wrong layers, text far from what the head "
                "was trained on (other languages, long contexts), or a high temperature"
            )
            if not before:
                log.warning("speculation with %s: %s", drafter.name, self._message)

    def path(self) -> dict[str, dict[str, str]]:
        """Its entry among `/server_info`'s paths; none while all is well."""
        return {"acceptance": {"state": "failed", "detail": self._message}} if self._message else {}
