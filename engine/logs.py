"""Logging of both processes to stderr: a line per event, as text (time, level, message) or as JSON."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")


class JsonLines(logging.Formatter):
    """One JSON object a line: `time`, `level`, `logger`, `message`, `traceback` where there is one, and whatever the
    event was logged with as `extra={"fields": {…}}`."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter.format`."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def configure_logging(level: str, form: str = "text") -> None:
    """Sets up the root logger; `level` is one of `LEVELS`, `form` one of `FORMATS`."""
    handler = logging.StreamHandler()
    text = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(JsonLines() if form == "json" else text)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for library in ("uvicorn", "httpx", "asyncio"):
        logging.getLogger(library).setLevel(logging.WARNING)
