"""DualPipeV: a forward of one stage beside a backward of the other, in both directions of a V at once.

The order of the eight phases is the published one of DualPipeV (github.com/deepseek-ai/DualPipe, made of
the DualPipe of DeepSeek-V3, arXiv:2412.19437): where both halves of the V are full, each rank runs a
forward of its first stage with a backward of its second one and the other way round, so that the
messages of one hide behind the computes of the other. Backwards are split in two parts where
that shortens the filling and the draining, and whole where the pipeline is full.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Final

from piper_owner.dag.nodes import Compute, ComputeKind
from piper_owner.schedules.engine import Choice, Play, Policy, Programs, stage_limits
from piper_owner.schedules.placement import Placement, place_stages

__all__ = ["dualpipev"]

_F: Final = ComputeKind.FORWARD
_B: Final = ComputeKind.BACKWARD
_I: Final = ComputeKind.BACKWARD_INPUT
_W: Final = ComputeKind.BACKWARD_WEIGHT


def dualpipev(placement: Sequence[int], num_ranks: int, num_microbatches: int) -> Programs:
    """Per rank, the computes of a chain of stages placed by `placement`.

    Under a V of two stages on each of D ranks, with at least 2 * D microbatches, it is the published
    order, a forward before the backward that it is paired with; a rank keeps at most 2 * D + 1
    activations.

    Elsewhere the same rules are played through in unit time: a rank runs a forward and a backward in turn,
    of what is furthest on its way; backwards are whole as long as the rank has forwards left to pair
    them with, and then split, weight parts filling the gaps. Of S stages, stage s has at most `S - s`
    microbatches in flight.
    """
    stages = len(placement)
    is_v = tuple(placement) == place_stages(stages, num_ranks, Placement.V)
    if is_v and stages == 2 * num_ranks <= num_microbatches:
        return tuple(_Rank(rank, num_ranks, num_microbatches).program() for rank in range(num_ranks))
    play = Play(placement, num_ranks, num_microbatches)
    return play.run(_Pairs(play))


class _Rank:
    """One rank of the V: its two stages, and the eight phases over them."""

    def __init__(self, rank: int, num_ranks: int, num_microbatches: int) -> None:
        self.rank = rank
        self.behind = num_ranks - rank - 1
        self.down, self.up = rank, 2 * num_ranks - 1 - rank
        self.steady = num_microbatches - 2 * num_ranks + rank + 1
        self.actions: list[Compute] = []
        self.count: Counter[tuple[bool, int]] = Counter()  # forwards, and backwards, by stage
        self.pending: deque[Compute] = deque()  # weight parts to come

    def run(self, kind: ComputeKind, stage: int) -> None:
        """Append the next microbatch of that kind and stage."""
        key = (kind is _F, stage)
        self.actions.append(Compute(kind=kind, stage=stage, microbatch=self.count[key]))
        if kind is _I:
            self.pending.append(Compute(kind=_W, stage=stage, microbatch=self.count[key]))
        self.count[key] += 1

    def run_weight(self) -> None:
        """Append the oldest weight part that is left out so far, if there is one."""
        if self.pending:
            self.actions.append(self.pending.popleft())

    def program(self) -> tuple[Compute, ...]:
        self._fill()
        for _ in range(self.steady):
            self.run(_F, self.down)
            self.run(_B, self.up)
            self.run(_F, self.up)
            self.run(_B, self.down)
        self._drain()
        return tuple(self.actions)

    def _fill(self) -> None:
        for _ in range(2 * self.behind):
            self.run(_F, self.down)
        for _ in range(self.rank + 1):
            self.run(_F, self.down)
            self.run(_F, self.up)
        for _ in range(self.behind):
            self.run(_I, self.up)
            self.run_weight()
            self.run(_F, self.up)

    def _drain(self) -> None:
        for _ in range(self.behind):
            self.run(_B, self.up)
            self.run(_F, self.up)
            self.run(_B, self.down)
        # From the middle of the last backwards on, they are split: whole ones would hold up the ranks before.
        last = [stage for _ in range(self.rank + 1) for stage in (self.up, self.down)]
        for i, stage in enumerate(last):
            self.run(_I if i > self.rank else _B, stage)
        for _ in range(self.behind):
            self.run_weight()
            self.run(_I, self.down)
        for _ in range(self.rank + 1):
            self.run_weight()


class _Pairs(Policy):
    """A forward and a backward in turn, whole while there are forwards; weight parts in the gaps."""

    def __init__(self, play: Play) -> None:
        self.limits = stage_limits(play.placement)

    def choose(self, play: Play, rank: int) -> Choice | None:
        forward = play.furthest_forward(rank, self.limits)
        backward = play.furthest_backward(rank, _B if play.has_forwards(rank) else _I)
        if play.last[rank] is _F:
            return backward or forward or play.oldest_weight(rank)
        return forward or backward or play.oldest_weight(rank)
