"""How fast streams were by what was asked of them: by the prompt's kind and by its length. Pure functions of traces."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tuner.bench.trace import Trace

CONTEXTS = (0, 128, 512, 2048, 8192, 32768)
"""Where classes of prompt lengths begin, in tokens as the server counts them."""

MOST_KINDS = 20
"""Kinds that are told apart, the most frequent ones; a file may name each prompt's own."""

AXES = ("kind", "context")


@dataclass(frozen=True)
class Group:
    """The requests of one class on one axis: how many, milliseconds per output token, output tokens per chunk, and all
    output tokens (0 in blocks that were kept before those were counted)."""

    requests: float
    ms_per_token: float
    tokens_per_chunk: float
    tokens: float = 0.0


def by_axis(traces: Sequence[Trace], kinds: Mapping[str, str]) -> dict[str, float]:
    """Of requests that ended well, as counters of a block: `axis/class/figure`. `kinds` is prompt id → kind."""
    usual = {kind for kind, _ in Counter(kinds.get(trace.prompt_id, "") for trace in traces).most_common(MOST_KINDS)}
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0] * 4)
    for trace in traces:
        if trace.tokens is None or trace.tokens < 2 or trace.first_ns is None or trace.last_ns is None:
            continue
        if trace.last_ns == trace.first_ns:
            continue
        seen = ((trace.last_ns - trace.first_ns) / 1e6, trace.tokens - 1.0, float(len(trace.chunks)))
        kind = kinds.get(trace.prompt_id, "")
        classes = [("kind", kind)] * (kind in usual and kind != "")
        if trace.prompt_tokens is not None:
            classes.append(("context", str(max(at for at in CONTEXTS if at <= trace.prompt_tokens))))
        for key in classes:
            for i, value in enumerate((1.0, *seen)):
                sums[key][i] += value
    found: dict[str, float] = {}
    for (axis, name), (requests, ms, tokens, chunks) in sorted(sums.items()):
        found[f"{axis}/{name}/requests"] = requests
        found[f"{axis}/{name}/ms_per_token"] = ms / tokens
        found[f"{axis}/{name}/tokens_per_chunk"] = (tokens + requests) / chunks
        found[f"{axis}/{name}/tokens"] = tokens + requests
    return found


def groups(counters: Mapping[str, float]) -> Iterator[tuple[str, str, Group]]:
    """Axis, class and figures of what `by_axis` has put among a block's counters."""
    for key, requests in counters.items():
        axis, _, rest = key.partition("/")
        if axis in AXES and rest.endswith("/requests"):
            base = key.removesuffix("/requests")
            yield (
                axis,
                base.partition("/")[2],
                Group(
                    requests,
                    counters[f"{base}/ms_per_token"],
                    counters[f"{base}/tokens_per_chunk"],
                    counters.get(f"{base}/tokens", 0.0),
                ),
            )


def context_words(begin: str) -> str:
    """A class of prompt lengths in words."""
    at = CONTEXTS.index(int(begin))
    return f"{begin} tokens and more" if at + 1 == len(CONTEXTS) else f"{begin} to {CONTEXTS[at + 1] - 1} tokens"
