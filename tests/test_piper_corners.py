"""Annotated models with frozen, sparse or hooked parameters, and with constant or complex values."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from tiny import one_torch_thread
from torch import Tensor, nn

from piper_owner import ConfigError, TraceError, annotate
from piper_owner.executor.config import RunKind, TrainConfig
from piper_owner.executor.local import train_in_process
from piper_owner.executor.plan import plan_run, resolve_run
from piper_owner.executor.results import TrainResult, compare
from piper_owner.executor.stream import token_stream
from piper_owner.frontends.piper.source import AnnotatedModel

WIDTH: Final = 6
TOKENS: Final = np.random.default_rng(0).integers(0, 256, 2000).astype(np.int32)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


class Base(nn.Module):
    """An embedding, a layer, and a tied head, in three regions."""

    def __init__(self, vocab_size: int, *, sparse: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, WIDTH, sparse=sparse)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, vocab_size, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        with annotate("PP"):
            hidden = self.embed(ids)
        with annotate("PP"):
            hidden = torch.tanh(self.layers[0](hidden))
        with annotate("PP"):
            return self.head(hidden)  # type: ignore[no-any-return]


class Constants(Base):
    """Tensors made of numbers in forward: inside a region, between two, and of another dtype."""

    def forward(self, ids: Tensor) -> Tensor:
        scale = torch.tensor(2.0)
        with annotate("PP"):
            hidden = self.embed(ids) * torch.tensor([1.0, 2, 3, 4, 5, 6])
        with annotate("PP"):
            hidden = torch.tanh(self.layers[0](hidden)) * torch.tensor([0.5]).to(hidden)
        with annotate("PP"):
            return self.head(hidden * scale)  # type: ignore[no-any-return]


class Slices(Base):
    """Part of a ModuleList is a ModuleList of its own, which is made while forward runs."""

    def forward(self, ids: Tensor) -> Tensor:
        with annotate("PP"):
            hidden = self.layers[0](self.embed(ids))
        for layer in self.layers[1:]:
            with annotate("PP"):
                hidden = torch.tanh(layer(hidden))
        with annotate("PP"):
            return self.head(hidden)  # type: ignore[no-any-return]


class EmptySlice(Base):
    """A region that makes such a list and nothing else."""

    def forward(self, ids: Tensor) -> Tensor:
        with annotate("PP"):
            hidden = self.embed(ids)
        with annotate("PP"):
            layers = self.layers[1:]
        with annotate("PP"):
            return self.head(layers[0](hidden))  # type: ignore[no-any-return]


class Frozen(Base):
    """The tie needs no gradient; a second one does."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.embed.weight.requires_grad_(False)


class Untied(Base):
    """A sparse embedding that nothing else uses."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size, sparse=True)
        self.head.weight = nn.Parameter(torch.randn(vocab_size, WIDTH))


class TwoLookups(Untied):
    """A tie of two sparse embeddings."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.again = nn.Embedding(vocab_size, WIDTH, sparse=True)
        self.again.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        with annotate("PP"):
            hidden = self.embed(ids)
        with annotate("PP"):
            hidden = torch.tanh(self.layers[0](hidden)) + self.again(ids)
        with annotate("PP"):
            return self.head(hidden)  # type: ignore[no-any-return]


class SparseTied(Base):
    """The head's gradient is dense, and so is the sum."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size, sparse=True)


class Hooked(Base):
    """A hook halves the tied gradient."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.embed.weight.register_hook(lambda grad: grad / 2)


class HookedAfter(Base):
    """A hook looks at the tied gradient when it is there."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.embed.weight.register_post_accumulate_grad_hook(lambda weight: None)


class HookedLayer(Base):
    """A hook halves the gradient of what one stage holds."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.layers.get_parameter("0.weight").register_hook(lambda grad: grad / 2)


class Complex(Base):
    """Complex numbers go from one region to the next."""

    def forward(self, ids: Tensor) -> Tensor:
        with annotate("PP"):
            turned = torch.view_as_complex(torch.unflatten(self.embed(ids), -1, (-1, 2)))  # made here
        with annotate("PP"):
            return self.head(torch.view_as_real(turned * turned).flatten(-2))  # type: ignore[no-any-return]


