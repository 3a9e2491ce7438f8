"""Who watches a study run: a live display on a terminal, plain lines elsewhere, JSON lines for programs."""

from __future__ import annotations

import json
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tuner.cli.console import duration, remaining
from tuner.study.data import Slot, StudyData
from tuner.study.progress import Event, Observer, Silent
from tuner.study.simulated_world import virtual
from tuner.study.summary import Summary, summary, time_left_s
from tuner.study.words import change, described

REFRESH_PER_S = 1
"""Drawing takes CPU time that the measured server could have: once a second is enough for an eye."""

PHASES = {
    "start": "starting the server",
    "ready": "waiting until it is ready",
    "smoke": "trying a real completion",
    "reconfigure": "changing settings of the running server",
    "block": "measuring",
    "answers": "comparing answers with the baseline's",
    "stop": "stopping the server",
}


class PlainLines(Silent):
    """One line per event, with the time since the start; flushed, so that a log is never behind.

    A launch has what is left, too, as far as is known.
    """

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.left = ""

    def state(self, data: StudyData) -> None:
        """What is left from now on."""
        seconds = time_left_s(data)
        self.left = f"; {remaining(seconds, virtual=virtual(data.space))}" if seconds else ""

    def event(self, event: Event) -> None:
        """Prints it."""
        seconds = int(time.monotonic() - self.began)
        left = self.left if event.kind == "launch" else ""
        print(f"[{seconds // 60:3d}:{seconds % 60:02d}] {event.message}{left}", flush=True)


class JsonLines(Silent):
    """One JSON object per event: `at` (UTC), `kind`, `message`, and its facts."""

    def event(self, event: Event) -> None:
        """Prints it."""
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = {"at": at, "kind": event.kind, "message": event.message, **event.facts}
        print(json.dumps(line, ensure_ascii=False, default=str), flush=True)


class LiveDisplay(Silent):
    """Events scroll by; below them stand the current launch, the block, the incumbent and the time."""

    def __init__(self, console: Console) -> None:
        self.began = time.monotonic()
        self.data: StudyData | None = None
        self.found: Summary | None = None
        self.phase = "opening the study"
        self.progress: Any = None
        self.live = Live(console=console, refresh_per_second=REFRESH_PER_S, get_renderable=self.render, transient=True)

    def event(self, event: Event) -> None:
        """Prints it above the display."""
        self.live.console.print(Text(event.message, style="yellow" if "fail" in event.kind else ""))

    def state(self, data: StudyData) -> None:
        """The figures shown from now on; worked out here, between blocks, and not while one is measured."""
        self.data, self.found = data, summary(data)

    def working(self, slot: Slot, phase: str, concurrency: int | None = None) -> None:
        """What is shown as being done."""
        at = f" at concurrency {concurrency}" if concurrency else ""
        self.phase = f"{self._who(slot)} ({slot.role}): {PHASES[phase]}{at}"
        self.progress = None

    def block_progress(self, progress: Any) -> None:
        """How far the block is."""
        self.progress = progress

    def _who(self, slot: Slot) -> str:
        if self.data is None or slot.candidate_id == self.data.baseline.id:
            return "baseline"
        known = self.data.candidates.get(slot.candidate_id)
        return described(known) if known else slot.candidate_id

    def render(self) -> Group:
        """The display as it now is."""
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold")
        table.add_column()
        table.add_row("now", self.phase)
        if self.progress is not None:
            table.add_row("block", self._block())
        if self.data is not None and self.found is not None:
            self._figures(table, self.data, self.found)
        return Group(Text(), table)

    def _block(self) -> Table:
        progress = self.progress
        bar = ProgressBar(
            total=max(progress.total_s, 0.1), completed=min(progress.elapsed_s, progress.total_s), width=30
        )
        row = Table.grid(padding=(0, 1))
        rate = f"{progress.chunks_per_s:.0f} chunks/s" if progress.chunks_per_s else ""
        row.add_row(progress.phase, bar, f"{progress.requests} requests", rate)
        return row

    def _figures(self, table: Table, data: StudyData, found: Summary) -> None:
        best = found.incumbent
        if best is not None:
            said = f"{described(best.candidate)}: {change(best.value)} in the search, unconfirmed"
            table.add_row("incumbent", said)
        used = f"{found.launches_used} of {data.budget.launches} launches, {len(data.measured)} candidates"
        failed = f", {sum(found.failures.values())} failed" if found.failures else ""
        table.add_row("done", used + failed)
        left = f", {remaining(found.left_s, virtual=virtual(data.space))}" if found.left_s else ""
        table.add_row("time", f"{duration(time.monotonic() - self.began)} since this run began{left}")


def watching(*, quiet: bool, json_log: bool) -> tuple[Observer, AbstractContextManager[object]]:
    """The observer that fits the output, and the context in which it works."""
    if quiet:
        return Silent(), nullcontext()
    if json_log:
        return JsonLines(), nullcontext()
    console = Console()
    if not console.is_terminal or not sys.stdout.isatty():
        return PlainLines(), nullcontext()
    display = LiveDisplay(console)
    return display, display.live
