"""1F1B: after a warm-up, one backward for each forward, so that few activations are kept.

Each stage has the classic sequence of its own: `min(M, S - s)` forwards, then a backward and a
forward in turn, then the backwards that are left. The stages of one rank are merged by playing
the step through in unit time (forward 1, backward 2).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Final

from piper_owner.dag.nodes import Compute, ComputeKind

__all__ = ["one_f_one_b"]

_TIME: Final = {ComputeKind.FORWARD: 1, ComputeKind.BACKWARD: 2}


def one_f_one_b(
    placement: Sequence[int], num_ranks: int, num_microbatches: int
) -> tuple[tuple[Compute, ...], ...]:
    """Per rank, the computes of a chain of stages placed by `placement`.

    With one stage a rank it is exactly classic 1F1B. It cannot deadlock under any placement: stage
    by stage the sequences are those of classic 1F1B, where something can always run, and a free
    rank runs whatever can.
    """
    return _Merge(placement, num_ranks, num_microbatches).run()


def _sequence(stage: int, num_stages: int, num_microbatches: int) -> list[Compute]:
    warm_up = min(num_microbatches, num_stages - stage)
    forwards = [Compute(kind=ComputeKind.FORWARD, stage=stage, microbatch=m) for m in range(num_microbatches)]
    backwards = [
        Compute(kind=ComputeKind.BACKWARD, stage=stage, microbatch=m) for m in range(num_microbatches)
    ]
    sequence = forwards[:warm_up]
    for microbatch, backward in enumerate(backwards):
        sequence.append(backward)
        sequence.extend(forwards[warm_up + microbatch : warm_up + microbatch + 1])
    return sequence


class _Merge:
    """Play the step through, event by event; near linear in the number of computes."""

    def __init__(self, placement: Sequence[int], num_ranks: int, num_microbatches: int) -> None:
        stages = range(len(placement))
        self.placement = placement
        self.sequences = [_sequence(stage, len(placement), num_microbatches) for stage in stages]
        self.next = [0 for _ in stages]
        # How many microbatches of each stage are through its forward and its backward.
        self.forwards = [0 for _ in stages]
        self.backwards = [0 for _ in stages]
        # Per rank: what can run now. Backwards first, then the earliest microbatch, then the stage
        # that is furthest on its way.
        self.ready: list[list[tuple[int, int, int, int]]] = [[] for _ in range(num_ranks)]
        self.queued = [False for _ in stages]
        self.programs: list[list[Compute]] = [[] for _ in range(num_ranks)]

    def run(self) -> tuple[tuple[Compute, ...], ...]:
        running: list[tuple[int, int, int]] = []  # (end, rank, stage)
        busy = [False for _ in self.programs]
        for stage in range(len(self.placement)):
            self._queue_if_ready(stage)
        touched = set(self.placement)
        now = 0
        while True:
            for rank in sorted(touched):
                if not busy[rank] and self.ready[rank]:
                    stage = heapq.heappop(self.ready[rank])[3]
                    action = self.sequences[stage][self.next[stage]]
                    self.programs[rank].append(action)
                    busy[rank] = True
                    heapq.heappush(running, (now + _TIME[action.kind], rank, stage))
            if not running:
                return tuple(map(tuple, self.programs))
            now = running[0][0]
            touched = set()
            while running and running[0][0] == now:
                _, rank, stage = heapq.heappop(running)
                busy[rank] = False
                touched.add(rank)
                touched.update(self._finish(stage))

    def _finish(self, stage: int) -> list[int]:
        """Count the compute of `stage` that ended; the ranks that may have become able to run."""
        forward = self.sequences[stage][self.next[stage]].kind is ComputeKind.FORWARD
        (self.forwards if forward else self.backwards)[stage] += 1
        self.next[stage] += 1
        self.queued[stage] = False
        around = [s for s in (stage, stage + 1 if forward else stage - 1) if 0 <= s < len(self.placement)]
        for other in around:
            self._queue_if_ready(other)
        return [self.placement[other] for other in around]

    def _queue_if_ready(self, stage: int) -> None:
        if self.queued[stage] or self.next[stage] == len(self.sequences[stage]):
            return
        action = self.sequences[stage][self.next[stage]]
        microbatch = action.microbatch
        last = stage == len(self.placement) - 1
        if action.kind is ComputeKind.FORWARD:
            can_run = stage == 0 or self.forwards[stage - 1] > microbatch
            key = (1, microbatch, -stage, stage)
        else:
            can_run = last or self.backwards[stage + 1] > microbatch
            key = (0, microbatch, stage, stage)
        if can_run:
            self.queued[stage] = True
            heapq.heappush(self.ready[self.placement[stage]], key)
