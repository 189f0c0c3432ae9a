"""Models and runs whose memory is measured by several test modules."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import piper_owner
from piper_owner.executor.config import TrainConfig
from piper_owner.executor.local import run_threads
from piper_owner.executor.memory_runs import MethodMemory, collect_run, plan_method, predict_run, run_of
from piper_owner.executor.metering import StepMemory
from piper_owner.executor.session import RankSession
from piper_owner.executor.source import GPTSource, ModelSource
from piper_owner.executor.stream import token_stream
from piper_owner.frontends.piper.source import AnnotatedModel
from piper_owner.planning.config import Method
from piper_owner.transport import Fabric

__all__ = [
    "CASES",
    "METHODS",
    "Annotated",
    "beside_prediction",
    "config_of",
    "measured",
    "measured_rank",
    "measured_steps",
    "source_of",
    "tokens_of",
]

METHODS: Final = tuple(Method)
HERE: Final = Path(__file__).resolve().parent

CASES: Final[dict[str, dict[str, Any]]] = {
    "adamw": {"stages": 2, "vocab": 500, "hidden": 32, "layers": 2, "heads": 4},
    "adam": {"stages": 4, "vocab": 2000, "hidden": 24, "layers": 4, "heads": 3, "schedule": "gpipe"},
    "sgd": {"stages": 3, "vocab": 257, "hidden": 64, "layers": 5, "heads": 8, "microbatches": 6},
    "adafactor": {"model": "memory_cases:Annotated", "vocab": 300},
}
"""Four models by the optimizer that steps them: GPTs, and an annotated one that has a buffer."""


class Annotated(nn.Module):
    """Three regions, a buffer, and padding that no step looks up."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, 48, padding_idx=vocab_size - 1)
        self.wide, self.narrow = nn.Linear(48, 200), nn.Linear(200, 48)
        self.head = nn.Linear(48, vocab_size, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((48,), 0.5))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with piper_owner.annotate("PP"):
            hidden = self.embed(ids) * self.scale
        with piper_owner.annotate("PP"):
            hidden = hidden + self.narrow(torch.relu(self.wide(hidden)))
        with piper_owner.annotate("PP"):
            return self.head(hidden)  # type: ignore[no-any-return]


def config_of(name: str, **changes: Any) -> TrainConfig:  # noqa: ANN401 - fields of a config
    sizes = {
        "sequence_length": 16,
        "microbatch_size": 2,
        "microbatches": 4,
        "steps": 3,
        "timeout_seconds": 30,
    }
    return TrainConfig(**{**sizes, **CASES[name], "optimizer": name, **changes})


def source_of(config: TrainConfig) -> ModelSource:
    return GPTSource() if config.model == "gpt" else AnnotatedModel(target=config.model, folder=str(HERE))


def tokens_of(config: TrainConfig) -> NDArray[np.int32]:
    return np.random.default_rng(0).integers(0, config.vocab, 4000).astype(np.int32)


def measured_steps(config: TrainConfig, method: Method) -> list[list[StepMemory]]:
    """By rank all steps, the ranks as threads of this process."""
    config = source_of(config).resolve(config)
    work = partial(measured_rank, config=config, method=method)
    return run_threads(config.num_ranks, work, timeout=timedelta(seconds=60))


def measured_rank(fabric: Fabric, config: TrainConfig, method: Method) -> list[StepMemory]:
    """All steps of one rank."""
    changed, kind = run_of(config, method)
    stream = token_stream(config, tokens_of(config))
    session = RankSession(changed, kind, fabric, source_of(config))
    steps = [session.measured_step(stream.batch(step)) for step in range(config.steps)]
    session.close()
    return steps


def measured(config: TrainConfig, method: Method) -> MethodMemory:
    """The run's figures beside those predicted."""
    return beside_prediction(config, method, measured_steps(config, method))


def beside_prediction(
    config: TrainConfig, method: Method, steps: Sequence[Sequence[StepMemory]]
) -> MethodMemory:
    source = source_of(config)
    config = source.resolve(config)
    plan = plan_method(config, method, source)
    return collect_run(plan, predict_run(plan, token_stream(config, tokens_of(config)), source), steps)