class ComplexInside(Base):
    """Complex numbers stay in their region, as in a rotary embedding."""

    def forward(self, ids: Tensor) -> Tensor:
        with annotate("PP"):
            turned = torch.view_as_complex(torch.unflatten(self.embed(ids), -1, (-1, 2)))
            hidden = torch.view_as_real(turned * turned).flatten(-2)
        with annotate("PP"):
            return self.head(hidden)  # type: ignore[no-any-return]


def source_of(model_type: type[nn.Module]) -> AnnotatedModel:
    return AnnotatedModel(
        target=f"{Path(__file__).stem}:{model_type.__name__}", folder=str(Path(__file__).parent)
    )


def config_of(**changes: Any) -> TrainConfig:  # noqa: ANN401 - fields of a config
    small: dict[str, Any] = {
        "microbatches": 2, "microbatch_size": 1, "sequence_length": 4, "vocab": 256, "steps": 3,
        "dtype": "float64", "timeout_seconds": 20,
    }  # fmt: skip
    return TrainConfig(**{**small, **changes})


def train(model_type: type[nn.Module], **changes: Any) -> TrainResult:  # noqa: ANN401 - fields of a config
    config, source = config_of(**changes), source_of(model_type)
    stream = token_stream(resolve_run(config, source), TOKENS)
    result = train_in_process(config, stream, compare=(RunKind.REFERENCE,), source=source)
    differences = compare(result.runs, result.ownership)
    assert differences.loss[RunKind.OWNER] <= 1e-10
    assert differences.param[RunKind.OWNER] <= 1e-10
    assert result.replicas_equal
    return result


@pytest.mark.parametrize("model_type", [Constants, Slices, HookedLayer, ComplexInside])
def test_they_train_as_in_one_process(model_type: type[nn.Module]) -> None:
    train(model_type)


@pytest.mark.parametrize("more", [{}, {"dp": 2}, {"dp": 2, "scope": "global"}, {"clip": 0.1}])
def test_a_frozen_tie_is_kept_whole_and_costs_no_message(more: dict[str, Any]) -> None:
    result = train(Frozen, **more)
    assert [tie.row_replicas for tie in result.ownership.ties] == [()]
    sent = result.runs[RunKind.OWNER].bytes_sent_per_step.values()
    assert all(each.grads == each.weights == each.rows == each.ids == 0 for each in sent)


def test_no_rows_of_a_frozen_tie() -> None:
    with pytest.raises(ConfigError, match=r"--layout rows, and embed\.weight is frozen.*auto or dense"):
        plan_run(config_of(layout="rows"), RunKind.OWNER, source_of(Frozen))


@pytest.mark.parametrize("model_type", [Untied, TwoLookups, SparseTied])
@pytest.mark.parametrize("more", [{}, {"dp": 2}, {"dp": 2, "scope": "global"}])
def test_sparse_embeddings_under_sgd(model_type: type[nn.Module], more: dict[str, Any]) -> None:
    train(model_type, optimizer="sgd", **more)


def test_a_sparse_embedding_with_a_tied_head_has_a_dense_gradient() -> None:
    train(SparseTied, clip=0.1)


@pytest.mark.parametrize("model_type", [Untied, TwoLookups])
@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({}, "--optimizer adamw: embed.weight is an nn.Embedding with sparse=True"),
        ({"optimizer": "sgd", "clip": 0.1}, "--clip 0.1: embed.weight is an nn.Embedding with sparse=True"),
    ],
)
def test_sparse_gradients_are_refused_where_torch_takes_none(
    model_type: type[nn.Module], more: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        plan_run(config_of(**more), RunKind.OWNER, source_of(model_type))


@pytest.mark.parametrize("model_type", [Hooked, HookedAfter])
def test_hooks_of_a_tie_are_refused(model_type: type[nn.Module]) -> None:
    with pytest.raises(ConfigError, match=r"embed\.weight has a gradient hook, and 2 regions use it"):
        plan_run(config_of(), RunKind.OWNER, source_of(model_type))


def test_complex_values_do_not_cross() -> None:
    with pytest.raises(TraceError, match=r"# made here`: PP region 1 takes a complex128.*view_as_real"):
        plan_run(config_of(), RunKind.OWNER, source_of(Complex))


def test_a_region_that_only_makes_a_list_of_modules_computes_nothing() -> None:
    with pytest.raises(TraceError, match="PP region 1 computes nothing"):
        plan_run(config_of(), RunKind.OWNER, source_of(EmptySlice))
