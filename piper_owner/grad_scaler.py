"""A GradScaler whose ranks agree: all of them step, or none."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from piper_owner.assignment import Ownership
from piper_owner.errors import ConfigError
from piper_owner.optimizer_wrap import OwnerOptimizer
from piper_owner.sharding import local_of, reduce_over

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for an OwnerOptimizer; the same arguments and methods.

    `unscale_` first brings the gradients of ties to their owners, then tells every rank whether any
    rank found an infinity or NaN, also in another shard of a DTensor. So all ranks skip together, and
    the scale is the same on each.
    `unscale_`, `step` and `update` are called on every rank, in the same order, also on a rank
    that computes no loss or has no gradients. With any other optimizer it is torch's own, and the
    ranks do not agree: give that one a scaler of its own.
    """

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of `optimizer` by the scale, and agree on infinities. Collective."""
        if isinstance(optimizer, OwnerOptimizer) and self._enabled:
            self._start(optimizer)
            optimizer.finalize_grads()
        super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:  # noqa: ANN401
        """Unscale unless that was done, then step, or skip the step on every rank. Collective."""
        if not isinstance(optimizer, OwnerOptimizer) or not self._enabled:
            return super().step(optimizer, *args, **kwargs)
        if "closure" in kwargs or args:
            raise RuntimeError("a closure cannot be used with an enabled GradScaler")
        self._start(optimizer)
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update()")
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        found: dict[torch.device, Tensor] = state["found_inf_per_device"]
        result = None
        if any(bool(each) for each in found.values()):
            optimizer.skip_step()
        else:
            result = optimizer.step()
        state["stage"] = OptState.STEPPED
        return result

    def _start(self, optimizer: OwnerOptimizer) -> None:
        """Make the scale on a rank that has scaled no loss."""
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(torch.device(self._device))

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        if not isinstance(optimizer, OwnerOptimizer):
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        found = found_inf.clone()
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for grad in map(local_of, optimizer.grads()):
            groups.setdefault((grad.device, grad.dtype), []).append(grad)
        for (device, _), grads in groups.items():
            here = torch.zeros((), dtype=torch.float32, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(grads, here, inv_scale.to(device))
            found += here.to(found.device)
        step = optimizer.ownership.step
        with optimizer.ownership.reporting(f"the agreement on infinities over shards of step {step}"):
            is_found = reduce_over(optimizer.shard_groups(), float(found), step, largest=True) > 0
        agreed = self._is_found_anywhere(optimizer.ownership, here=is_found)
        return {found_inf.device: torch.full_like(found_inf, float(agreed))}

    def _is_found_anywhere(self, ownership: Ownership, *, here: bool) -> bool:
        """Whether any rank found an infinity; else the scale, too, must be that of every rank."""
        scale = self.get_scale()
        with ownership.reporting(f"the agreement on infinities of step {ownership.step}"):
            largest = ownership.combine(math.inf if here else scale, largest=True)
            largest = ownership.combine_pipelines(largest, largest=True)
            if largest not in (math.inf, scale):
                raise ConfigError(
                    f"rank {ownership.rank} scales its losses by {scale:g} and another rank by {largest:g}, "
                    "so gradients of ties would not add up. Give the GradScaler of every rank the same "
                    "arguments, and an optimizer that is no OwnerOptimizer a scaler of its own, because its "
                    "infinities stay on one rank"
                )
        return largest == math.inf
