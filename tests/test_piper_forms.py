"""Less usual forms of annotated models that are supported too; the segments are the model, bit for bit."""

from __future__ import annotations

import pytest
import torch
from annotated_models import VOCABULARY, WIDTH, random_ids, run_segments
from torch import Tensor, nn
from torch.nn import functional

from piper_owner import Tie, annotate
from piper_owner.executor.ports import ValueSource
from piper_owner.frontends.piper import TracedModel, trace


def check(model: nn.Module, *inputs: Tensor) -> TracedModel:
    """Trace `model` and compare outputs and gradients."""
    torch.manual_seed(0)
    traced = trace(model, *inputs)
    results = []
    for outputs in (model(*inputs), run_segments(traced, *inputs)):
        model.zero_grad()
        values = (outputs,) if isinstance(outputs, Tensor) else outputs
        torch.stack([value.double().square().sum() for value in values]).sum().backward()
        results.append([*values, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(results[0]) == len(results[1])
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)
    return traced


class Layer(nn.Module):
    """A region in a submodule's own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        with annotate("PP"):
            return self.inner(x)  # type: ignore[no-any-return]


class Scaled(nn.Embedding):
    """A subclass with a forward of its own."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 3


class InSubmodules(nn.Module):
    """Regions in submodules; the embedding before and the head after them stand outside."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Scaled(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = hidden @ self.embed.weight.T
        return logits


def test_regions_in_submodules_and_operations_around_them() -> None:
    traced = check(InSubmodules(), random_ids())
    assert len(traced.segments) == 2
    assert traced.ties == (Tie(("embed.weight", "embed@PP1.weight")),)
    assert traced.ports[0].ids == (0,)
    assert not traced.dense
    assert isinstance(traced.segments[0].get_submodule("embed"), nn.Embedding)


class TwoSettings(nn.Module):
    """One table, looked up in one region with and without padding, and by computed ids in another."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        with annotate("PP"):
            hidden = self.embed(ids) + functional.embedding(ids, self.embed.weight, padding_idx=2)
        with annotate("PP"):
            return hidden + self.embed((ids + 1) % VOCABULARY)  # type: ignore[no-any-return]


def test_lookups_that_cannot_keep_rows_are_dense() -> None:
    traced = check(TwoSettings(), random_ids())
    assert traced.dense == {"embed.weight", "embed@PP1.weight"}
    assert traced.ports[1].ids == ()


class OnlyParameters(nn.Module):
    """A region that takes nothing: it makes a value of its parameters alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, WIDTH))
        self.embed = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        with annotate("PP"):
            places = torch.tanh(self.table)
        with annotate("PP"):
            return self.embed(ids) + places  # type: ignore[no-any-return]


def test_a_region_without_values_is_given_an_input() -> None:
    traced = check(OnlyParameters(), random_ids())
    assert traced.ports[0].inputs == (ValueSource(index=0),)
    assert traced.ports[0].ids == ()
    assert traced.stage_edges == ((0, 1),)


class Between(nn.Module):
    """Operations between regions, a recurrent layer, a parameter and an input as outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.cell = nn.Linear(WIDTH, WIDTH), nn.LSTM(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.calls = 0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.calls += 1
        with annotate("PP"):
            hidden = self.first(x)
        hidden = (hidden * self.scale).relu()
        halves = hidden.view(2, -1)
        with annotate("PP"):
            hidden = self.cell(halves.view_as(x))[0]
        shown = x.flatten()
        with annotate("PP"):
            return hidden.flatten() * shown, self.scale, x


def test_operations_between_regions_and_outputs_of_every_kind() -> None:
    model = Between()
    traced = check(model, torch.randn(2, WIDTH))
    assert model.calls == 1, "tracing does not count"
    names = [name for name, _ in traced.segments[0].named_parameters()]
    assert names == ["scale", "first.weight", "first.bias"], "what follows region 0 joins it"
    assert traced.ties == (Tie(("scale", "scale@PP2")),)
    assert traced.ports[2].num_outputs == 3
    assert ValueSource(index=0) in traced.ports[2].inputs


class Wrapper(nn.Module):
    """Names what it wraps as DistributedDataParallel does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)  # type: ignore[no-any-return]


class Wrapped(nn.Module):
    """One wrapped layer in two regions."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Wrapper(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with annotate("PP"):
            x = self.part(x)
        with annotate("PP"):
            return self.part(x)  # type: ignore[no-any-return]


def test_names_are_without_those_of_wrappers() -> None:
    traced = check(Wrapped(), torch.randn(2, WIDTH))
    assert [tie.names for tie in traced.ties] == [
        ("part.weight", "part@PP1.weight"),
        ("part.bias", "part@PP1.bias"),
    ]


@pytest.mark.parametrize("num_regions", [24])
def test_many_regions(num_regions: int) -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_regions))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                with annotate("PP"):
                    x = torch.tanh(layer(x))
            return x

    traced = check(Deep(), torch.randn(2, WIDTH))
    assert traced.tags == tuple({"PP": number} for number in range(num_regions))
