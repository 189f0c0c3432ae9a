"""Annotated models: their regions become segments that together are the model, bit for bit."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from annotated_models import (
    ALL_MODELS,
    VOCABULARY,
    WIDTH,
    EncoderDecoder,
    FourRegions,
    Functional,
    MultiToken,
    SharedLayer,
    TwoRegions,
    random_ids,
    run_segments,
)
from torch import Tensor, nn
from torch._guards import TracingContext, tracing
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import piper_owner
from piper_owner import Tie
from piper_owner.errors import TieError
from piper_owner.executor.ports import StagePorts, ValueSource
from piper_owner.frontends.piper import TracedModel, trace
from piper_owner.frontends.piper.annotation import recording

IDS = ValueSource(index=0)


def made(model_type: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return model_type().double()


def results(outputs: tuple[Tensor, ...], model: nn.Module) -> list[Tensor]:
    """The outputs, and the gradients of their sum of squares."""
    model.zero_grad()
    torch.stack([output.square().sum() for output in outputs]).sum().backward()
    grads = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    return [*(output.detach() for output in outputs), *grads]


def names(traced: TracedModel) -> list[list[str]]:
    return [
        [name for name, _ in segment.named_parameters(remove_duplicate=False)] for segment in traced.segments
    ]


def assert_same(traced: TracedModel, model: nn.Module, *inputs: Tensor) -> None:
    """The segments, one after the other, are `model`, forward and backward, bit for bit."""
    whole = model(*inputs)
    expected = results((whole,) if isinstance(whole, Tensor) else whole, model)
    found = results(run_segments(traced, *inputs), model)
    assert len(found) == len(expected)
    assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))


@pytest.mark.parametrize("model_type", ALL_MODELS)
def test_segments_are_the_model(model_type: type[nn.Module]) -> None:
    model = made(model_type)
    traced = trace(model, random_ids(seed=1))
    assert_same(traced, model, random_ids(seed=2))


@pytest.mark.parametrize("model_type", ALL_MODELS)
def test_planning_on_the_meta_device_finds_the_same(model_type: type[nn.Module]) -> None:
    real = trace(made(model_type), random_ids())
    with torch.device("meta"):
        planned = trace(model_type(), torch.zeros(2, 4, dtype=torch.int64))
    assert (planned.ports, planned.ties, planned.tags, planned.dense) == (
        real.ports,
        real.ties,
        real.tags,
        real.dense,
    )
    assert names(planned) == names(real)
    assert all(p.is_meta for segment in planned.segments for p in segment.parameters())


def test_a_chain_of_four() -> None:
    model = made(FourRegions)
    traced = trace(model, random_ids())
    chain = [StagePorts(inputs=(ValueSource(index=0, stage=stage),)) for stage in range(3)]
    assert traced.ports == (StagePorts(inputs=(IDS,), ids=(0,)), *chain)
    assert traced.tags == ({"PP": 0}, {"PP": 1}, {"PP": 2}, {"PP": 3})
    assert traced.ties == (Tie(("embed.weight", "head.weight")),)
    assert traced.dense == {"places.weight"}, "looked up by positions, which are no input"
    assert names(traced) == [
        ["embed.weight", "places.weight"],
        ["layers.0.weight", "layers.0.bias"],
        ["layers.1.weight", "layers.1.bias"],
        ["norm.weight", "norm.bias", "head.weight"],
    ]
    assert traced.outputs == ((2, 4, VOCABULARY),)
    found = {id(p) for segment in traced.segments for p in segment.parameters()}
    assert found == {id(p) for p in model.parameters()}, "the segments hold the model's own parameters"
    saved = [list(segment.state_dict()) for segment in traced.segments]
    assert ["scale" in keys for keys in saved] == [False, True, False, False]


def test_an_embedding_stays_one_with_its_settings() -> None:
    embedding = trace(made(TwoRegions), random_ids()).segments[0].get_submodule("embed")
    assert isinstance(embedding, nn.Embedding)
    assert embedding.padding_idx == 0


def test_a_table_with_three_uses() -> None:
    traced = trace(made(EncoderDecoder), random_ids())
    (tie,) = traced.ties
    assert tie.names[0] == "shared.weight"
    assert set(tie.names) == {"shared.weight", "encoder.embed.weight", "decoder.embed.weight", "head.weight"}
    held = [[name for name in each if name in tie.names] for each in names(traced)]
    assert [len(each) for each in held] == [2, 1, 0, 1]
    assert sorted(name for each in held for name in each) == sorted(tie.names)
    assert [port.ids for port in traced.ports] == [(0,), (0,), (), ()], "shifted ids are ids of the input"
    assert not traced.dense
    assert traced.stage_edges == ((0, 2), (1, 2), (2, 3))


def test_a_head_used_twice_and_an_output_made_early() -> None:
    traced = trace(made(MultiToken), random_ids())
    (tie,) = traced.ties
    assert tie.names == ("embed.weight", "head.weight", "embed@PP2.weight", "head@PP3.weight")
    held = [[name for name in each if name in tie.names] for each in names(traced)]
    assert held == [["embed.weight"], ["head.weight"], ["embed@PP2.weight"], ["head@PP3.weight"]]
    assert [port.num_outputs for port in traced.ports] == [1, 1, 1, 2]
    assert [port.ids for port in traced.ports] == [(0,), (), (0,), ()]
    assert traced.stage_edges == ((0, 1), (0, 2), (1, 3), (2, 3))


def test_a_layer_with_one_name_in_four_regions() -> None:
    traced = trace(made(SharedLayer), random_ids())
    assert [tie.names for tie in traced.ties] == [
        (f"layer.{leaf}", *(f"layer.{leaf.replace('.', f'@PP{region}.')}" for region in (1, 2, 3)))
        for leaf in ("0.weight", "0.bias", "1.weight", "1.bias")
    ]
    assert names(traced)[2] == [
        f"layer.{leaf}" for leaf in ("0@PP2.weight", "0@PP2.bias", "1@PP2.weight", "1@PP2.bias")
    ]
    shared = {id(p) for p in traced.segments[1].parameters()}
    assert shared == {id(p) for p in traced.segments[2].parameters()}


def test_a_tie_that_only_a_functional_call_shows() -> None:
    traced = trace(made(Functional), random_ids())
    assert traced.ties == (Tie(("embed.weight", "embed@PP2.weight")),)
    assert names(traced) == [["embed.weight"], ["middle.weight", "middle.bias"], ["embed@PP2.weight"]]


def test_equal_values_are_no_tie() -> None:
    model = TwoRegions()
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    assert trace(model, random_ids()).ties == ()


def test_two_parameters_over_one_memory_are_refused() -> None:
    model = TwoRegions()
    model.head.weight = nn.Parameter(model.embed.weight.data)
    with pytest.raises(TieError, match="over the same memory"):
        trace(model, random_ids())


class Unused(nn.Module):
    """Names that no operation reaches, and a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(VOCABULARY, WIDTH)
        self.alias = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.alias.weight = self.first.weight
        self.idle = nn.Parameter(torch.ones(2))

    def forward(self, ids: Tensor) -> Tensor:
        with piper_owner.annotate("PP"):
            hidden = self.first(ids)
        with piper_owner.annotate("PP"):
            return hidden * 2  # type: ignore[no-any-return]


