"""How long one block warms up and is measured."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tuner.errors import UsageError


@dataclass(frozen=True)
class WindowPlan:
    """The times of one block, in seconds.

    Args:
        ramp_s: the streams start spread over this; their first requests also get spread lengths, so that they do not
            march in step afterwards.
        warmup_s: the least time before the window. It also waits until every stream has finished a request and the
            chunk rate has stopped growing (by more than `steady_growth` between two spans of `steady_span_s`).
        warmup_cap_s: the most time before the window. A warm-up that is not done by then makes the block invalid.
        window_s: the least length of the window.
        window_requests: the window also lasts this many mean request durations,
        window_cap_s: but no longer than this.
        tail_s: load is kept on past the window until every stream has been heard of once more, at most this long.
        stall_s: no token from any stream for this long ends the block as `hung_decode`.
    """

    ramp_s: float = 1.0
    warmup_s: float = 4.0
    warmup_cap_s: float = 30.0
    steady_growth: float = 1.25
    steady_span_s: float = 2.0
    window_s: float = 8.0
    window_requests: float = 2.0
    window_cap_s: float = 20.0
    tail_s: float = 3.0
    stall_s: float = 30.0

    def window_for(self, mean_request_s: float | None) -> float:
        """Length of the window when a request takes `mean_request_s` (None: not known)."""
        wanted = self.window_requests * mean_request_s if mean_request_s else 0.0
        return min(max(self.window_s, wanted), self.window_cap_s)

    def shortened(self, share: float) -> WindowPlan:
        """The same with this share of the window, and the whole warm-up."""
        return replace(
            self,
            window_s=self.window_s * share,
            window_requests=self.window_requests * share,
            window_cap_s=self.window_cap_s * share,
        )

    def estimate_s(self) -> float:
        """What a block usually takes, for the time left that is shown to the user."""
        return max(self.ramp_s, self.warmup_s) + self.window_s + 1.0


PROFILES: dict[str, WindowPlan] = {
    "short": WindowPlan(),
    "full": replace(
        WindowPlan(),
        ramp_s=2.0,
        warmup_s=10.0,
        warmup_cap_s=120.0,
        window_s=30.0,
        window_requests=5.0,
        window_cap_s=90.0,
        tail_s=5.0,
    ),
}


def window_plan(profile: str) -> WindowPlan:
    """The plan of a profile, `short` or `full`; any other name is a `UsageError`."""
    try:
        return PROFILES[profile]
    except KeyError:
        raise UsageError(f"profile '{profile}' is unknown; valid: {', '.join(PROFILES)}") from None
