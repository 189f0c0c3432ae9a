"""The optimizers that the command offers, by name."""

from __future__ import annotations

from functools import partial

import torch

from piper_owner.errors import ConfigError
from piper_owner.executor.buckets import OptimizerFactory
from piper_owner.executor.config import OPTIMIZERS

__all__ = ["optimizer_factory"]


def optimizer_factory(name: str, lr: float) -> OptimizerFactory:
    """Make the optimizer `name` of one bucket, at learning rate `lr`.

    `sgd` has momentum 0.9. `adafactor` is not element-wise: its update depends on whole rows and
    columns, so a tie steps whole under it, and streams in chunks under the others.

    Raises ConfigError for an unknown name.
    """
    match name:
        case "adamw":
            made: OptimizerFactory = partial(torch.optim.AdamW, lr=lr, fused=True)
        case "adam":
            made = partial(torch.optim.Adam, lr=lr, fused=True)
        case "sgd":
            made = partial(torch.optim.SGD, lr=lr, momentum=0.9)
        case "adafactor":
            made = partial(torch.optim.Adafactor, lr=lr)
        case _:
            raise ConfigError(f"optimizer {name!r}: choose one of {', '.join(OPTIMIZERS)}")
    return made