def test_every_name_of_the_model_is_in_a_segment() -> None:
    model = Unused()
    traced = trace(model, random_ids())
    assert sorted(names(traced)[0]) == ["alias.weight", "first.weight", "idle"]
    assert isinstance(traced.segments[0].get_submodule("alias"), nn.Embedding), "its only use is a lookup"
    assert not traced.dense


def test_tracing_changes_nothing_and_works_again() -> None:
    model = made(FourRegions)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    other = trace(made(SharedLayer), random_ids())
    first, second = trace(model, random_ids()), trace(model, random_ids(3))
    assert first.ports == second.ports
    assert second.outputs == ((3, 4, VOCABULARY),)
    assert len(other.segments) == 4
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert_same(second, model, random_ids(3))


def test_segments_can_be_copied_and_pickled() -> None:
    model = made(TwoRegions)
    traced, ids = trace(model, random_ids()), random_ids(seed=3)
    copied = copy.deepcopy(traced.segments)
    loaded = pickle.loads(pickle.dumps(traced.segments))
    for segments in (copied, loaded):
        assert torch.equal(segments[1](segments[0](ids)), model(ids))
        assert segments[0].get_parameter("embed.weight") is segments[1].get_parameter("head.weight")
        assert segments[0].get_parameter("embed.weight") is not model.get_parameter("embed.weight")


