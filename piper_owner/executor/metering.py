"""Measures the memory of one rank in a step: by kind between its actions, and the peak of all tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from piper_owner.dag.nodes import Action, Compute, Transfer
from piper_owner.executor.rank import RankExecutor
from piper_owner.memory import MemoryUse, ProcessMemory, TensorTracker, kept_tensors, measure, process_memory

__all__ = ["MemoryMeter", "StepMemory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """One step on one rank: of each kind the most at one time, and the most of all tensors together."""

    use: MemoryUse
    peak: int
    process: ProcessMemory


class MemoryMeter:
    """The StepObserver that measures between the actions of a step. `step` is entered around each step.

    Gradients are there when the last backward of the rank has run, and go one by one in the actions behind
    it; activations count in the peak alone. Local.
    """

    def __init__(self, executor: RankExecutor, stages: Mapping[int, nn.Module]) -> None:
        self._executor, self._stages = executor, tuple(stages.values())
        self._most = MemoryUse()

    @contextmanager
    def step(self) -> Iterator[list[StepMemory]]:
        """Measure the step inside; its StepMemory is in the list afterwards."""
        found: list[StepMemory] = []
        self._most = self._now()
        parts = kept_tensors(self._stages, self._optimizers(), ownership=self._executor.exchange)
        tracker = TensorTracker(tensor for _, tensor in parts)
        self._executor.observer = self
        try:
            with tracker:
                yield found
        finally:
            self._executor.observer = None
        self._most |= self._now()
        found.append(StepMemory(use=self._most, peak=tracker.peak, process=process_memory()))

    @contextmanager
    def around(self, action: Action, step: int) -> Iterator[None]:
        """Measure before and after every action that is neither a computation nor a pipeline's message."""
        is_plain = isinstance(action, Compute | Transfer)
        if not is_plain:
            self._most |= self._now()
        yield
        if not is_plain:
            self._most |= self._now()

    def _now(self) -> MemoryUse:
        return measure(self._stages, self._optimizers(), ownership=self._executor.exchange)

    def _optimizers(self) -> list[Optimizer]:
        buckets = self._executor.buckets.values()
        return [bucket.optimizer for bucket in buckets if bucket.optimizer is not None]
