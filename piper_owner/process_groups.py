"""The process groups that a user gives, as fabrics of our own."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.device_mesh import DeviceMesh

from piper_owner.data_parallel import SideGroup
from piper_owner.errors import ConfigError
from piper_owner.transport import Fabric, GlooFabric, MemoryNetwork

__all__ = ["fabric_of", "side_group"]

_ALONE: Final = timedelta(minutes=5)


def side_group(
    group: dist.ProcessGroup | DeviceMesh | None,
    dp_group: dist.ProcessGroup | DeviceMesh,
    timeout: timedelta | None,
) -> SideGroup:
    """A fabric over the ranks of `dp_group`, which meets the pipeline `group` in this rank alone."""
    fabric = fabric_of(dp_group, timeout, what="dp_group=")
    pipeline, side = (
        dist.get_process_group_ranks(each.get_group() if isinstance(each, DeviceMesh) else each)
        for each in (group, dp_group)
    )
    common = sorted(set(pipeline) & set(side))
    if len(common) > 1:
        raise ConfigError(
            f"the ranks {common} are in group= (ranks {pipeline}) and in dp_group= (ranks {side}) of rank "
            f"{dist.get_rank()}; dp_group has the ranks that hold the same stages in *other* pipelines"
        )
    return SideGroup(fabric=fabric, ranks=tuple(side))


def fabric_of(
    group: dist.ProcessGroup | DeviceMesh | None, timeout: timedelta | None, *, what: str = "group="
) -> Fabric:
    """A fabric over the ranks of `group`, on a prefix of the default store of its own."""
    if not (dist.is_available() and dist.is_initialized()):
        if group is not None:
            raise ConfigError(f"{what} was given, but torch.distributed is not initialised")
        return MemoryNetwork(1, timeout=timeout or _ALONE).fabric(0)
    if isinstance(group, DeviceMesh) and group.ndim != 1:
        raise ConfigError(
            f"{what} is a DeviceMesh with the dimensions {group.mesh_dim_names or group.ndim}; give one "
            'alone, such as mesh["pp"]'
        )
    chosen: Any = group.get_group() if isinstance(group, DeviceMesh) else group or dist.group.WORLD
    member = isinstance(chosen, dist.ProcessGroup)
    ranks = dist.get_process_group_ranks(chosen) if member else []
    if dist.get_rank() not in ranks:
        raise ConfigError(
            f"rank {dist.get_rank()} is not in the {what} it was given (ranks {ranks}); give every rank the "
            "group of its own pipeline, and the data parallel group of its own stage"
        )
    rank = ranks.index(dist.get_rank())
    wait = timeout or chosen._get_backend(chosen._device_types[0]).options._timeout
    store = PrefixStore(
        f"piper_owner/{chosen.group_name}/{'-'.join(map(str, ranks))}",
        dist.distributed_c10d._get_default_store(),
    )
    # Every call gets a prefix of its own: a rank's n-th call meets the others' n-th.
    call = store.add(f"calls/{rank}", 1)
    return GlooFabric(PrefixStore(str(call), store), rank, len(ranks), timeout=wait)
