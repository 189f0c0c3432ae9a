"""Makes the names of a tie on one rank one Parameter, whole or sharded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta

import torch

from piper_owner.errors import TieError
from piper_owner.fetching import check_row_places
from piper_owner.ownership import TiePlan
from piper_owner.process_groups import fabric_of
from piper_owner.sharding import mesh_groups
from piper_owner.stages import NameMap, named_places
from piper_owner.tied import TiedParameter
from piper_owner.ties import allocated, unite
from piper_owner.transport import Fabric
from piper_owner.transport.agreement import gather_texts

__all__ = ["tie_here"]


def tie_here(
    ties: Sequence[TiePlan],
    stages: Mapping[int, torch.nn.Module],
    fabric: Fabric,
    sources: Mapping[str, int],
    *,
    names: NameMap | None,
    has_group: bool,
) -> dict[str, TiedParameter]:
    """This rank's part in each of `ties`, by name; collective over the meshes that shard them.

    `sources`: by tie, the rank whose value is taken. `has_group`: owners average over pipelines.
    """
    found = [place for module in stages.values() for place in named_places(module, names)]
    places = {
        tie.name: [(module, leaf) for name, module, leaf in found if name in tie.tie.names] for tie in ties
    }
    for tie in ties:
        if tie.row_replicas:
            check_row_places(stages, tie, names, rank=fabric.rank, has_group=has_group)
        parameters = [module._parameters[leaf] for module, leaf in places[tie.name]]
        _agree_over_shards(tie, parameters, fabric.timeout)
    tied = {}
    for tie in ties:
        may_be_meta = sources[tie.name] != fabric.rank
        parameter = unite(stages, tie.tie, names=names, may_be_meta=may_be_meta)
        goes_without = fabric.rank in tie.row_replicas
        tied[tie.name] = TiedParameter(
            plan=tie,
            parameter=parameter if goes_without else allocated(stages, parameter),
            places=tuple(places[tie.name]),
            source=sources[tie.name],
            is_empty=parameter.is_meta,
        )
    return tied


def _agree_over_shards(tie: TiePlan, parameters: Iterable[torch.Tensor | None], timeout: timedelta) -> None:
    """Raise TieError, on every rank of a mesh that shards one of `parameters`, unless all pipelines have
    the same owner of `tie`. Collective over the mesh.

    The state of a sharded tie is one DTensor: all of its parts are at the same stage.
    """
    groups = {g.group_name: g for p in parameters if p is not None for g in mesh_groups(p)}
    for shards in groups.values():
        fabric = fabric_of(shards, timeout)
        group = fabric.group(tuple(range(fabric.world_size)), "shards")
        try:
            owners = gather_texts(group, fabric.rank, str(tie.owner))
        finally:
            group.close()
        if len(set(owners)) > 1:
            raise TieError(
                f"tie {tie.tie.names}: it is sharded over pipelines that chose the ranks "
                f"{', '.join(owners)} of theirs as its owner; give every one the same owner="
            )
