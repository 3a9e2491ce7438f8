"""The plain data that flows through a study, one way.

    space → Candidate → LaunchRecord → (launch) → Block → Pair → Verdict → Recommendation → export

Everything here is immutable, JSON-friendly and free of behaviour: processes, sockets and the database live at the
edges, and every decision is a function of these records. Units stand in the names (`_s` seconds, `_ms` milliseconds).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal

from tuner.plain import plain
from tuner.secrets import redacted

SAID, SHOWN = 4000, 60_000
"""Characters of a message, and of evidence."""

Setting = str | int | float | bool
"""The value of one engine-neutral setting."""

Role = Literal["look", "screen", "edge", "confirm"]
"""What a block is for: a short first look at a candidate, its screening in the search, to find where a schedule should
change its depth, or the confirmation."""

SEARCH: tuple[Role, ...] = ("look", "screen")
"""The roles of what is measured in the search."""
"""Why a block was measured: to search, or on held-out prompts to confirm what the search found."""


def canonical_json(value: object) -> str:
    """One spelling per value: sorted keys, no spaces. Hashes and comparisons go by it."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def short_hash(value: object) -> str:
    """Twelve hex digits of SHA-256 over `canonical_json`."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Candidate:
    """One combination of settings, only the active ones, in neutral names. Equal settings have equal ids."""

    settings: Mapping[str, Setting]

    @cached_property
    def id(self) -> str:
        """`short_hash` of the settings."""
        return short_hash(dict(self.settings))


@dataclass(frozen=True)
class ContainerRef:
    """The container that a launch record's command makes.

    `runtime` is the program (docker or podman), also the command's first word; `image` names the image by digest.
    With the network `bridge` the port is published on this machine's loopback; with `host` the server listens there.
    """

    runtime: str
    image: str
    network: str


@dataclass(frozen=True)
class LaunchRecord:
    """All that is needed to start one server. Trials are launched from it and exports are renderings of it.

    `env` is the difference to the surrounding environment: a value sets, None removes, "" sets to empty.
    `expected` holds the settings that must be in effect, in neutral names; a candidate whose server reports
    otherwise is not scored. A POST to `flush_path` empties the server's prefix cache; None: it has none. `container` is
    set where the command runs one: its `env` is then that of the runtime's client, and the server's variables stand in
    the command. `log_rules` are the user's own, before the engine's. `trial_env` is set while it is measured, and never
    exported: it opens what the tuner reads. `also_read` is what is read back beside `info_path`: key → a path (begins
    with "/"), or a pattern of log lines. `files` (path → text) are written before the start. `cwd` is the folder to
    start in, where the command names files of it; "": any.
    """

    engine: str
    engine_version: str
    model: str
    argv: tuple[str, ...]
    env: Mapping[str, str | None]
    host: str
    port: int
    settings: Mapping[str, Setting]
    expected: Mapping[str, Setting]
    served_model: str
    ready_path: str = "/health"
    info_path: str | None = "/server_info"
    flush_path: str | None = None
    simulated: bool = False
    container: ContainerRef | None = None
    log_rules: tuple[Mapping[str, Any], ...] = ()
    trial_env: Mapping[str, str] = field(default_factory=dict)
    also_read: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    cwd: str = ""

    @property
    def base_url(self) -> str:
        """Where the server answers, without a trailing slash."""
        return f"http://{self.host}:{self.port}"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; `from_dict` reverses it. What is not used is left out, so that hashes of it last."""
        data = {**asdict(self), "argv": list(self.argv), "log_rules": [dict(rule) for rule in self.log_rules]}
        unused = ("container", "log_rules", "flush_path", "trial_env", "also_read", "files", "cwd")
        return {name: value for name, value in data.items() if value or name not in unused}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LaunchRecord:
        """The record that `to_dict` wrote."""
        container = ContainerRef(**data["container"]) if data.get("container") else None
        rules = tuple(data.get("log_rules", ()))
        return cls(**{**data, "argv": tuple(data["argv"]), "container": container, "log_rules": rules})


@dataclass(frozen=True)
class Failure:
    """Why a launch or a block has no result.

    `kind` is one of the failure classes (`startup_crash`, `oom_under_load`, …; docs/failures.md lists them).
    `phase` is one of start, ready, smoke, readback, bench, stop. `blame` says whom it is held against. `stage` is what
    a server that was not ready yet last said it was doing ("loading weights"), where its log rules know. What a server
    has written into message and evidence is made fit for a terminal, rid of secrets, and cut where it is too long.
    """

    kind: str
    phase: Literal["start", "ready", "smoke", "readback", "bench", "stop"]
    message: str
    evidence: str = ""
    exit_status: int | None = None
    blame: Literal["candidate", "environment"] = "candidate"
    retryable: bool = False
    stage: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", redacted(plain(self.message, SAID)))
        object.__setattr__(self, "evidence", redacted(plain(self.evidence.replace("\r\n", "\n"), SHOWN)))