class Contexts(nn.Module):
    """Modes of torch, a checkpointed call, and layers split and joined, around and across regions."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with piper_owner.annotate("PP"):
                hidden = checkpoint(self.one, x, use_reentrant=False)
                assert isinstance(hidden, Tensor)
                left, right = hidden.split(WIDTH // 2, -1)
            with piper_owner.annotate("PP"):
                hidden = self.two(torch.cat((right, left), -1))
                with torch.no_grad():
                    fixed = self.three(hidden)
        with torch.no_grad(), piper_owner.annotate("PP"):
            norm = fixed.float().norm()
        with piper_owner.annotate("PP"):
            return self.three(hidden.float()) / norm, left


def test_modes_and_checkpoints_across_regions() -> None:
    model = Contexts()
    traced = trace(model, torch.randn(2, WIDTH))
    inputs = torch.randn(2, WIDTH)
    expected, found = model(inputs), run_segments(traced, inputs)
    assert [value.dtype for value in found] == [torch.float32, torch.bfloat16]
    assert results(found, model)[0].equal(results(expected, model)[0])
    assert_same(traced, model, inputs)
    assert torch.is_grad_enabled()


class TwoInputs(nn.Module):
    """Two inputs, a region of another tag, a written buffer and a norm with running statistics."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        doubled = x * 2
        with piper_owner.annotate("PP"):
            self.count.add_(1)
            hidden = self.norm(doubled)
        with piper_owner.annotate("EP"), piper_owner.annotate("PP"):
            hidden = self.layer(hidden) + y
        with piper_owner.annotate("PP"):
            with piper_owner.annotate("EP"):
                hidden = hidden + x
            with piper_owner.annotate("EP"):
                hidden = functional.relu(hidden * y, inplace=True)
        return hidden.sum()


def test_inputs_buffers_and_other_tags() -> None:
    model, twin = TwoInputs().double(), TwoInputs().double()
    twin.load_state_dict(model.state_dict())
    x, y = torch.randn(3, WIDTH).double(), torch.randn(3, WIDTH).double()
    traced = trace(model, x, y)
    assert traced.ports[0].inputs == (IDS,)
    assert traced.ports[1].inputs == (ValueSource(index=1), ValueSource(index=0, stage=0))
    assert traced.tags == ({"PP": 0}, {"PP": 1, "EP": 0}, {"PP": 2})
    assert all(port.ids == () for port in traced.ports)
    for _ in range(2):
        assert torch.equal(run_segments(traced, x, y)[0], twin(x, y))
    assert model.count == 2
    assert torch.equal(model.get_buffer("norm.running_mean"), twin.get_buffer("norm.running_mean"))
    assert "norm.running_mean" in traced.segments[0].state_dict()


def test_one_tensor_for_two_inputs() -> None:
    model, x = TwoInputs(), torch.randn(3, WIDTH)
    assert trace(model, x, x).ports[1].inputs[0] == ValueSource(index=1)


def test_eager_running_does_not_see_regions() -> None:
    region = piper_owner.annotate("PP")
    assert region is piper_owner.annotate("PP"), "nothing is made for an entry"
    with region:
        pass
    model = made(TwoRegions)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(random_ids()), model(random_ids()))


@pytest.mark.parametrize("tag", ["", "PASS", 3])
def test_tags_are_names(tag: str) -> None:
    with pytest.raises(ValueError, match="a tag is a name"):
        piper_owner.annotate(tag)


def test_the_line_of_each_region_is_known() -> None:
    traced = trace(made(TwoRegions), random_ids())
    assert all(str(Path(__file__).with_name("annotated_models.py")) in line for line in traced.lines)
    assert traced.lines[0] != traced.lines[1]


def test_a_trace_that_starts_anew_numbers_its_regions_anew() -> None:
    with recording() as recorder:
        for entries in (2, 3):  # Dynamo gives up the first attempt and traces from the start
            with tracing(TracingContext(None)):
                assert [recorder.enter("PP") for _ in range(entries)] == list(range(entries))
        assert len(recorder.regions("PP")) == 3
    assert piper_owner.annotate("PP") is piper_owner.annotate("PP")
