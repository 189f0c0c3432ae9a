"""Where the model of a run comes from: whole for the reference, or cut into the stages of a pipeline."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from piper_owner.directives.model import Place
from piper_owner.executor.config import TrainConfig
from piper_owner.executor.ports import StagePorts, chain_ports
from piper_owner.models.gpt import GPTConfig, build_model, build_stage
from piper_owner.ownership import Tie
from piper_owner.ties import find_ties

__all__ = ["TAG", "GPTSource", "ModelSource", "SplitModel", "gpt_config", "torch_dtype"]

TAG: Final = "PP"
"""The annotation that numbers the stages of a pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitModel:
    """A model as stages: their modules by number, and how values go between them.

    Parameters bear the names of the whole model; a tie has a name of its own for each stage that
    uses it. `tags[s]` is how programs name stage `s`, such as `{"PP": 0}`. `dense` are the weights
    of nn.Embedding modules that look up ids which nobody knows before the step: they need the
    whole table.
    """

    stages: Mapping[int, nn.Module]
    ports: tuple[StagePorts, ...]
    ties: tuple[Tie, ...]
    tags: tuple[Mapping[str, int], ...]
    dense: frozenset[str] = frozenset()


class ModelSource(abc.ABC):
    """What builds the model of a run, the same on every rank; it can be pickled.

    The model takes int64 ids (batch, sequence) and gives logits (batch, sequence, vocabulary).
    """

    def resolve(self, config: TrainConfig) -> TrainConfig:
        """`config` with what the model itself decides, such as the number of stages.

        Raises ConfigError for options that do not suit the model.
        """
        return config

    @abc.abstractmethod
    def split(self, config: TrainConfig, *, device: str) -> SplitModel:
        """All stages, with their starting values on `device`, or with none on the "meta" device."""

    def build_stages(
        self, config: TrainConfig, stages: tuple[int, ...], *, device: str = "cpu"
    ) -> dict[int, nn.Module]:
        """The modules of `stages`, with their starting values, on `device`.

        The values are the same on every device: they are drawn on the CPU.
        """
        split = self.split(config, device=device)
        return {stage: split.stages[stage] for stage in stages}

    @abc.abstractmethod
    def build_model(self, config: TrainConfig) -> nn.Module:
        """The whole model with the same starting values, on the CPU."""


@dataclass(frozen=True, slots=True)
class GPTSource(ModelSource):
    """The package's own GPT with a tied head, cut into `config.stages` stages in a chain."""

    def resolve(self, config: TrainConfig) -> TrainConfig:
        """`config`, with as many stages as its program places, if it names them one by one."""
        placed = _placed(config)
        if placed in (0, config.stages):
            return config
        return dataclasses.replace(config, stages=placed, devices=0)  # the program has them, too

    def split(self, config: TrainConfig, *, device: str) -> SplitModel:
        """Stage by stage; see ModelSource."""
        return SplitModel(
            stages={stage: self._stage(config, stage, device) for stage in range(config.stages)},
            ports=chain_ports(config.stages),
            ties=find_ties(build_model(gpt_config(config), dtype=torch_dtype(config), device="meta")),
            tags=tuple({TAG: stage} for stage in range(config.stages)),
        )

    def build_stages(
        self, config: TrainConfig, stages: tuple[int, ...], *, device: str = "cpu"
    ) -> dict[int, nn.Module]:
        """Only `stages` are built, not the whole model."""
        return {stage: self._stage(config, stage, device) for stage in stages}

    def build_model(self, config: TrainConfig) -> nn.Module:
        """The only stage of a pipeline of one."""
        return build_model(gpt_config(config), dtype=torch_dtype(config), seed=config.seed)

    @staticmethod
    def _stage(config: TrainConfig, stage: int, device: str) -> nn.Module:
        dtype = torch_dtype(config)
        return build_stage(
            gpt_config(config), stage, config.stages, dtype=dtype, device=device, seed=config.seed
        )


def _placed(config: TrainConfig) -> int:
    """One more than the last stage that the program of `config` places by its number; 0 for none."""
    directives = () if config.program is None else config.program.directives
    filters = [directive.filter for directive in directives if isinstance(directive, Place)]
    numbers = [index for each in filters for tag, index in each.tags if tag == TAG and index is not None]
    return 1 + max(numbers, default=-1)


def torch_dtype(config: TrainConfig) -> torch.dtype:
    """The torch dtype of the run's parameters and activations."""
    return {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}[config.dtype]


def gpt_config(config: TrainConfig) -> GPTConfig:
    """The GPT that GPTSource builds."""
    return GPTConfig(
        vocab_size=config.vocab,
        hidden=config.hidden,
        layers=config.layers,
        heads=config.heads,
        context=config.sequence_length,
    )
