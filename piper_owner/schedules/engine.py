"""Plays one training step through in unit time and writes down what each rank runs.

A schedule says what an idle rank starts next (`Policy.choose`); this module keeps the time, and what
can run: a forward once the stage before it is through, a backward once the forward of its stage
and the backward of the stage behind it are through. A forward takes 1, a backward 2, and 1 for each
of its two parts.

What comes out has been run, so no rank can wait in a circle, whatever the placement: when a policy
has all ranks wait, `Policy.unblock` names something that can run. Near linear in the number of
computes.
"""

from __future__ import annotations

import abc
import heapq
from collections import Counter, deque
from collections.abc import Sequence
from typing import Final, assert_never

from piper_owner.dag.nodes import Compute, ComputeKind

__all__ = ["Choice", "Play", "Policy", "Programs", "stage_limits"]

Programs = tuple[tuple[Compute, ...], ...]
"""Per rank, its computes in temporal order."""

Choice = tuple[ComputeKind, int]
"""What to start: the kind, and the stage; the microbatch is the next one of that stage."""

_TIME: Final = {
    ComputeKind.FORWARD: 1,
    ComputeKind.BACKWARD: 2,
    ComputeKind.BACKWARD_INPUT: 1,
    ComputeKind.BACKWARD_WEIGHT: 1,
}


def stage_limits(placement: Sequence[int]) -> list[int]:
    """By stage, how many microbatches 1F1B has in flight there at most: one for each stage from it on."""
    return [len(placement) - stage for stage in range(len(placement))]


class Policy(abc.ABC):
    """What makes a schedule: which of the things that it could do an idle rank does."""

    @abc.abstractmethod
    def choose(self, play: Play, rank: int) -> Choice | None:
        """What the idle `rank` starts now, of what is ready; None to wait for something to end."""

    def unblock(self, play: Play) -> Choice:
        """What is started when all ranks wait: the first forward that can run, then backwards."""
        stages = range(len(play.placement))
        forwards = [s for s in stages if s in play.forwards[play.placement[s]]]
        if forwards:
            return ComputeKind.FORWARD, min(forwards, key=lambda stage: (play.num_forwards[stage], stage))
        backwards = [s for s in stages if s in play.backwards[play.placement[s]]]
        return ComputeKind.BACKWARD, min(backwards, key=lambda stage: (play.num_backwards[stage], -stage))


