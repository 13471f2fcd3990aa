"""Adam whose state has Transformer Engine's shape, on torch's fused kernel (CPU and CUDA).

megatron-core's distributed optimizer expects the Adam of Transformer Engine and apex. That keeps
two moments per parameter, and the step count in the parameter group. torch's own Adam keeps a step
tensor per parameter, and megatron-core cannot load its checkpoints. Adam: arXiv 1412.6980;
decoupled weight decay: arXiv 1711.05101.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch


class FusedAdam(torch.optim.Optimizer):
    """Adam or AdamW with state `{exp_avg, exp_avg_sq}` per parameter and an integer `step` per
    group.

    Args:
        betas: decay of the first and the second moment per step.
        eps: added to the root of the second moment.
        weight_decay: decay per unit of learning rate (AdamW), or L2 term (Adam).
        adam_w_mode: True for AdamW, False for Adam with an L2 term.
        bias_correction: must be True; the fused kernel always corrects.
        capturable: must be False: no graph of CUDA can take this update in.

    Raises:
        ValueError: for `bias_correction=False`, `capturable=True`, or an option that this class
            does not know.
    """

    # torch wraps these to tell its compiler to leave them alone, and loads it to tell it so.
    add_param_group, state_dict, zero_grad = (
        inspect.unwrap(getattr(torch.optim.Optimizer, name))
        for name in ("add_param_group", "state_dict", "zero_grad")
    )

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        bias_correction: bool = True,
        capturable: bool = False,
        **unknown: Any,
    ) -> None:
        if unknown:
            raise ValueError(f"FusedAdam does not know the options {sorted(unknown)}")
        if not bias_correction:
            raise ValueError("FusedAdam always corrects the bias of its moments")
        if capturable:
            raise ValueError("FusedAdam does not run within a graph of CUDA")
        self.adam_w_mode = adam_w_mode
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
        }
        super().__init__(params, defaults)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the state of this class, of Transformer Engine's and apex' Adam, or of torch's,
        which counts its steps for each parameter."""
        inspect.unwrap(torch.optim.Optimizer.load_state_dict)(self, state_dict)
        for group in self.param_groups:
            states = [self.state[p] for p in group["params"] if p in self.state]
            counts = [int(state.pop("step")) for state in states if "step" in state]
            if counts:
                group.setdefault("step", max(counts))

    def _moments(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        state = self.state[param]
        if not state:
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        return state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update of every parameter that has a gradient.

        The step count rises in every group, also in one that is empty on this rank, so that all
        ranks agree on it.

        Args:
            closure: must be None; the gradients are computed by the schedule.
        """
        assert closure is None
        kernel = torch._fused_adamw_ if self.adam_w_mode else torch._fused_adam_
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [p for p in group["params"] if p.grad is not None and p.numel()]
            for device in {p.device for p in params}:
                here = [p for p in params if p.device == device]
                moments = [self._moments(p) for p in here]
                # The kernel wants one step tensor per parameter, on its device; it reads and never
                # keeps it.
                step = torch.full((), float(group["step"]), dtype=torch.float32, device=device)
                kernel(
                    here,
                    [p.grad for p in here],
                    [m["exp_avg"] for m in moments],
                    [m["exp_avg_sq"] for m in moments],
                    [],
                    [step] * len(here),
                    lr=group["lr"],
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    amsgrad=False,
                    maximize=False,
                    grad_scale=None,
                    found_inf=None,
                )
