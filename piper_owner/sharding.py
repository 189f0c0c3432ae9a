"""Parameters that `fully_shard` has sharded over data parallel ranks: DTensors, and this rank's part of them.

A tie of the dense layout works shard against equal shard: every holder has the parameter sharded
in the same way, and each pipeline exchanges the part that its own ranks hold. Anything else is
refused here, by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from piper_owner.errors import TieError
from piper_owner.ownership import OwnershipPlan, Tie
from piper_owner.stages import NameMap, named_places
from piper_owner.steps import check_steps

__all__ = [
    "check_shards",
    "describe_shards",
    "is_nonzero",
    "is_sharded",
    "like",
    "local_of",
    "mesh_groups",
    "reduce_over",
    "refuse_late_sharding",
    "reshard",
    "shard_groups",
]


def is_sharded(tensor: Tensor) -> bool:
    """Whether `tensor` is a DTensor, as `fully_shard` makes of parameters."""
    return isinstance(tensor, DTensor)


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part of `tensor`, detached and over the same memory; all of it if it is no DTensor."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_nonzero(tensor: Tensor) -> bool:
    """Whether this rank's part of `tensor`, maybe a sparse one, has an element that is not 0. Local."""
    local = local_of(tensor)
    return bool((local.coalesce().values() if local.is_sparse else local).count_nonzero())


