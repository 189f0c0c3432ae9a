"""Actors that are killed, or raise, at a moment of a run; for tests of what becomes of it."""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ray import cloudpickle
from torch import nn
from torch.nn import functional

from piper_owner.executor.config import RunKind, TrainConfig
from piper_owner.executor.local import train_in_process
from piper_owner.executor.results import RunResult
from piper_owner.executor.session import StepReport
from piper_owner.executor.source import GPTSource
from piper_owner.executor.stream import token_stream
from piper_owner.runtime.actor import RankHost

# Actors cannot import a test module, so the classes below travel as they are.
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]

CONFIG = TrainConfig(
    stages=2,
    microbatches=4,
    microbatch_size=1,
    sequence_length=8,
    vocab=256,
    hidden=8,
    heads=2,
    layers=2,
    steps=30,
    timeout_seconds=30,
)
TOKENS = np.arange(400, dtype=np.int32) ** 2 % 251


@functools.cache
def undisturbed() -> RunResult:
    """The owner run of CONFIG on TOKENS, on threads of this process.

    With as many threads to an operation as an actor has: sums in another order have other bits.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // CONFIG.num_ranks))
    try:
        return train_in_process(CONFIG, token_stream(CONFIG, TOKENS)).runs[RunKind.OWNER]
    finally:
        torch.set_num_threads(before)


class WithDropout(GPTSource):
    """The GPT with dropout behind each stage."""

    def build_stages(
        self, config: TrainConfig, stages: tuple[int, ...], *, device: str = "cpu"
    ) -> dict[int, nn.Module]:
        built = super().build_stages(config, stages, device=device)
        for module in built.values():
            module.register_forward_hook(drop)
        return built


def drop(module: object, given: object, made: torch.Tensor) -> torch.Tensor:
    return functional.dropout(made, 0.2)


@dataclass(frozen=True, kw_only=True)
class Moment:
    """`delay` seconds after `rank` began call `number` (from 0) of `method`; once: `marker` is there then."""

    rank: int
    method: str
    number: int
    delay: float
    marker: Path


def faulty_at(*moments: Moment, error: Exception | None = None) -> type[RankHost]:
    """Hosts one of which is killed at each of `moments`, or raises `error` there."""

    class Faulty(RankHost):
        counts: dict[str, int]

        def open(self, *args: Any) -> None:  # noqa: ANN401
            self.counts = {}
            self._meet("open")
            super().open(*args)

        def load(self, *args: Any) -> tuple[float, ...]:  # noqa: ANN401
            self._meet("load")
            return super().load(*args)

        def step(self, index: int) -> StepReport:
            self.counts["step"] = index
            self._meet("step")
            return super().step(index)

        def save(self, *args: Any) -> None:  # noqa: ANN401
            self._meet("save")
            super().save(*args)

        def finish(self) -> Any:  # noqa: ANN401
            self._meet("finish")
            return super().finish()

        def _meet(self, method: str) -> None:
            number = self.counts.get(method, 0)
            self.counts[method] = number + 1
            for moment in moments:
                here = (self.rank, method, number) == (moment.rank, moment.method, moment.number)
                if here and not moment.marker.exists():
                    moment.marker.touch()
                    if error is not None:
                        raise error
                    if moment.delay == 0.0:
                        os.kill(os.getpid(), signal.SIGKILL)
                    killing = (os.getpid(), signal.SIGKILL)
                    threading.Timer(moment.delay, os.kill, killing).start()

    return Faulty


def at(step: int, folder: Path, name: str = "marker", *, rank: int = 1) -> Moment:
    return Moment(rank=rank, method="step", number=step, delay=0.0, marker=folder / name)


def assert_same(run: RunResult, expected: RunResult) -> None:
    """To the last bit: losses and final weights."""
    assert run.losses == expected.losses
    assert sorted(run.weights) == sorted(expected.weights)
    for rank, weights in expected.weights.items():
        assert sorted(weights) == sorted(run.weights[rank])
        for name, value in weights.items():
            assert torch.equal(value, run.weights[rank][name]), name
