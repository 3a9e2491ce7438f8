"""The optimiser of the head: orthogonalised momentum for its matrices, Adam for the rest.

Muon (Jordan et al., 2024) with the step size of Liu et al. (2025, "Muon is scalable"), by which Adam's learning rates
serve both. In float32: torch's own goes through bfloat16, which takes several times as long without instructions for
it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

_COEFFICIENTS = 3.4445, -4.775, 2.0315  # of the quintic iteration, which has the steepest rise at zero
_ITERATIONS = 5


def orthogonalised(matrix: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """[m, n] with its singular values brought near one (0.7 to 1.2), its singular vectors kept; zeros stay zeros.

    `dtype` is that of the products; the result has the matrix's own.
    """
    a, b, c = _COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.t() if tall else matrix
    x = (x / x.norm().clamp_min(1e-7)).to(dtype)
    for _ in range(_ITERATIONS):
        gram = x @ x.t()
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.t() if tall else x).to(matrix.dtype)


class Muon(torch.optim.Optimizer):
    """For matrices alone. The root mean square of a step's elements is 0.2 `lr`, about what Adam's is."""

    def __init__(self, matrices: Iterable[Tensor], momentum: float = 0.95, dtype: torch.dtype = torch.float32) -> None:
        self._dtype = dtype
        super().__init__(matrices, {"lr": 0.0, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step, with Nesterov's momentum."""
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(matrix)
                momentum = state["momentum_buffer"].lerp_(matrix.grad, 1 - group["momentum"])
                direction = orthogonalised(matrix.grad.lerp(momentum, group["momentum"]), self._dtype)
                matrix.add_(direction, alpha=-group["lr"] * 0.2 * max(matrix.shape) ** 0.5)


class HeadOptimiser:
    """All weights of a head, float32: Muon for the layer's matrices, Adam for its norms and its output layer."""

    def __init__(self, weights: Mapping[str, Tensor], head_rate: float, dtype: torch.dtype = torch.float32) -> None:
        """`head_rate`: the output layer's learning rate, as a share of the others'; `dtype`: of Muon's products."""
        for weight in weights.values():
            weight.requires_grad_(True)
        self._weights = list(weights.values())
        vectors = [w for w in self._weights if w.dim() == 1]
        groups = [{"params": vectors, "share": 1.0}, {"params": [weights["lm_head"]], "share": head_rate}]
        self._muon = Muon([w for name, w in weights.items() if w.dim() == 2 and name != "lm_head"], dtype=dtype)
        self._adam = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for weight in self._weights:
            weight.grad = None

    def step(self, rate: float) -> None:
        """At this learning rate, gradients clipped to a norm of one."""
        torch.nn.utils.clip_grad_norm_(self._weights, 1.0)
        for optimiser in (self._muon, self._adam):
            for group in optimiser.param_groups:
                group["lr"] = rate * group.get("share", 1.0)
            optimiser.step()

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` takes."""
        return {"muon": self._muon.state_dict(), "adam": self._adam.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._muon.load_state_dict(state["muon"])
        self._adam.load_state_dict(state["adam"])
