"""The shapes of a model that is built without values: for `piper-owner plan`. It imports torch."""

from __future__ import annotations

import importlib
import os
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from piper_owner.cli.plan_options import HUGGING_FACE
from piper_owner.errors import ConfigError, InputError
from piper_owner.executor.config import TrainConfig
from piper_owner.executor.ports import crossing_values
from piper_owner.frontends.huggingface import find_ties, split
from piper_owner.frontends.piper.source import AnnotatedModel
from piper_owner.ownership import Tie, Use
from piper_owner.planning.config import PlanConfig
from piper_owner.planning.shapes import Crossing, ModelShapes, Shape, StageShapes, TiedShape, TiedUse
from piper_owner.ties import describe_uses

__all__ = ["measure_annotated", "measure_hugging_face", "measure_stages"]


def measure_annotated(name: str, config: PlanConfig, *, vocab: int) -> ModelShapes:
    """The shapes of `name`, a module:function that builds an annotated model, one stage for each region.

    Every value between stages is taken to have as many features as the first tie has columns.

    Raises ConfigError for a name that gives no such model, TraceError for one that cannot be split.
    """
    trained = TrainConfig(
        vocab=vocab,
        sequence_length=config.sequence,
        microbatch_size=max(1, config.microbatch_tokens // config.sequence),
    )
    split = AnnotatedModel(target=name, folder=os.getcwd()).split(trained, device="meta")
    uses = [
        use for stage in sorted(split.stages) for use in describe_uses({stage: split.stages[stage]}, rank=0)
    ]
    tied = {tied for tie in split.ties for tied in tie.names}
    hidden = next((use.shape[-1] for use in uses if use.name in tied), 1)
    crossings = [
        Crossing(early=early, late=late, features=len(values) * hidden)
        for (early, late), values in crossing_values(split.ports).items()
    ]
    shapes = measure_stages(
        name, split.stages, split.ties, hidden=hidden, layers=[0] * len(split.ports), dense=split.dense
    )
    return replace(shapes, crossings=tuple(crossings))


def measure_hugging_face(name: str, num_stages: int) -> ModelShapes:
    """The shapes of `hf:NAME_OR_PATH`, a model of transformers, cut into `num_stages` stages.

    It is built on the meta device from its configuration: nothing but that is read or downloaded.

    Raises InputError for a model that is not found or cannot be split, or without transformers.
    """
    try:
        transformers: Any = importlib.import_module("transformers")  # optional: only this needs it
    except ImportError as error:
        raise ConfigError(
            f"--model {name[:60]}: transformers is not installed; pip install 'piper-owner[hf]'"
        ) from error
    wanted = name.removeprefix(HUGGING_FACE)
    try:
        # False: unless told, transformers asks on the terminal whether to run code that comes with the model.
        config = transformers.AutoConfig.from_pretrained(wanted, trust_remote_code=False)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        first = next(iter(str(error).splitlines()), "")
        raise InputError(f"--model {name[:60]}: transformers cannot make it: {first[:200]}") from error
    stages = dict(enumerate(split(model, num_stages)))
    text: Any = config.get_text_config()
    layers = [len(stage.layers) for stage in stages.values()]
    return measure_stages(wanted, stages, find_ties(model), hidden=int(text.hidden_size), layers=layers)


def measure_stages(
    name: str,
    stages: Mapping[int, nn.Module],
    ties: Sequence[Tie],
    *,
    hidden: int,
    layers: Sequence[int],
    dense: Container[str] = (),
) -> ModelShapes:
    """The shapes of modules, by stage number, under the names of the whole model.

    hidden: features of a token that go from stage to stage. layers: attention layers of each stage.
    dense: tied weights that are looked up and yet needed whole.
    What a token saves is taken to be the inputs and outputs of all matrices.
    """
    tie_of = {tied: tie for tie in ties for tied in tie.names}
    found: dict[Tie, dict[str, TiedUse]] = {tie: {} for tie in ties}
    shapes_of: dict[Tie, Shape] = {}
    parts = []
    for stage in sorted(stages):
        plain: list[Shape] = []
        multiplies = saved = saved_wide = 0
        for use in describe_uses({stage: stages[stage]}, rank=0):
            is_matrix = use.use is Use.DENSE and len(use.shape) == 2
            tie = tie_of.get(use.name)
            multiplies += use.shape[0] * use.shape[1] if is_matrix else 0
            if tie is None:
                if use.requires_grad:
                    plain.append(use.shape)
                saved += sum(use.shape) if is_matrix else 0
                continue
            how = Use.DENSE if use.name in dense else use.use
            found[tie][use.name] = TiedUse(name=use.name, stage=stage, use=how)
            shapes_of[tie] = use.shape
            if is_matrix:  # a head: its output becomes the loss
                saved, saved_wide = saved + use.shape[1], use.shape[0]
        parts.append(
            StageShapes(
                shapes=tuple(plain),
                multiplies=multiplies,
                attention=2 * hidden * layers[stage],
                saved=saved,
                saved_wide=saved_wide,
            )
        )
    tied = tuple(
        TiedShape(tie=tie, shape=shapes_of[tie], uses=tuple(uses[name] for name in tie.names if name in uses))
        for tie, uses in found.items()
        if len(uses) == len(tie.names)
    )
    return ModelShapes(name=name, hidden=hidden, stages=tuple(parts), ties=tied)
