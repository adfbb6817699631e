"""Muon for the matrices of the layers, AdamW for the embedding and the norms.

Matrices of one shape are updated as one batch, so a step launches a handful of
kernels whatever the number of layers.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5


def orthogonalise(matrices: Tensor) -> Tensor:
    """Nearest semi-orthogonal matrices of a (batch, rows <= columns) stack."""
    a, b, c = NEWTON_SCHULZ
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.float()


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised, with decoupled weight decay."""

    def __init__(
        self, params: list[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.1
    ) -> None:
        shapes: dict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
        for param in params:
            shapes[tuple(sorted(param.shape))].append(param)
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__([{"params": group} for group in shapes.values()], defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every shape group at once."""
        for group in self.param_groups:
            params = group["params"]
            # Invariant: every stacked matrix has rows <= columns.
            tall = [param.shape[0] > param.shape[1] for param in params]
            grads = torch.stack([p.grad.T if t else p.grad for p, t in zip(params, tall, strict=True)])
            state = self.state[params[0]]
            if not state:
                state["momentum"] = torch.zeros_like(grads)
            state["momentum"].lerp_(grads, 1 - group["momentum"])
            update = orthogonalise(grads.lerp(state["momentum"], group["momentum"]))
            update = update * (0.2 * max(params[0].shape) ** 0.5 * group["lr"])
            deltas = [u.T if t else u for u, t in zip(update.unbind(), tall, strict=True)]
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_sub_(params, deltas)


def optimizers(model: nn.Module, lr: float, kind: str, captured: bool = False) -> list[torch.optim.Optimizer]:
    """The optimizers of a model: Muon with AdamW, or AdamW alone.

    captured: on a GPU, their steps are captured in a CUDA graph.
    """
    inner = ("layers", "midlayer", "fc")  # of the model, or of a head
    inside = {name: bool(set(name.split(".")) & set(inner)) for name, _ in model.named_parameters()}
    matrices = [p for name, p in model.named_parameters() if inside[name] and p.ndim == 2]
    others = [p for name, p in model.named_parameters() if not inside[name] or p.ndim < 2]
    fused = next(model.parameters()).is_cuda
    adam = {"lr": lr, "betas": (0.9, 0.95), "fused": fused, "capturable": fused and captured}
    if kind == "muon":
        return [Muon(matrices, lr), torch.optim.AdamW(others, weight_decay=0.0, **adam)]
    return [torch.optim.AdamW(matrices, weight_decay=0.1, **adam), torch.optim.AdamW(others, weight_decay=0.0, **adam)]
