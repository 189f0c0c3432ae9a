"""A tied language model in one piece or as two stages, and its batches: the same on every process."""

from __future__ import annotations

import math
import zlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piper_owner.gpu_check.sizes import Sizes

__all__ = ["TIE", "Model", "batch", "build_model", "build_stage", "loss_of"]

TIE = ("embed.weight", "head.weight")


class _Block(nn.Module):
    """Causal self-attention and an MLP, each behind a norm and added to what it read."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(hidden)
        self.mixing = nn.Linear(hidden, 3 * hidden, bias=False)
        self.mixed = nn.Linear(hidden, hidden)
        self.mlp = nn.Sequential(
            nn.LayerNorm(hidden), nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden)
        )

    def forward(self, rows: Tensor) -> Tensor:
        size, sequence, hidden = rows.shape
        parts = self.mixing(self.norm(rows)).view(size, sequence, 3, self.heads, hidden // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        rows = rows + self.mixed(mixed.transpose(1, 2).reshape(size, sequence, hidden))
        out: Tensor = rows + self.mlp(rows)
        return out


class Model(nn.Module):
    """The layers `first` to `last` (excluded), behind the embedding or before the head at either end."""

    def __init__(self, sizes: Sizes, first: int, last: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(sizes.vocab, sizes.hidden) if first == 0 else None
        self.blocks = nn.ModuleDict(
            {str(index): _Block(sizes.hidden, sizes.heads) for index in range(first, last)}
        )
        is_last = last == sizes.layers
        self.norm = nn.LayerNorm(sizes.hidden) if is_last else None
        self.head = nn.Linear(sizes.hidden, sizes.vocab, bias=False) if is_last else None

    def forward(self, rows: Tensor) -> Tensor:
        if self.embed is not None:
            rows = self.embed(rows)
        for block in self.blocks.values():
            rows = block(rows)
        if self.norm is not None and self.head is not None:
            rows = self.head(self.norm(rows))
        return rows


def build_model(sizes: Sizes) -> Model:
    """The whole model, one table for embedding and head, on the CPU in float32."""
    model = _with_values(Model(sizes, 0, sizes.layers))
    assert model.embed is not None
    assert model.head is not None
    model.head.weight = model.embed.weight
    return model


def build_stage(sizes: Sizes, stage: int) -> Model:
    """Stage 0 or 1 of two, with tables of their own, of the same values as the whole model."""
    middle = sizes.layers // 2
    return _with_values(Model(sizes, 0, middle) if stage == 0 else Model(sizes, middle, sizes.layers))


@torch.no_grad()
def _with_values(model: Model) -> Model:
    """Give every weight a value that depends on its name alone; biases are 0."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            seed = zlib.crc32((TIE[0] if name in TIE else name).encode())
            parameter.normal_(0.0, 0.5 / math.sqrt(parameter.shape[1]), generator=_seeded(seed))
        elif name.endswith("bias"):
            parameter.zero_()
    return model


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batch(sizes: Sizes, step: int) -> tuple[Tensor, Tensor]:
    """ids and labels of a step, (microbatches, microbatch size, sequence) each, int64, on the CPU.

    Odd and even steps have a batch each, so that there is something to learn.
    """
    shape = (sizes.microbatches, sizes.microbatch_size, sizes.sequence)
    ids = torch.randint(sizes.vocab, shape, generator=_seeded(step % 2))
    return ids, (ids * 7 + 1) % sizes.vocab


def loss_of(logits: Tensor, labels: Tensor, sizes: Sizes) -> Tensor:
    """The share of a microbatch in the mean loss of its batch."""
    total = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")
    return total / sizes.num_tokens
