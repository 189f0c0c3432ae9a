"""Interleaved 1F1B: several stages a rank, microbatches in rounds, so that the pipeline fills faster.

The order is that of Narayanan et al., "Efficient large-scale language model training on GPU clusters
using Megatron-LM" (arXiv:2104.04473): a rank takes a round of D microbatches through its first
stage, then the same ones through its second, and so on; backwards go through the stages the other
way. Before its first backward rank r of D, with k stages, runs `2 * (D - r - 1) + (k - 1) * D`
forwards; from then on it runs a forward and a backward in turn.
"""

from __future__ import annotations

from collections.abc import Sequence

from piper_owner.dag.nodes import ComputeKind
from piper_owner.schedules.engine import Choice, Play, Policy, Programs, stage_limits
from piper_owner.schedules.placement import Placement, place_stages

__all__ = ["interleaved"]


def interleaved(placement: Sequence[int], num_ranks: int, num_microbatches: int) -> Programs:
    """Per rank, the computes of a chain of stages placed by `placement`.

    Where each of D ranks has k >= 2 stages, placed round and round, and D divides the microbatches, it
    is the classic order exactly. Other numbers of microbatches make some rounds longer by one or more,
    for a short round would drain the pipeline; fewer than D are one round. A rank then keeps to the same
    limit and the same order, but takes the next thing that is ready when its turn has not come.

    Under any other placement a rank runs a forward and a backward in turn, of what is furthest on its
    way, and of S stages stage s has at most the `S - s` microbatches in flight of 1F1B. With one stage
    a rank that is 1F1B.
    """
    stages = len(placement)
    play = Play(placement, num_ranks, num_microbatches)
    is_loop = tuple(placement) == place_stages(stages, num_ranks, Placement.LOOP)
    if is_loop and stages > num_ranks and stages % num_ranks == 0:
        return play.run(_Rounds(play))
    return play.run(_InTurn(play))


class _InTurn(Policy):
    """A forward and a backward in turn, of the last stage that can."""

    def __init__(self, play: Play) -> None:
        self.limits = stage_limits(play.placement)

    def choose(self, play: Play, rank: int) -> Choice | None:
        forward = play.furthest_forward(rank, self.limits)
        backward = play.furthest_backward(rank, ComputeKind.BACKWARD)
        return (backward or forward) if play.last[rank] is ComputeKind.FORWARD else (forward or backward)


class _Rounds(Policy):
    """Forwards up to the rank's limit, then a backward for each; both round by round, stage by stage."""

    def __init__(self, play: Play) -> None:
        ranks, microbatches = play.num_ranks, play.num_microbatches
        self.num_stages = len(play.placement) // ranks
        rounds = max(1, microbatches // ranks)
        size, longer = divmod(microbatches, rounds)
        # By microbatch, its round; by round, its size, the longer ones first.
        self.sizes = [size + (i < longer) for i in range(rounds)]
        self.round_of = [i for i, size in enumerate(self.sizes) for _ in range(size)]
        warm_up = (self.num_stages - 1) * self.sizes[0]
        self.limits = [2 * (ranks - rank - 1) + warm_up + 1 for rank in range(ranks)]
        self.turns = None if longer else self._turns()

    def _turns(self) -> list[int]:
        """Of the forwards of any rank, one after the other: which of its stages they belong to."""
        return [turn for size in self.sizes for turn in range(self.num_stages) for _ in range(size)]

    def choose(self, play: Play, rank: int) -> Choice | None:
        ready, back = play.forwards[rank], play.backwards[rank]
        below = play.in_flight[rank] < self.limits[rank]
        if self.turns is not None:
            if below and play.has_forwards(rank):
                stage = rank + play.num_ranks * self.turns[play.forwards_on[rank]]
                return (ComputeKind.FORWARD, stage) if stage in ready else None
            if back:
                turn = self.num_stages - 1 - self.turns[play.backwards_on[rank]]
                stage = rank + play.num_ranks * turn
                return (ComputeKind.BACKWARD, stage) if stage in back else None
            return None
        if below and ready:
            return ComputeKind.FORWARD, min(ready, key=lambda s: (self.round_of[play.num_forwards[s]], s))
        if back:
            return ComputeKind.BACKWARD, min(back, key=lambda s: (self.round_of[play.num_backwards[s]], -s))
        return None
