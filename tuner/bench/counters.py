"""The server's own counters, read from its Prometheus page around a window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True)
class Dialect:
    """How one engine names its counters.

    `generated` is None where the engine counts tokens only when a request ends (SGLang, llama-server), which says
    nothing about a window. Accept length is 1 + accepted / steps, or emitted / steps where `emitted` is counted
    instead. `exactly` is labelled with the number of drafts that a step accepted, `at_least` with the position of an
    accepted draft, from 0. `drafted` counts draft tokens, `rounds` forwards of the whole batch; `seconds` names where
    the model process spends its time: what → counter of seconds.
    """

    engine: str
    generated: str | None
    steps: str
    accepted: str | None = None
    drafted: str | None = None
    emitted: str | None = None
    exactly: tuple[str, str] | None = None
    at_least: tuple[str, str] | None = None
    rounds: str | None = None
    seconds: Mapping[str, str] = field(default_factory=dict)

    @property
    def totals(self) -> tuple[str, ...]:
        """Names of the counters that are summed over their labels."""
        counts = (self.generated, self.steps, self.accepted, self.drafted, self.emitted, self.rounds)
        return (*(name for name in counts if name), *self.seconds.values())


DIALECTS = (
    Dialect(
        "engine",
        generated="engine_generated_tokens_total",
        steps="engine_spec_verify_steps_total",
        accepted="engine_spec_accepted_tokens_total",
        drafted="engine_spec_drafted_tokens_total",
        exactly=("engine_spec_rounds_by_accepted_total", "accepted"),
        rounds="engine_rounds_total",
        seconds={part: f"engine_{part}_seconds_total" for part in ("draft", "forward", "extend", "other")},
    ),
    Dialect(
        "vllm",
        generated="vllm:generation_tokens_total",
        steps="vllm:spec_decode_num_drafts_total",
        accepted="vllm:spec_decode_num_accepted_tokens_total",
        drafted="vllm:spec_decode_num_draft_tokens_total",
        at_least=("vllm:spec_decode_num_accepted_tokens_per_pos_total", "position"),
    ),
    Dialect(
        "sglang",
        generated=None,
        steps="sglang:spec_verify_calls_total",
        emitted="sglang:generation_tokens_total",
    ),
    Dialect(
        "llama_server",
        generated=None,
        steps="llamacpp:spec_decode_num_drafts_total",
        accepted="llamacpp:spec_decode_num_accepted_tokens_total",
        drafted="llamacpp:spec_decode_num_draft_tokens_total",
        at_least=("llamacpp:spec_decode_num_accepted_tokens_per_pos_total", "position"),
    ),
)


_FAMILIES = {
    name.removesuffix("_total")
    for d in DIALECTS
    for name in (*d.totals, *(entry[0] for entry in (d.exactly, d.at_least) if entry))
}
_WANTED = tuple(f"{before}{name}".encode() for name in sorted(_FAMILIES) for before in ("", "# TYPE "))
"""How the lines of a page begin that are of use."""

_MOST = 1e18
"""Of a counter; neither an infinity nor what is no number lies below it."""


@dataclass(frozen=True)
class Snapshot:
    """Counter values by name, summed over their labels (ranks, models), read between two instants.

    A counter per depth has one value per label, under `name/label`.
    """

    asked_ns: int
    answered_ns: int
    values: Mapping[str, float]

    @property
    def at_ns(self) -> int:
        """The middle of the reading."""
        return (self.asked_ns + self.answered_ns) // 2


def parse_snapshot(page: bytes, asked_ns: int, answered_ns: int) -> Snapshot | None:
    """The counters this project knows on a Prometheus page; None when there is none, or it is no such page."""
    totals = {name for d in DIALECTS for name in d.totals}
    labelled = dict(entry for d in DIALECTS for entry in (d.exactly, d.at_least) if entry)
    values: dict[str, float] = {}
    # Read while the load runs: a page of megabytes would hold up the loop, and be called the machine's fault.
    kept = b"\n".join(line for line in page.split(b"\n") if line.startswith(_WANTED))
    try:
        for family in text_string_to_metric_families(kept.decode("utf-8", "replace") + "\n"):
            for sample in family.samples:
                key = sample.name
                if key in labelled:
                    key = f"{key}/{sample.labels.get(labelled[key], '')}"
                elif key not in totals:
                    continue
                values[key] = values.get(key, 0.0) + float(sample.value)
    except (ValueError, LookupError, TypeError, AttributeError):  # the parser expects a page of its own making
        return None
    if not all(0 <= value <= _MOST for value in values.values()):
        return None
    return Snapshot(asked_ns, answered_ns, values) if values else None


@dataclass(frozen=True)
class CounterDelta:
    """What the server counted between two snapshots. None: it does not count that.

    `accepted_at_depth[d - 1]` is how many verify steps accepted at least d drafts; empty where that is not told, as are
    the `seconds` by what they were spent on.
    """

    start_ns: int
    end_ns: int
    uncertain_s: float
    generated: float | None
    steps: float | None
    accepted: float | None
    emitted: float | None
    drafted: float | None = None
    accepted_at_depth: tuple[float, ...] = ()
    rounds: float | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def accept_length(self) -> float | None:
        """Tokens per verify step and request (drafts + 1); None when nothing was drafted or it is not told."""
        if not self.steps:
            return None
        if self.accepted is not None:
            return 1.0 + self.accepted / self.steps
        return None if self.emitted is None else self.emitted / self.steps


def delta(before: Snapshot | None, after: Snapshot | None) -> CounterDelta | None:
    """The difference of two snapshots; None when one is missing or a counter went back (the server restarted)."""
    if before is None or after is None:
        return None
    changes = {name: value - before.values.get(name, 0.0) for name, value in after.values.items()}
    if any(change < 0 for change in changes.values()):
        return None
    dialect = next((d for d in DIALECTS if d.steps in changes or (d.generated and d.generated in changes)), None)
    if dialect is None:
        return None
    uncertain_ns = (before.answered_ns - before.asked_ns) + (after.answered_ns - after.asked_ns)

    def change(name: str | None) -> float | None:
        return changes.get(name) if name else None

    return CounterDelta(
        start_ns=before.at_ns,
        end_ns=after.at_ns,
        uncertain_s=uncertain_ns / 2e9,
        generated=change(dialect.generated),
        steps=change(dialect.steps),
        accepted=change(dialect.accepted),
        emitted=change(dialect.emitted),
        drafted=change(dialect.drafted),
        accepted_at_depth=_by_depth(dialect, changes),
        rounds=change(dialect.rounds),
        seconds={part: changes[name] for part, name in dialect.seconds.items() if name in changes},
    )


def _by_depth(dialect: Dialect, changes: Mapping[str, float]) -> tuple[float, ...]:
    if dialect.at_least:
        return tuple(_labelled(changes, dialect.at_least[0]))
    if dialect.exactly:
        exactly = _labelled(changes, dialect.exactly[0])
        return tuple(sum(exactly[depth:]) for depth in range(1, len(exactly)))
    return ()


def _labelled(changes: Mapping[str, float], name: str) -> list[float]:
    """Values of `name/0`, `name/1`, … as far as they go."""
    values: list[float] = []
    while (key := f"{name}/{len(values)}") in changes:
        values.append(changes[key])
    return values
