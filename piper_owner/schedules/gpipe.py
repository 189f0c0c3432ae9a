"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from collections.abc import Sequence

from piper_owner.dag.nodes import Compute, ComputeKind

__all__ = ["gpipe"]


def gpipe(placement: Sequence[int], num_ranks: int, num_microbatches: int) -> tuple[tuple[Compute, ...], ...]:
    """Per rank, the computes of a chain of stages placed by `placement`.

    Forwards stage by stage, ascending, then backwards, descending; microbatches ascend. Every
    rank follows the one order of (phase, stage, microbatch), so none waits in a circle.
    """
    programs: list[list[Compute]] = [[] for _ in range(num_ranks)]
    stages = range(len(placement))
    for kind, order in ((ComputeKind.FORWARD, stages), (ComputeKind.BACKWARD, reversed(stages))):
        for stage in order:
            programs[placement[stage]].extend(
                Compute(kind=kind, stage=stage, microbatch=microbatch)
                for microbatch in range(num_microbatches)
            )
    return tuple(map(tuple, programs))
