"""Plans that several test modules look at."""

from __future__ import annotations

from typing import Any

from piper_owner.planning.balance import layer_counts, split_layers
from piper_owner.planning.config import PlanConfig
from piper_owner.planning.presets import PRESETS
from piper_owner.planning.shapes import (
    ModelShapes,
    count,
    gpt_architecture,
    layer_shapes,
    split_architecture,
)

__all__ = ["gpt_shapes", "plan_config", "preset_shapes"]


def preset_shapes(name: str, stages: int) -> ModelShapes:
    model = PRESETS[name].model
    costs = [count(layer_shapes(model))] * model.layers
    return split_architecture(model, layer_counts(costs, stages, head=model.vocab * model.hidden), name=name)


def gpt_shapes(stages: int, *, vocab: int, hidden: int, layers: int, heads: int, context: int) -> ModelShapes:
    model = gpt_architecture(vocab=vocab, hidden=hidden, layers=layers, heads=heads, context=context)
    return split_architecture(model, [len(held) for held in split_layers(layers, stages)], name="gpt")


def plan_config(**changes: Any) -> PlanConfig:  # noqa: ANN401 - fields of any type
    return PlanConfig(**changes)
