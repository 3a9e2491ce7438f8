"""CUDA graphs by phase and size of batch: captured before anything is served, or the server says why not.

A capture that fails half-way leaves a server that looks well and crashes, or crawls, at its first decode. So capturing
has two steps: everything is captured into this object's hands first, and only a complete set is put to use. Ranks agree
after every single capture, since a rank that gives up alone leaves the others in a collective for ever.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from engine.errors import EngineError

log = logging.getLogger(__name__)

POLICIES = ("required", "preferred", "off")
PHASES = ("draft", "verify", "accept", "extend")


class Bucket(NamedTuple):
    """What one graph is captured for: so many requests, and whatever else its shapes depend on."""

    requests: int
    kind: Hashable = None


class Graph(Protocol):
    """A captured piece of work that fits its bucket."""

    def replay(self) -> None:
        """Run it on what its input buffers hold now."""
        ...


class Capturer(Protocol):
    """What a device can do; the only part that touches it."""

    def warm_up(self, phase: str, bucket: Bucket) -> None:
        """Run the shape eagerly, so that nothing is compiled or allocated for the first time during its capture."""
        ...

    def capture(self, phase: str, bucket: Bucket) -> Graph:
        """Capture it. May raise anything."""
        ...

    def discard(self) -> None:
        """Drop every graph, the memory that they share, and static buffers."""
        ...

    def free_bytes(self) -> int:
        """Memory of the device that nobody has."""
        ...


class GraphCaptureError(EngineError):
    """A graph could not be captured. What happened stands in the attributes, and the device's own error behind it."""

    def __init__(self, phase: str, bucket: Bucket, stage: str, free_before: int, free_now: int, cause: str) -> None:
        self.phase, self.bucket, self.stage = phase, bucket, stage
        self.free_before, self.free_now = free_before, free_now
        mib = 2**20
        kind = "" if bucket.kind is None else f" ({bucket.kind})"
        super().__init__(
            f"CUDA graph of {phase} for {bucket.requests} requests{kind}: {stage} failed: {cause} (device memory free: "
            f"{free_before // mib} MiB before, {free_now // mib} MiB then). Lower max_running_requests or kv_tokens, "
            "or serve without graphs: --cuda-graphs off (slower), --cuda-graphs preferred (falls back and says so)"
        )


@dataclass(frozen=True)
class PhaseState:
    """Of one phase, for `/server_info`: "active", "fell_back" or "off", and why."""

    state: str
    detail: str = ""


def buckets(most: int) -> tuple[int, ...]:
    """Batch sizes to capture, up to `most`: every small one, then ever coarser, `most` itself included.

    Under speculation a bucket's padding costs as many rows a request as there are draft tokens.
    """
    sizes = [*range(1, 9), *range(10, 33, 2), *range(36, 65, 4), *range(72, 257, 8), *range(272, 4097, 16)]
    return (*(size for size in sizes if size < most), most)


class GraphSet:
    """Graphs of all phases, or of none."""

    def __init__(
        self, policy: str, capturer: Capturer | None, agree: Callable[[str], Sequence[str]] = lambda problem: [problem]
    ) -> None:
        """`capturer` None: there is no device to capture on. `agree`: every rank's problem, "" where there is none."""
        if policy not in POLICIES:
            raise ValueError(f"policy '{policy}'; valid: {', '.join(POLICIES)}")
        self.policy = policy
        self._capturer, self._agree = capturer, agree
        self._graphs: dict[tuple[str, Bucket], Graph] = {}
        reason = "asked for" if policy == "off" else "nothing to capture on: the model is on the CPU"
        self.states = {phase: PhaseState("off", reason) for phase in PHASES}
        self.misses: Counter[str] = Counter()
        self.hits = 0

    @property
    def possible(self) -> bool:
        """Whether there is a device to capture on."""
        return self._capturer is not None

    def capture(self, wanted: Mapping[str, Sequence[Bucket]]) -> None:
        """Capture these buckets of these phases, large ones first, so that small ones fit into their memory.

        Raises:
            GraphCaptureError: under "required". Under "preferred" everything is dropped, and the server goes on
                eagerly, says so in its log, in `states`, and in `misses` at every round.
        """
        if self.policy == "off":
            return
        if self._capturer is None:
            if self.policy == "required":
                raise GraphCaptureError(PHASES[0], Bucket(0), "looking for a device", 0, 0, "the model is on the CPU")
            return
        if not wanted and self.policy == "required":
            problem = "no round with this drafter stays on the device"
            raise GraphCaptureError(PHASES[0], Bucket(0), "looking for what to capture", 0, 0, problem)
        made: dict[tuple[str, Bucket], Graph] = {}
        try:
            self._capture_all(self._capturer, wanted, made)
        except GraphCaptureError as error:
            made.clear()
            self._capturer.discard()
            if self.policy == "required":
                raise
            self.states = {phase: PhaseState("fell_back", str(error)) for phase in wanted}
            log.warning("decoding without CUDA graphs, which is slower: %s", error)
            return
        self._graphs = made
        for phase in PHASES:
            if phase in wanted:
                told = f"{len(wanted[phase])} graphs for up to {max(b.requests for b in wanted[phase])} requests"
                self.states[phase] = PhaseState("active", told)
            else:
                self.states[phase] = PhaseState("off", "there is nothing to run in it")

    def size(self, requests: int, kind: Hashable = None) -> int | None:
        """Of the smallest bucket of this kind that holds so many requests; None: there is none."""
        sizes = (b.requests for _, b in self._graphs if b.kind == kind and b.requests >= requests)
        return min(sizes, default=None)

    def find(self, phase: str, bucket: Bucket) -> Graph | None:
        """The graph of this phase and bucket; None: run it eagerly, which is counted where graphs are wanted."""
        graph = self._graphs.get((phase, bucket))
        if graph is not None:
            self.hits += 1
        elif self._capturer is not None and self.policy != "off":
            self.misses[phase] += 1
        return graph

    def paths(self) -> dict[str, dict[str, str]]:
        """Entries of `/server_info`'s paths."""
        return {f"graphs.{phase}": {"state": s.state, "detail": s.detail} for phase, s in self.states.items()}

    def close(self) -> None:
        """Let go of everything. May be called at any time, and again."""
        self._graphs = {}
        if self._capturer is not None:
            self._capturer.discard()

    def _capture_all(
        self, capturer: Capturer, wanted: Mapping[str, Sequence[Bucket]], made: dict[tuple[str, Bucket], Graph]
    ) -> None:
        before = capturer.free_bytes()
        for phase, sizes in wanted.items():
            for bucket in sorted(sizes, key=lambda one: -one.requests):
                stage, problem, cause = "warm-up", "", None
                try:
                    capturer.warm_up(phase, bucket)
                    stage = "capture"
                    made[phase, bucket] = capturer.capture(phase, bucket)
                except Exception as error:  # noqa: BLE001 - whatever it is, every rank must hear of it
                    problem, cause = f"{type(error).__name__}: {error}", error
                    # At once: another rank may be waiting for this one on its device, and never be told.
                    log.warning("CUDA graph of %s for %d requests: %s: %s", phase, bucket.requests, stage, problem)
                everywhere = self._agree(problem)
                failed = next((rank for rank, one in enumerate(everywhere) if one), None)
                if failed is not None:
                    told = problem or f"on rank {failed}: {everywhere[failed]}"
                    raise GraphCaptureError(phase, bucket, stage, before, capturer.free_bytes(), told) from cause
