"""Annotated models of the forms that tests of tracing and of training use."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

import piper_owner
from piper_owner.frontends.piper import TracedModel

VOCABULARY = 13
WIDTH = 6
LENGTH = 4


def run_segments(traced: TracedModel, *inputs: Tensor) -> tuple[Tensor, ...]:
    """All segments one after the other, each given what its ports say: the outputs of the model."""
    made: list[tuple[Tensor, ...]] = []
    for segment, ports in zip(traced.segments, traced.ports, strict=True):
        given = [
            inputs[source.index] if source.stage is None else made[source.stage][source.index]
            for source in ports.inputs
        ]
        result = segment(*given)
        made.append((result,) if isinstance(result, Tensor) else result)
        assert len(made[-1]) == ports.num_outputs
    return made[-1]


def random_ids(batch: int = 2, *, seed: int = 0) -> Tensor:
    """Ids (batch, LENGTH)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (batch, LENGTH), generator=generator)


class TwoRegions(nn.Module):
    """Embedding and a hidden layer; the tied head."""

    def __init__(self, vocab_size: int = VOCABULARY) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, WIDTH, padding_idx=0)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, vocab_size, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        with piper_owner.annotate("PP"):
            hidden = torch.tanh(self.hidden(self.embed(ids)))
        with piper_owner.annotate("PP"):
            return self.head(hidden)  # type: ignore[no-any-return]


class FourRegions(nn.Module):
    """A GPT in small: positions and a mask made outside regions, a loop, a read-only buffer."""

    def __init__(self, vocab_size: int = VOCABULARY) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocab_size, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1])
        mask = torch.ones(ids.shape[1], ids.shape[1]).tril() > 0
        with piper_owner.annotate("PP"):
            hidden = self.embed(ids) + self.places(places)
        for layer in self.layers:
            with piper_owner.annotate("PP"):
                scores = hidden @ layer(hidden).mT
                weights = scores.masked_fill(~mask, -1e9).softmax(-1)
                hidden = hidden + weights @ hidden * self.scale
        with piper_owner.annotate("PP"):
            return self.head(self.norm(hidden))  # type: ignore[no-any-return]


class EncoderDecoder(nn.Module):
    """T5 in small: one table as encoder embedding, decoder embedding and head."""

    def __init__(self, vocab_size: int = VOCABULARY) -> None:
        super().__init__()
        self.shared = nn.Embedding(vocab_size, WIDTH)
        self.encoder = nn.ModuleDict({"embed": self.shared, "layer": nn.Linear(WIDTH, WIDTH)})
        self.decoder = nn.ModuleDict({"embed": self.shared, "layer": nn.Linear(WIDTH, WIDTH)})
        self.head = nn.Linear(WIDTH, vocab_size, bias=False)
        self.head.weight = self.shared.weight

    def forward(self, ids: Tensor) -> Tensor:
        with piper_owner.annotate("PP"):
            memory = torch.tanh(self.encoder["layer"](self.encoder["embed"](ids)))
        with piper_owner.annotate("PP"):
            hidden = self.decoder["layer"](self.decoder["embed"](ids.roll(1, 1)))
        with piper_owner.annotate("PP"):
            hidden = hidden + (hidden @ memory.mT).softmax(-1) @ memory
        with piper_owner.annotate("PP"):
            return self.head(hidden)  # type: ignore[no-any-return]


class MultiToken(nn.Module):
    """A head for the next token, and a later one for the token after it, with the same embedding and head."""

    def __init__(self, vocab_size: int = VOCABULARY) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, WIDTH)
        self.trunk = nn.Linear(WIDTH, WIDTH)
        self.further = nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, vocab_size, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        with piper_owner.annotate("PP"):
            hidden = torch.tanh(self.trunk(self.embed(ids)))
        with piper_owner.annotate("PP"):
            first = self.head(hidden)
        shifted = torch.cat((ids[:, 1:], ids[:, :1]), dim=1)
        with piper_owner.annotate("PP"):
            hidden = torch.tanh(self.further(torch.cat((hidden, self.embed(shifted)), -1)))
        with piper_owner.annotate("PP"):
            return first, self.head(hidden)


class MultiTokenLogits(MultiToken):
    """The same with one output: what `--model` takes."""

    def forward(self, ids: Tensor) -> Tensor:  # type: ignore[override]
        first, second = super().forward(ids)
        return first + second


class SharedLayer(nn.Module):
    """ALBERT in small: one layer, by one name, in four regions."""

    def __init__(self, vocab_size: int = VOCABULARY) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, WIDTH)
        self.layer = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, vocab_size)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = ids
        for number in range(4):
            with piper_owner.annotate("PP"):
                if number == 0:
                    hidden = self.embed(ids)
                hidden = hidden + torch.tanh(self.layer(hidden))
                if number == 3:
                    hidden = self.head(hidden)
        return hidden


class Functional(nn.Module):
    """A tie that no module shows: one table, and functional calls on it."""

    def __init__(self, vocab_size: int = VOCABULARY) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        with piper_owner.annotate("PP"):
            hidden = self.embed(ids)
        with piper_owner.annotate("PP"):
            hidden = self.middle(hidden)
        with piper_owner.annotate("PP"):
            return functional.linear(hidden, self.embed.weight)


ALL_MODELS: Sequence[type[nn.Module]] = (
    TwoRegions,
    FourRegions,
    EncoderDecoder,
    MultiToken,
    MultiTokenLogits,
    SharedLayer,
    Functional,
)


def build_two(vocab_size: int) -> nn.Module:
    """For `--model annotated_models:build_two`."""
    return TwoRegions(vocab_size)
