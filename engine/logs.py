"""Logging of both processes: one line per event, time, level, message, to stderr."""

from __future__ import annotations

import logging

LEVELS = ("debug", "info", "warning", "error")


def configure_logging(level: str) -> None:
    """Sets up the root logger; `level` is one of `LEVELS`."""
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(message)s", force=True)
    for library in ("uvicorn", "httpx", "asyncio"):
        logging.getLogger(library).setLevel(logging.WARNING)
