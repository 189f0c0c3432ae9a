"""Models and runs whose memory is measured by several test modules."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from piper_owner.executor.config import TrainConfig
from piper_owner.executor.local import run_threads
from piper_owner.executor.memory_runs import MethodMemory, collect_run, plan_method, run_of
from piper_owner.executor.metering import StepMemory
from piper_owner.executor.session import RankSession
from piper_owner.executor.source import GPTSource, ModelSource
from piper_owner.executor.stream import token_stream
from piper_owner.frontends.piper.source import AnnotatedModel
from piper_owner.planning.config import Method
from piper_owner.transport import Fabric

__all__ = ["CASES", "METHODS", "config_of", "measured", "measured_steps", "source_of", "tokens_of"]

METHODS: Final = tuple(Method)
HERE: Final = Path(__file__).resolve().parent

CASES: Final[dict[str, dict[str, Any]]] = {
    "adamw": {"stages": 2, "vocab": 500, "hidden": 32, "layers": 2, "heads": 4},
    "adam": {"stages": 4, "vocab": 2000, "hidden": 24, "layers": 4, "heads": 3, "schedule": "gpipe"},
    "sgd": {"stages": 3, "vocab": 257, "hidden": 64, "layers": 5, "heads": 8, "microbatches": 6},
    "adafactor": {"model": "annotated_models:FourRegions", "vocab": 300, "sequence_length": 4},
}
"""Four models by the optimizer that steps them: GPTs, and an annotated one that has a buffer."""


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


def measured_steps(config: TrainConfig, method: Method) -> list[dict[int, StepMemory]]:
    """Step by step and rank by rank, the ranks as threads of this process."""
    source = source_of(config)
    config = source.resolve(config)
    changed, kind = run_of(config, method)
    stream = token_stream(config, tokens_of(config))

    def work(fabric: Fabric) -> list[StepMemory]:
        session = RankSession(changed, kind, fabric, source)
        steps = [session.measured_step(stream.batch(step)) for step in range(config.steps)]
        session.close()
        return steps

    ranks = run_threads(config.num_ranks, work, timeout=timedelta(seconds=30))
    return [{rank: steps[index] for rank, steps in enumerate(ranks)} for index in range(config.steps)]


def measured(config: TrainConfig, method: Method) -> MethodMemory:
    """The run's figures beside those predicted."""
    source = source_of(config)
    config = source.resolve(config)
    plan = plan_method(config, method, source)
    stream = token_stream(config, tokens_of(config))
    return collect_run(plan, method, stream, source, measured_steps(config, method))
