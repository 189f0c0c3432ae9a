"""A fabric over some of the ranks of another one."""

from __future__ import annotations

import torch

from piper_owner.errors import ConfigError
from piper_owner.transport.base import Channel, Fabric, Group

__all__ = ["FabricView", "pipeline_views"]


class FabricView(Fabric):
    """`fabric` as its `ranks` see it, among them this one: there rank i is `ranks[i]` of `fabric`.

    Lines, groups and the board are those of `fabric`, so that errors name its ranks.
    """

    def __init__(self, fabric: Fabric, ranks: tuple[int, ...]) -> None:
        if fabric.rank not in ranks:
            raise ConfigError(f"rank {fabric.rank} is not among the ranks {list(ranks)} of its view")
        self.rank, self.world_size, self.timeout = ranks.index(fabric.rank), len(ranks), fabric.timeout
        self.board = fabric.board
        self._fabric = fabric
        self._ranks = ranks

    @property
    def job_rank(self) -> int:
        """This rank in the fabric that all views are of."""
        return self._fabric.job_rank

    def channel(self, peer: int, purpose: str) -> Channel:
        """This rank's end of a new line to `peer`; collective over the two."""
        return self._fabric.channel(self._ranks[peer], purpose)

    def group(self, ranks: tuple[int, ...], purpose: str) -> Group:
        """A new group over `ranks`; collective over them."""
        return _GroupView(self._fabric.group(tuple(self._ranks[rank] for rank in ranks), purpose), ranks)

    def over_devices(self, device: torch.device) -> Fabric:
        """Those of the ranks of this view."""
        return FabricView(self._fabric.over_devices(device), self._ranks)


class _GroupView(Group):
    """A group whose ranks, and roots, are those of a view."""

    def __init__(self, group: Group, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self._group = group

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self._group.all_reduce(tensor)

    def reduce(self, tensor: torch.Tensor, root: int) -> None:
        self._group.reduce(tensor, self._group.ranks[self.ranks.index(root)])

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        self._group.broadcast(tensor, self._group.ranks[self.ranks.index(root)])

    def close(self) -> None:
        self._group.close()


def pipeline_views(fabric: Fabric, num_pipelines: int) -> tuple[Fabric, Fabric | None]:
    """This rank's pipeline, and the same rank of all pipelines (None: there is only one pipeline).

    Of the ranks of `fabric`, the first pipeline has the first ones, the next one the next ones.
    """
    if num_pipelines == 1:
        return fabric, None
    each = fabric.world_size // num_pipelines
    start = fabric.rank // each * each
    mine = tuple(range(start, start + each))
    beside = tuple(range(fabric.rank % each, fabric.world_size, each))
    return FabricView(fabric, mine), FabricView(fabric, beside)