@dataclass(frozen=True)
class Gate:
    """One validity check of a block: value, limit and whether it passed. A failed gate makes the block invalid."""

    name: str
    value: float
    limit: float
    ok: bool
    detail: str = ""

    def __post_init__(self) -> None:
        if len(self.detail) > SAID or not self.detail.isprintable():  # what a server has sent
            object.__setattr__(self, "detail", plain(self.detail, SAID))


@dataclass(frozen=True)
class Percentiles:
    """Of a latency, in milliseconds, over `n` requests. p99 is None under 100 requests."""

    n: int
    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None


@dataclass(frozen=True)
class Block:
    """One concurrency level measured once, inside one launch.

    `tokens` are output tokens that the server's cumulative usage counted inside the window of `window_s` seconds;
    ramp and drain are outside. `tokens_per_s` = tokens / window_s. `per_stream_tokens_per_s` = that / concurrency.
    `series` holds output tokens per second of the window. `accept_length` is tokens per verify step (drafts + 1),
    None where the server does not tell.
    """

    concurrency: int
    role: Role
    prompt_ids: tuple[str, ...]
    started_at: float
    warmup_s: float
    window_s: float
    tokens: float
    tokens_per_s: float
    per_stream_tokens_per_s: float
    requests: int
    failed_requests: int
    mean_output_tokens: float
    achieved_concurrency: float
    ttft_ms: Percentiles
    tpot_ms: Percentiles
    chunk_gap_ms: Percentiles
    e2e_ms: Percentiles
    accept_length: float | None
    gates: tuple[Gate, ...]
    series: tuple[float, ...] = ()
    counters: Mapping[str, float] = field(default_factory=dict)

    @property
    def valid(self) -> bool:
        """Whether every gate passed."""
        return all(gate.ok for gate in self.gates)

    @property
    def success_rate(self) -> float:
        """Share of requests that ended well."""
        total = self.requests + self.failed_requests
        return self.requests / total if total else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; `from_dict` reverses it."""
        return json.loads(json.dumps(asdict(self)))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Block:
        """The block that `to_dict` wrote."""
        percentiles = {k: Percentiles(**data[k]) for k in ("ttft_ms", "tpot_ms", "chunk_gap_ms", "e2e_ms")}
        gates = tuple(Gate(**gate) for gate in data["gates"])
        return cls(
            **{
                **data,
                **percentiles,
                "gates": gates,
                "prompt_ids": tuple(data["prompt_ids"]),
                "series": tuple(data["series"]),
            }
        )


@dataclass(frozen=True)
class StoredBlock:
    """A block as the study keeps it: whose it is, and which one.

    `repetition` numbers the blocks of one candidate at one level in one role, from 0; in confirmation it is the pair's
    index. `order` is the block's place among all blocks of the study, by time.
    """

    id: int
    candidate_id: str
    launch_id: int
    concurrency: int
    role: Role
    repetition: int
    order: int
    block: Block


@dataclass(frozen=True)
class Pair:
    """A baseline block and a candidate block of the same level, adjacent in time.

    `log_ratio` = ln(candidate tokens_per_s / baseline tokens_per_s).
    """

    candidate_id: str
    concurrency: int
    role: Role
    index: int
    baseline_block: int
    candidate_block: int
    log_ratio: float


@dataclass(frozen=True)
class Verdict:
    """What the pairs of one candidate say at one level (`concurrency`), or over all of them (None).

    `speedup`, `low` and `high` are ratios to the baseline; the interval is two-sided at `confidence` and absent
    (None) under four pairs. `detectable` is the smallest relative gain that this many pairs (under four: that four)
    could have shown.
    """

    candidate_id: str
    concurrency: int | None
    n: int
    speedup: float | None
    low: float | None
    high: float | None
    confidence: float
    outcome: Literal["better", "worse", "equivalent", "not separated"]
    detectable: float | None


@dataclass(frozen=True)
class Choice:
    """The answer at one level, or overall (`concurrency` None): a winner, or to keep the baseline.

    `finalist` is the best that was confirmed where it is not the winner.
    """

    concurrency: int | None
    winner: Candidate | None
    verdict: Verdict | None
    baseline_tokens_per_s: float | None
    winner_tokens_per_s: float | None
    why: str
    finalist: Candidate | None = None


@dataclass(frozen=True)
class Recommendation:
    """A study's end: one choice overall and one per concurrency, with what would make it firmer."""

    study: str
    overall: Choice
    per_concurrency: tuple[Choice, ...]
    profile: str
    simulated: bool
    advice: tuple[str, ...] = ()


def mark(simulated: bool) -> str:
    """What stands behind a headline whose figures come from a model of a machine; "" otherwise."""
    return " · SIMULATED, not measured" if simulated else ""