class Play:
    """The state of all ranks at one time. A policy reads it; only `run` changes it.

    By rank, the stages whose next forward, backward or weight part can run: `forwards`, `backwards`,
    `weights`. By stage, how many microbatches have started: `num_forwards`, `num_backwards` (whole,
    or the input part), `num_weights` (whole, or the weight part); the next microbatch of a stage has
    that number. By rank, the same over its stages: `forwards_on`, `backwards_on`, and `in_flight`, the
    forwards whose backward is not complete; `last`, what the rank ran last.
    """

    def __init__(self, placement: Sequence[int], num_ranks: int, num_microbatches: int) -> None:
        stages = range(len(placement))
        self.placement = tuple(placement)
        self.num_ranks = num_ranks
        self.num_microbatches = num_microbatches
        self.num_forwards = [0 for _ in stages]
        self.num_backwards = [0 for _ in stages]
        self.num_weights = [0 for _ in stages]
        self.forwards: list[set[int]] = [set() for _ in range(num_ranks)]
        self.backwards: list[set[int]] = [set() for _ in range(num_ranks)]
        self.weights: list[set[int]] = [set() for _ in range(num_ranks)]
        self.forwards_on = [0 for _ in range(num_ranks)]
        self.backwards_on = [0 for _ in range(num_ranks)]
        self.in_flight = [0 for _ in range(num_ranks)]
        self.last: list[ComputeKind | None] = [None for _ in range(num_ranks)]
        # By stage: how many forwards and backwards (or input parts) have ended.
        self._forwards_done = [0 for _ in stages]
        self._backwards_done = [0 for _ in stages]
        self._pending: list[deque[int]] = [deque() for _ in stages]  # microbatches without their weight part
        self._running: list[tuple[int, int, int]] = []  # (end, rank, stage)
        self._current: list[ComputeKind | None] = [None for _ in range(num_ranks)]
        self._programs: list[list[Compute]] = [[] for _ in range(num_ranks)]
        self._num_stages = Counter(placement)
        self._now = 0

    def has_forwards(self, rank: int) -> bool:
        """Whether `rank` has forwards left to start, ready or not."""
        return self.forwards_on[rank] < self._num_stages[rank] * self.num_microbatches

    def furthest_forward(self, rank: int, limits: Sequence[int]) -> Choice | None:
        """The ready forward of the last stage that has fewer than `limits[stage]` microbatches in flight."""
        below = [s for s in self.forwards[rank] if self.num_forwards[s] - self.num_weights[s] < limits[s]]
        return (ComputeKind.FORWARD, max(below)) if below else None

    def furthest_backward(self, rank: int, kind: ComputeKind) -> Choice | None:
        """The ready backward of the last stage, as `kind`: whole, or its input part."""
        return (kind, max(self.backwards[rank])) if self.backwards[rank] else None

    def oldest_weight(self, rank: int) -> Choice | None:
        """The ready weight part of the earliest microbatch, of the last stage that has one."""
        if not self.weights[rank]:
            return None
        return ComputeKind.BACKWARD_WEIGHT, min(self.weights[rank], key=lambda s: (self._pending[s][0], -s))

    def run(self, policy: Policy) -> Programs:
        """Play to the end."""
        self.forwards[self.placement[0]].add(0)
        touched = {self.placement[0]}
        left = len(self.placement) * self.num_microbatches
        while True:
            for rank in sorted(touched):
                if self._current[rank] is None:
                    choice = policy.choose(self, rank)
                    if choice is not None:
                        self._start(*choice)
            if not self._running:
                if not left:
                    return tuple(map(tuple, self._programs))
                self._start(*policy.unblock(self))
            self._now = self._running[0][0]
            touched = set()
            while self._running and self._running[0][0] == self._now:
                _, rank, stage = heapq.heappop(self._running)
                touched.add(rank)
                left -= self._finish(rank, stage, touched)

    def _start(self, kind: ComputeKind, stage: int) -> None:
        rank = self.placement[stage]
        match kind:
            case ComputeKind.FORWARD:
                microbatch = self.num_forwards[stage]
                self.forwards[rank].remove(stage)
                self.num_forwards[stage] += 1
                self.forwards_on[rank] += 1
                self.in_flight[rank] += 1
            case ComputeKind.BACKWARD:
                microbatch = self.num_backwards[stage]
                self.backwards[rank].remove(stage)
                self.num_backwards[stage] += 1
                self.backwards_on[rank] += 1
                self.num_weights[stage] += 1
            case ComputeKind.BACKWARD_INPUT:
                microbatch = self.num_backwards[stage]
                self.backwards[rank].remove(stage)
                self.num_backwards[stage] += 1
                self.backwards_on[rank] += 1
                self._pending[stage].append(microbatch)
            case ComputeKind.BACKWARD_WEIGHT:
                microbatch = self._pending[stage].popleft()
                self.num_weights[stage] += 1
                if not self._pending[stage]:
                    self.weights[rank].remove(stage)
            case _:
                assert_never(kind)
        self._current[rank] = self.last[rank] = kind
        self._programs[rank].append(Compute(kind=kind, stage=stage, microbatch=microbatch))
        heapq.heappush(self._running, (self._now + _TIME[kind], rank, stage))

    def _finish(self, rank: int, stage: int, touched: set[int]) -> int:
        """End what `rank` runs, and note what can run now and where; 1 if a microbatch of `stage` is done."""
        kind, self._current[rank] = self._current[rank], None
        if kind is ComputeKind.FORWARD:
            self._forwards_done[stage] += 1
            self._note_forward(stage)
            self._note_backward(stage)
            if stage + 1 < len(self.placement):
                self._note_forward(stage + 1)
                touched.add(self.placement[stage + 1])
            return 0
        if kind is not ComputeKind.BACKWARD_WEIGHT:
            self._backwards_done[stage] += 1
            self._note_backward(stage)
            if stage > 0:
                self._note_backward(stage - 1)
                touched.add(self.placement[stage - 1])
        if kind is ComputeKind.BACKWARD_INPUT:
            self.weights[rank].add(stage)
            return 0
        self.in_flight[rank] -= 1
        return 1

    def _note_forward(self, stage: int) -> None:
        come = self._forwards_done[stage - 1] if stage else self.num_microbatches
        if self.num_forwards[stage] < come:
            self.forwards[self.placement[stage]].add(stage)

    def _note_backward(self, stage: int) -> None:
        come = self._forwards_done[stage]
        if stage + 1 < len(self.placement):
            come = min(come, self._backwards_done[stage + 1])
        if self.num_backwards[stage] < come:
            self.backwards[self.placement[stage]].add(stage)
