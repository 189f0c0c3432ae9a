"""The norm of gradients some of which are shards."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from piper_owner.errors import ConfigError
from piper_owner.sharding import local_of, reduce_over, shard_groups

__all__ = ["add_powers", "checked_norm", "power_over_shards", "scale_to"]


def add_powers(*powers: float, largest: bool) -> float:
    """The power of the norm of several parts; `largest` is for the inf norm."""
    if largest:
        return math.nan if any(map(math.isnan, powers)) else max(powers, default=0.0)
    return sum(powers)


def checked_norm(max_norm: object, norm_type: object) -> tuple[float, float]:
    """Both as numbers. Raises ConfigError unless `max_norm` is at least 0 and `norm_type` more than 0."""
    numbers = []
    for option, value in (("max_norm", max_norm), ("norm_type", norm_type)):
        try:
            numbers.append(float(value))  # type: ignore[arg-type]
        except (TypeError, ValueError):
            raise ConfigError(f"clip_grad_norm_: {option}={value!r} is no number") from None
    limit, kind = numbers
    if not limit >= 0.0:
        raise ConfigError(f"clip_grad_norm_: max_norm={max_norm!r}; a norm is at least 0 (inf: no limit)")
    if not kind > 0.0:
        raise ConfigError(f"clip_grad_norm_: norm_type={norm_type!r}; give 2, another number above 0, or inf")
    return limit, kind


def scale_to(grads: Iterable[Tensor], power: float, max_norm: float, norm_type: float) -> Tensor:
    """Scale `grads`, in place, as far as the norm that `power` stands for is over `max_norm`. Local.

    Returns the norm, a float64 scalar on the CPU.
    """
    total = torch.tensor(power, dtype=torch.float64, device="cpu")
    total = total if norm_type == math.inf else total ** (1.0 / norm_type)
    # The small constant is that of torch.nn.utils.clip_grad_norm_.
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    there: dict[tuple[torch.device, torch.dtype], Tensor] = {}  # one copy to each device, not one a gradient
    for local in map(local_of, grads):
        key = (local.device, local.dtype)
        if key not in there:
            there[key] = scale.to(*key, non_blocking=True)
        local.mul_(there[key])
    return total


def power_over_shards(
    parameters: Iterable[Tensor],
    grads: Iterable[Tensor],
    norm_type: float,
    step: int,
    *,
    counted: Sequence[dist.ProcessGroup] = (),
) -> float:
    """The norm of `grads` to the power of `norm_type`, or the inf norm itself.

    Gradients that are sharded count with all of their shards, over the groups of the DTensors among
    `parameters`, which are the same on all ranks of a group. Groups over the same ranks as one of
    `counted` are left out: the caller adds over them. Collective over the groups that are not; their
    ranks are in the same `step`, see `reduce_over`.
    """
    is_inf = norm_type == math.inf
    skipped = {frozenset(dist.get_process_group_ranks(group)) for group in counted}
    parts: dict[tuple[str, ...], tuple[list[dist.ProcessGroup], list[Tensor]]] = {}
    for grads_too, tensors in ((False, parameters), (True, grads)):
        for tensor in tensors:
            groups = shard_groups([tensor])
            part = parts.setdefault(tuple(group.group_name for group in groups), (groups, []))
            if grads_too:
                part[1].append(local_of(tensor))
    powers = []
    for groups, locals_ in parts.values():
        open_groups = [
            group for group in groups if frozenset(dist.get_process_group_ranks(group)) not in skipped
        ]
        powers.append(reduce_over(open_groups, _power(locals_, norm_type), step, largest=is_inf))
    return add_powers(*powers, largest=is_inf)


def _power(grads: Iterable[Tensor], norm_type: float) -> float:
    parts = [grad for grad in grads if grad.numel()]  # an empty one has no inf norm
    if not parts:
        return 0.0
    wide = torch.promote_types(torch.float32, max((g.dtype for g in parts), key=lambda d: d.itemsize))
    norms = [torch.linalg.vector_norm(g, norm_type, dtype=wide).to(parts[0].device) for g in parts]
    power = float(torch.linalg.vector_norm(torch.stack(norms).double(), norm_type))
    return power if norm_type == math.inf else power**norm_type
