"""What `/metrics` shows: the frontend's counters, and the model process's counters as it reports them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

_NAME = re.compile(r"(?P<name>[a-zA-Z_]\w*)(?:\{(?P<labels>.*)\})?", re.ASCII)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5, 5)
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)


class Metrics:
    """The frontend's own counters. Their names begin with `engine_http_`, the model process's with `engine_`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "engine_http_requests", "Requests answered", ["route", "status"], registry=self.registry
        )
        self.running = Gauge("engine_http_running", "Sequences submitted and not ended", registry=self.registry)
        self.prompt_tokens = Counter("engine_http_prompt_tokens", "Prompt tokens submitted", registry=self.registry)
        self.generated_tokens = Counter(
            "engine_http_generated_tokens", "Output tokens received from the model process", registry=self.registry
        )
        self.ttft = Histogram(
            "engine_http_time_to_first_token_seconds",
            "From the request's arrival to its first output token",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.itl = Histogram(
            "engine_http_inter_token_seconds",
            "Between two updates of a sequence, by the number of tokens in the later one",
            buckets=_TOKEN_SECONDS,
            registry=self.registry,
        )
        self.e2e = Histogram(
            "engine_http_generation_seconds",
            "From the request's arrival to its last output token",
            buckets=_SECONDS,
            registry=self.registry,
        )

    def render(self, model_counters: Mapping[str, float] | None) -> bytes:
        """Prometheus text. `model_counters` None means that the model process did not answer."""
        counters = {"engine_model_answered": float(model_counters is not None), **(model_counters or {})}
        return generate_latest(self.registry) + generate_latest(_ModelCounters(counters))


class _ModelCounters(Collector):
    """Flat numbers as metrics, by Prometheus name, labels included: counters where the name ends in `_total`.

    Raises:
        ValueError: a name that Prometheus would not take.
    """

    def __init__(self, counters: Mapping[str, float]) -> None:
        self._counters = counters

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for key, value in self._counters.items():
            match = _NAME.fullmatch(key)
            if match is None:
                raise ValueError(f"the model process reported a counter with the invalid name '{key}'")
            name = match["name"]
            family = name.removesuffix("_total")
            kind = "counter" if family != name else "gauge"
            metric = families.setdefault(family, Metric(family, "Reported by the model process", kind))
            metric.add_sample(name, dict(_LABEL.findall(match["labels"] or "")), value)
        return families.values()
