"""A tied language model with a region for each pipeline stage, to train with `piper-owner train`.

    piper-owner train --model examples.annotated:build --placement v

Nothing here knows of pipelines but the lines with `annotate`: the model runs as it is on one device.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

import piper_owner


class Block(nn.Module):
    """Causal attention over heads, then an MLP, each added to what it is given."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(hidden)
        self.attention_in = nn.Linear(hidden, 3 * hidden)
        self.attention_out = nn.Linear(hidden, hidden)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.mlp_in = nn.Linear(hidden, 4 * hidden)
        self.mlp_out = nn.Linear(4 * hidden, hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        """(batch, sequence, hidden) -> the same shape."""
        batch, sequence, width = hidden.shape
        parts = self.attention_in(self.attention_norm(hidden)).split(width, dim=-1)
        query, key, value = (part.view(batch, sequence, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.attention_out(mixed.transpose(1, 2).reshape(batch, sequence, width))
        result: Tensor = hidden + self.mlp_out(functional.gelu(self.mlp_in(self.mlp_norm(hidden))))
        return result


class TiedModel(nn.Module):
    """A GPT whose head is its embedding: one region for the embedding, one a layer, one for the head."""

    def __init__(self, vocab_size: int, hidden: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, hidden)
        self.positions = nn.Embedding(1024, hidden)
        self.layers = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab_size, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Ids (batch, sequence) -> logits (batch, sequence, vocabulary)."""
        with piper_owner.annotate("PP"):
            places = torch.arange(ids.shape[1], device=ids.device)
            hidden = self.embed(ids) + self.positions(places)
        for layer in self.layers:
            with piper_owner.annotate("PP"):
                hidden = layer(hidden)
        with piper_owner.annotate("PP"):
            logits: Tensor = self.head(self.norm(hidden))
        return logits


def build(vocab_size: int) -> nn.Module:
    """The model that `--model examples.annotated:build` trains."""
    return TiedModel(vocab_size)