def like(parameter: Tensor, local: Tensor) -> Tensor:
    """`local` as a DTensor laid out like `parameter`, whose local part it has the shape of.

    `local` itself if `parameter` is no DTensor, or it is one already. Local; does not copy.
    """
    if not isinstance(parameter, DTensor) or isinstance(local, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def reshard(modules: Iterable[nn.Module]) -> None:
    """Let go of what a forward without a backward has gathered, so that parameters are shards. Local."""
    for module in modules:
        for each in module.modules():
            if isinstance(each, FSDPModule):
                each.reshard()


# -- what may be tied


def describe_shards(
    stages: Mapping[int, nn.Module], ties: Iterable[Tie], *, names: NameMap | None = None
) -> dict[str, dict[str, Any]]:
    """How the tied parameters of `stages` are sharded, by name, JSON-ready; none for a whole one. Local."""
    wanted = {name for tie in ties for name in tie.names}
    found: dict[str, dict[str, Any]] = {}
    for stage in stages.values():
        for name, holder, leaf in named_places(stage, names):
            parameter = holder._parameters[leaf]
            if name in wanted and isinstance(parameter, DTensor):
                mesh = parameter.device_mesh
                local = local_of(parameter)
                found[name] = {
                    "mesh": list(mesh.shape),
                    "placements": [str(placement) for placement in parameter.placements],
                    "coordinate": list(mesh.get_coordinate() or ()),
                    "local shape": list(local.shape),
                    "wrong": _why_unsupported(parameter, local),
                }
    return found


def _why_unsupported(parameter: DTensor, local: Tensor) -> str:
    sharded = [placement for placement in parameter.placements if not placement.is_replicate()]
    if len(sharded) != 1 or not sharded[0].is_shard(0) or type(sharded[0]).__name__ != "Shard":
        return (
            f"its placements are {_show(map(str, parameter.placements))}; fully_shard over data parallel "
            "ranks, which gives Shard(0), is supported, and other placements (shard_placement_fn, tensor "
            "parallelism) are not"
        )
    if local.device.type not in (parameter.device_mesh.device_type, "meta"):
        return (
            f"its shards are on {local.device.type} and its mesh on {parameter.device_mesh.device_type}: "
            "leave CPUOffloadPolicy out for the module that holds it"
        )
    return ""


def _show(parts: Iterable[object]) -> str:
    return f"({', '.join(map(str, parts))})"


def check_shards(plan: OwnershipPlan, shards: Mapping[int, Mapping[str, Mapping[str, Any]]]) -> None:
    """Raise TieError unless every tie is whole on all holders, or sharded alike on all.

    `shards` is what `describe_shards` gave on each rank of the plan; so every rank raises alike.
    """
    for tie in plan.ties:
        held = [
            (holder.rank, name, shards[holder.rank].get(name))
            for holder in tie.holders
            for name in holder.names
        ]
        for rank, name, shard in held:
            if shard is not None and shard["wrong"]:
                raise TieError(
                    f"tie {tie.tie.names}: {name!r} on rank {rank} is a DTensor that cannot be tied: "
                    f"{shard['wrong']}"
                )
        (first_rank, first_name, first), *others = held
        for rank, name, shard in others:
            if (first is None) != (shard is None):
                whole, cut = (rank, first_rank) if shard is None else (first_rank, rank)
                raise TieError(
                    f"tie {tie.tie.names}: it is sharded by fully_shard on rank {cut} and whole on rank "
                    f"{whole}. Shard both stages over data parallel meshes of the same size, or leave the "
                    "tied module out of fully_shard (ignored_params=) on both"
                )
            if first is None or shard is None:
                continue
            for what in ("mesh", "placements", "coordinate", "local shape"):
                if first[what] != shard[what]:
                    raise TieError(
                        f"tie {tie.tie.names}: the {what} of {first_name!r} is {_show(first[what])} on rank "
                        f"{first_rank}, and that of {name!r} is {_show(shard[what])} on rank {rank}. A tie "
                        "works shard against equal shard: shard both stages over meshes of the same shape, "
                        "and put ranks with the same place in them into one pipeline group"
                    )


def refuse_late_sharding(tie: Tie, parameter: nn.Parameter, places: Iterable[tuple[nn.Module, str]]) -> None:
    """Raise TieError if `fully_shard` has put a DTensor into one of `places` instead of `parameter`."""
    for module, leaf in places:
        if not is_sharded(parameter) and isinstance(module._parameters.get(leaf), DTensor):
            raise TieError(
                f"tie {tie.names}: fully_shard came after assign_owners and replaced the parameter by a "
                "DTensor; call assign_owners after fully_shard, on every rank"
            )


# -- sums over shards


def mesh_groups(tensor: Tensor) -> list[dist.ProcessGroup]:
    """The groups of all mesh dimensions of a DTensor that have more than one rank; else none. Local."""
    return _groups(tensor, lambda placement: True)


def shard_groups(tensors: Iterable[Tensor]) -> list[dist.ProcessGroup]:
    """The groups over which DTensors among `tensors` are sharded, each once, in order. Local.

    The parts that their ranks hold are different; along the other dimensions of a mesh they are equal.
    """
    found: dict[str, dist.ProcessGroup] = {}
    for tensor in tensors:
        for group in _groups(tensor, lambda placement: not placement.is_replicate()):
            found.setdefault(group.group_name, group)
    return list(found.values())


def _groups(tensor: Tensor, wanted: Callable[[Any], bool]) -> list[dist.ProcessGroup]:
    if not isinstance(tensor, DTensor):
        return []
    mesh = tensor.device_mesh
    return [
        mesh.get_group(dim)
        for dim, placement in enumerate(tensor.placements)
        if wanted(placement) and mesh.size(dim) > 1
    ]


def reduce_over(groups: Iterable[dist.ProcessGroup], value: float, step: int, *, largest: bool) -> float:
    """The sum, or the largest, of `value` over all ranks of `groups`, added in ascending rank.

    Collective over each group in turn. Raises MessageMismatchError on every rank of a group unless
    all of them are in the same `step`.
    """
    for group in groups:
        ranks = dist.get_process_group_ranks(group)
        devices = group._device_types
        cpu = torch.device("cpu")
        everyone = torch.zeros(2, len(ranks), dtype=torch.float64, device="cpu")
        everyone[:, ranks.index(dist.get_rank())] = torch.tensor([value, step], dtype=torch.float64)
        everyone = everyone.to(cpu if cpu in devices else devices[0])
        dist.all_reduce(everyone, group=group)
        values, steps = everyone.tolist()
        check_steps(steps, ranks)
        # Where one is NaN, a sum is, too.
        value = max(values) if largest and not any(map(math.isnan, values)) else sum(values)
    return value
