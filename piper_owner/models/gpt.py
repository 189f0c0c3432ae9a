"""A small GPT whose head is its input embedding, built whole or one pipeline stage at a time.

Pre-norm blocks, causal self-attention, a GELU MLP four times as wide, learnt positions, no
dropout. One definition serves both uses: `build_model` is the only stage of a pipeline of one.
Parameters have the same names and the same starting values however the model is split: each is
drawn from a generator of its own, seeded by its canonical name, in float64, then cast.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piper_owner.data.batches import IGNORED
from piper_owner.errors import ConfigError
from piper_owner.ownership import Tie
from piper_owner.planning.balance import split_layers

__all__ = ["TIE", "GPTConfig", "GPTStage", "build_model", "build_stage", "lm_loss", "split_layers"]

TIE: Final = Tie(("embed.weight", "head.weight"))
"""The embedding's table and the head's matrix are one parameter."""

_STD: Final = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """Sizes of a GPT: `vocab_size` x `hidden` table, `layers` blocks, sequences up to `context`.

    Raises ConfigError for a size below 1, and for heads that do not divide `hidden`.
    """

    vocab_size: int
    hidden: int
    layers: int
    heads: int
    context: int

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden", "layers", "heads", "context"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: a GPT needs at least 1")
        if self.hidden % self.heads:
            raise ConfigError(f"hidden={self.hidden} is not a multiple of heads={self.heads}")


class _Attention(nn.Module):
    """Causal self-attention: (batch, sequence, hidden) to the same."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        # Without bias: the softmax cancels what a key bias adds, so its gradient would be rounding noise.
        self.query_key_value = nn.Linear(config.hidden, 3 * config.hidden, bias=False)
        self.projection = nn.Linear(config.hidden, config.hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, sequence, width = hidden.shape
        split = self.query_key_value(hidden).view(batch, sequence, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.projection(mixed.transpose(1, 2).reshape(batch, sequence, width))
        return out


class _MLP(nn.Module):
    """Two linear maps with a GELU between, four times as wide inside."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.expand = nn.Linear(config.hidden, 4 * config.hidden)
        self.projection = nn.Linear(4 * config.hidden, config.hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.projection(F.gelu(self.expand(hidden)))
        return out


class _Block(nn.Module):
    """One pre-norm layer: attention, then MLP, each added to what it read."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden)
        self.attention = _Attention(config)
        self.mlp_norm = nn.LayerNorm(config.hidden)
        self.mlp = _MLP(config)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        out: Tensor = hidden + self.mlp(self.mlp_norm(hidden))
        return out


class GPTStage(nn.Module):
    """The part of a GPT that one pipeline stage holds, under the full model's names.

    The first stage takes int64 ids (batch, sequence), any other the hidden states (batch,
    sequence, hidden) of the stage before it. The last gives logits (batch, sequence,
    vocab_size), any other hidden states. A stage that is first and last has one Parameter for
    embedding and head; a last stage alone has its own, `head.weight`.

    Use `build_stage`, which also sets the starting values.
    """

    def __init__(self, config: GPTConfig, layers: range, *, first: bool, last: bool) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden) if first else None
        self.positions = nn.Embedding(config.context, config.hidden) if first else None
        self.blocks = nn.ModuleDict({str(layer): _Block(config) for layer in layers})
        self.norm = nn.LayerNorm(config.hidden) if last else None
        self.head = nn.Linear(config.hidden, config.vocab_size, bias=False) if last else None
        self.tie()

    def tie(self) -> None:
        """Make embedding and head one Parameter again, where both are here."""
        if self.embed is not None and self.head is not None:
            self.head.weight = self.embed.weight

    def forward(self, inputs: Tensor) -> Tensor:
        """Ids or hidden states in, hidden states or logits out.

        Raises ConfigError for a sequence longer than the context.
        """
        hidden = inputs
        if self.embed is not None and self.positions is not None:
            sequence = inputs.shape[1]
            if sequence > self.config.context:
                raise ConfigError(
                    f"a sequence of {sequence} tokens is longer than the model's context of "
                    f"{self.config.context}; cut it, or build the model with a longer context"
                )
            hidden = self.embed(inputs) + self.positions(torch.arange(sequence, device=inputs.device))
        for block in self.blocks.values():
            hidden = block(hidden)
        if self.norm is not None and self.head is not None:
            hidden = self.head(self.norm(hidden))
        return hidden


def build_stage(
    config: GPTConfig,
    stage: int,
    num_stages: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> GPTStage:
    """Stage `stage` of `num_stages`, with its starting values. Local.

    The values depend on `seed` and the parameters' names only: every split, dtype and device
    starts from the same draws, and all copies of a tied parameter from the same ones. The global
    random state is neither read nor changed. On the meta device there are no values.

    Raises ConfigError for a stage out of range or layers that do not split so.
    """
    if not 0 <= stage < num_stages:
        raise ConfigError(f"stage {stage} of {num_stages}: stages count from 0 to {num_stages - 1}")
    layers = split_layers(config.layers, num_stages)[stage]
    with torch.device("meta"):
        module = GPTStage(config, layers, first=stage == 0, last=stage == num_stages - 1)
    module.to(dtype)
    if torch.device(device).type != "meta":
        module.to_empty(device=device)
    # Leaving the meta device gives every module a Parameter of its own.
    module.tie()
    if torch.device(device).type != "meta":
        _set_starting_values(module, seed)
    return module


def build_model(
    config: GPTConfig,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> GPTStage:
    """The whole model: the only stage of a pipeline of one; see `build_stage`."""
    return build_stage(config, 0, 1, dtype=dtype, device=device, seed=seed)


def _set_starting_values(module: GPTStage, seed: int) -> None:
    for name, parameter in module.named_parameters():
        with torch.no_grad():
            parameter.copy_(_starting_value(name, tuple(parameter.shape), module.config, seed))


def _starting_value(name: str, shape: tuple[int, ...], config: GPTConfig, seed: int) -> Tensor:
    if name.endswith(".bias"):
        return torch.zeros(shape, dtype=torch.float64)
    if name.endswith("norm.weight"):
        return torch.ones(shape, dtype=torch.float64)
    canonical = TIE.name if name in TIE.names else name
    digest = hashlib.blake2b(f"{seed} {canonical}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
    # Each block adds twice to the residual stream; this keeps its variance apart from the depth.
    std = _STD / math.sqrt(2 * config.layers) if name.endswith("projection.weight") else _STD
    return torch.empty(shape, dtype=torch.float64).normal_(0.0, std, generator=generator)


def lm_loss(logits: Tensor, labels: Tensor, *, num_tokens: int) -> Tensor:
    """The share of one microbatch in the mean loss of a batch; a scalar.

    Cross entropy of `logits` (batch, sequence, vocab_size) against int64 `labels` (batch,
    sequence), summed, divided by `num_tokens`, the labels of the *whole batch* that count: the
    sum over microbatches is the mean over tokens, however they are spread. Labels of -100 are
    left out; a batch without any label gives 0, with zero gradients. Computed in float32, or in
    float64 for float64 logits.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = F.cross_entropy(wide.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return total / max(num_tokens, 1)
