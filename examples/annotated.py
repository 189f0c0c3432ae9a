"""A tied language model with a region for each pipeline stage, to train with `piper-owner train`:

piper-owner train --model examples.annotated:build --schedule zbv --placement v

Nothing here knows of pipelines but the lines with `annotate`: the model runs as it is on one device.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from piper_owner import annotate  # <-- piper-owner


class TiedModel(nn.Module):
    """A GPT whose head is its embedding: one region for the embedding, one a layer, one for the head."""

    def __init__(self, vocab_size: int, hidden: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, hidden)
        self.positions = nn.Embedding(1024, hidden)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                hidden, heads, 4 * hidden, dropout=0.0, batch_first=True, norm_first=True, bias=False
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab_size, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Ids (batch, sequence) -> logits (batch, sequence, vocabulary)."""
        length = ids.shape[1]
        with annotate("PP"):
            hidden = self.embed(ids) + self.positions(torch.arange(length, device=ids.device))
        later = nn.Transformer.generate_square_subsequent_mask(length, ids.device, hidden.dtype)
        for layer in self.layers:
            with annotate("PP"):
                hidden = layer(hidden, src_mask=later, is_causal=True)
        with annotate("PP"):
            logits: Tensor = self.head(self.norm(hidden))
        return logits


def build(vocab_size: int) -> nn.Module:
    """The model that `--model examples.annotated:build` trains."""
    return TiedModel(vocab_size)
