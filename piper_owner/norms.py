"""The norm of gradients some of which are shards."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from piper_owner.sharding import local_of, reduce_over, shard_groups

__all__ = ["add_powers", "power_over_shards"]


def add_powers(*powers: float, largest: bool) -> float:
    """The power of the norm of several parts; `largest` is for the inf norm."""
    if largest:
        return math.nan if any(map(math.isnan, powers)) else max(powers, default=0.0)
    return sum(powers)


def power_over_shards(
    parameters: Iterable[Tensor],
    grads: Iterable[Tensor],
    norm_type: float,
    *,
    counted: Sequence[dist.ProcessGroup] = (),
) -> float:
    """The norm of `grads` to the power of `norm_type`, or the inf norm itself.

    Gradients that are sharded count with all of their shards, over the groups of the DTensors among
    `parameters`, which are the same on all ranks of a group. Groups over the same ranks as one of
    `counted` are left out: the caller adds over them. Collective over the groups that are not.
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
        powers.append(reduce_over(open_groups, _power(locals_, norm_type), largest=is_inf))
    return add_powers(*powers, largest=is_inf)


def _power(grads: Iterable[Tensor], norm_type: float) -> float:
    parts = [grad for grad in grads if grad.numel()]  # an empty one has no inf norm
    if not parts:
        return 0.0
    wide = torch.promote_types(torch.float32, max((g.dtype for g in parts), key=lambda d: d.itemsize))
    norms = [torch.linalg.vector_norm(g, norm_type, dtype=wide).to(parts[0].device) for g in parts]
    power = float(torch.linalg.vector_norm(torch.stack(norms).double(), norm_type))
    return power if norm_type == math.inf else power**norm_type
