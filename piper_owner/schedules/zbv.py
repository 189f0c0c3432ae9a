"""Zero-bubble V: backwards in two parts, and the part that nobody waits for fills the gaps.

After Qi et al., "Zero bubble pipeline parallelism" (arXiv:2401.10241, section 6) and "Pipeline
parallelism with controllable memory" (arXiv:2405.15362): two stages a rank, down the ranks and up
again, the gradient of the input first, that of the weights when there is time. Where forwards and both
parts of a backward take equally long, only filling the pipeline leaves a rank idle.
"""

from __future__ import annotations

from collections.abc import Sequence

from piper_owner.dag.nodes import ComputeKind
from piper_owner.schedules.engine import Choice, Play, Policy, Programs, stage_limits

__all__ = ["zbv"]


def zbv(placement: Sequence[int], num_ranks: int, num_microbatches: int) -> Programs:
    """Per rank, the computes of a chain of stages placed by `placement`; every backward is split.

    Greedy, in unit time: an idle rank runs the forward that is furthest on its way, else the input part
    that is, else a weight part. While it has forwards left, a weight part follows its input part at
    once, for only then is the activation free. Of S stages, stage s has at most `S - s` microbatches in
    flight (until their weight part ends), one less for each later stage of its rank: under a V of two
    stages a rank 2 * D in all on each of D ranks, which is what 1F1B keeps on its first rank.

    The same rules hold under any placement; with one stage a rank they give the schedule ZB-H1 of
    the first paper, with the memory of 1F1B.
    """
    play = Play(placement, num_ranks, num_microbatches)
    return play.run(_Greedy(play))


class _Greedy(Policy):
    """Forwards first, then input parts, then weight parts; the limits keep forwards from running away."""

    def __init__(self, play: Play) -> None:
        later = [0] * play.num_ranks
        self.limits = stage_limits(play.placement)
        for stage in reversed(range(len(play.placement))):
            rank = play.placement[stage]
            self.limits[stage] -= later[rank]
            later[rank] += 1

    def choose(self, play: Play, rank: int) -> Choice | None:
        if play.last[rank] is ComputeKind.BACKWARD_INPUT and play.has_forwards(rank):
            return play.oldest_weight(rank)
        return (
            play.furthest_forward(rank, self.limits)
            or play.furthest_backward(rank, ComputeKind.BACKWARD_INPUT)
            or play.oldest_weight(rank)
        )
