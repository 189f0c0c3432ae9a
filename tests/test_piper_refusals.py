"""Annotated models that cannot be split: one clear error each, which names the line to change."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from piper_owner import InputError, TraceError, annotate
from piper_owner.frontends.piper import trace

WIDTH = 4


def line_of(code: str) -> str:
    """`file:line: code` of the only line of this file that is `code`."""
    lines = [line.strip() for line in Path(__file__).read_text().splitlines()]
    assert lines.count(code) == 1, code
    return f"{__file__}:{lines.index(code) + 1}: `{code}`"


class Model(nn.Module):
    """Runs `body` with itself and its input."""

    count: Tensor

    def __init__(self, body: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(WIDTH))
        self.part = self.count[:2]
        self.kept: Tensor | None = None
        self.body = body

    def forward(self, x: Tensor) -> Any:  # noqa: ANN401
        return self.body(self, x)


def branch(m: Model, x: Tensor) -> Tensor:
    with annotate("PP"):
        x = m.layer(x)
        if x.sum() > 0:
            x = -x
    with annotate("PP"):
        return x + 1


def break_graph(m: Model, x: Tensor) -> Tensor:
    with annotate("PP"):
        x = m.layer(x)
        print("an activation")
    with annotate("PP"):
        return x + 1


def fail(m: Model, x: Tensor) -> Tensor:
    with annotate("PP"):
        raise RuntimeError("no such layer")


def wrong_shape(m: Model, x: Tensor) -> Tensor:
    with annotate("PP"):
        return m.layer(x[:, :1])  # type: ignore[no-any-return]


def nest(m: Model, x: Tensor) -> Tensor:
    with annotate("PP"):
        x = m.layer(x)
        with annotate("PP"):  # inside
            x = m.other(x)
    return x


def between(m: Model, x: Tensor) -> Tensor:
    with annotate("PP"):
        skip = m.layer(x)
    with annotate("PP"):
        x = m.other(skip)
    x = x + skip
    with annotate("PP"):
        return x * 2


def no_region(m: Model, x: Tensor) -> Tensor:
    return m.layer(x)  # type: ignore[no-any-return]


def other_tag(m: Model, x: Tensor) -> Tensor:
    with annotate("EP"):
        return m.layer(x)  # type: ignore[no-any-return]


def empty(m: Model, x: Tensor) -> Tensor:
    with annotate("PP"):
        x = m.layer(x)
    with annotate("PP"):  # nothing in it
        pass
    with annotate("PP"):
        return m.other(x)  # type: ignore[no-any-return]


def unused(m: Model, x: Tensor) -> Tensor:
    with annotate("PP"):
        y = m.layer(x)
    with annotate("PP"):  # for nobody
        m.kept = None
        m.count.add_(y.detach().sum())
    with annotate("PP"):
        return m.other(y)  # type: ignore[no-any-return]


def write_received(m: Model, x: Tensor) -> Tensor:
    with annotate("PP"):
        x = m.layer(x)
    with annotate("PP"):
        return x.mul_(2)


def write_view_of_received(m: Model, x: Tensor) -> Tensor:
    with annotate("PP"):
        x = m.layer(x)
    with annotate("PP"):
        x[0] += 1
        return x * 2


def write_input(m: Model, x: Tensor) -> Tensor:
    with annotate("PP"):
        x.add_(1)
        y = m.layer(x)
    with annotate("PP"):
        return m.other(y)  # type: ignore[no-any-return]


def write_shared_buffer(m: Model, x: Tensor) -> Tensor:
    with annotate("PP"):
        x = m.layer(x) + m.count
    with annotate("PP"):
        m.count.add_(x.detach().sum(0))
        return x * 2


def write_alias_of_shared_buffer(m: Model, x: Tensor) -> Tensor:
    with annotate("PP"):
        x = m.layer(x) + m.count
    with annotate("PP"):
        m.part.add_(1)
        return x * 2


def limit_norm(m: Model, x: Tensor) -> Tensor:
    with annotate("PP"):
        x = x + nn.functional.embedding(torch.arange(2), m.layer.weight, max_norm=1.0)
    with annotate("PP"):
        return m.layer(x)  # type: ignore[no-any-return]


def returns_number(m: Model, x: Tensor) -> Any:  # noqa: ANN401
    with annotate("PP"):
        x = m.layer(x)
    with annotate("PP"):
        return x * 2, x.shape[0]


def returns_dict(m: Model, x: Tensor) -> Any:  # noqa: ANN401
    with annotate("PP"):
        return {"out": m.layer(x)}


def returns_one(m: Model, x: Tensor) -> Any:  # noqa: ANN401
    with annotate("PP"):
        return (m.layer(x),)


def keeps(m: Model, x: Tensor) -> Tensor:
    with annotate("PP"):
        m.kept = m.layer(x)
        return m.kept * 2


def number_crosses(m: Model, x: Tensor) -> Tensor:
    with annotate("PP"):
        x = m.layer(x)
        size = x.sum().item()
    with annotate("PP"):
        return x * size


def shape_by_values(m: Model, x: Tensor) -> Tensor:
    with annotate("PP"):
        x = m.layer(x)
        found = x.nonzero()
    with annotate("PP"):
        return x.sum() + found.shape[0]


def maps(m: Model, x: Tensor) -> Tensor:
    with annotate("PP"):
        x = m.layer(x)
    with annotate("PP"):
        return torch.vmap(torch.sin)(x)


def differentiates(m: Model, x: Tensor) -> Tensor:
    with annotate("PP"):
        x = m.layer(x)
    with annotate("PP"):
        return torch.func.grad(lambda y: y.sin().sum())(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("body", "line", "words"),
    [
        (branch, "if x.sum() > 0:", "Data-dependent branching"),
        (break_graph, 'print("an activation")', "does not know how to trace builtin operator `print`"),
        (fail, 'raise RuntimeError("no such layer")', r"RuntimeError\('no such layer'\)"),
        (wrong_shape, "return m.layer(x[:, :1])  # type: ignore[no-any-return]", "same reduction dim"),
        (nest, 'with annotate("PP"):  # inside', "begins inside another PP region"),
        (between, "x = x + skip", "between PP regions 1 and 2, outside both.*values of region 0 and 1"),
        (empty, 'with annotate("PP"):  # nothing in it', "PP region 1 computes nothing"),
        (unused, 'with annotate("PP"):  # for nobody', "no later region.* uses what PP region 1 computes"),
        (write_received, "return x.mul_(2)", "into a value that PP region 0 made"),
        (write_view_of_received, "x[0] += 1", "into a value that PP region 0 made"),
        (write_input, "x.add_(1)", "into input 0 of the model"),
        (write_shared_buffer, "m.count.add_(x.detach().sum(0))", r"count.*regions \[0, 1\] use"),
        (write_alias_of_shared_buffer, "m.part.add_(1)", r"count.*regions \[0, 1\] use"),
        (
            limit_norm,
            "x = x + nn.functional.embedding(torch.arange(2), m.layer.weight, max_norm=1.0)",
            r"max_norm rewrites layer\.weight inside forward, and the PP regions \[0, 1\] use it",
        ),
        (number_crosses, "size = x.sum().item()", "depends on the values of a tensor"),
        (maps, "return torch.vmap(torch.sin)(x)", "torch.vmap, torch.func.grad and the like"),
        (
            differentiates,
            "return torch.func.grad(lambda y: y.sin().sum())(x)  # type: ignore[no-any-return]",
            "torch.vmap, torch.func.grad and the like",
        ),
        (shape_by_values, "found = x.nonzero()", "depends on the values"),
    ],
)
def test_refusals_name_the_line(body: Callable[..., Any], line: str, words: str) -> None:
    model, x = Model(body), torch.randn(2, WIDTH)
    before = x.clone()
    with pytest.raises(TraceError, match=words) as caught:
        trace(model, x)
    assert line_of(line) in str(caught.value)
    assert torch.equal(x, before), "nothing has run"
    assert torch.equal(model.get_buffer("count"), torch.zeros(WIDTH))
    assert isinstance(caught.value, InputError)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (no_region, r"no region tagged PP\. Put `with piper_owner\.annotate\('PP'\):`"),
        (other_tag, "no region tagged PP; its regions are tagged EP"),
        (returns_number, "returns a int where a tensor is needed"),
        (returns_dict, "returns a dict where a tensor is needed"),
        (returns_one, "returns a tuple of 1; return the tensor"),
        (keeps, "stores a tensor in kept"),
    ],
)
def test_refusals_of_the_whole_model(body: Callable[..., Any], words: str) -> None:
    model = Model(body)
    with pytest.raises(TraceError, match=words):
        trace(model, torch.randn(2, WIDTH))
    assert model.kept is None, "the model is as it was"


def test_inputs_are_tensors() -> None:
    with pytest.raises(TraceError, match="input 1 for Model is a float"):
        trace(Model(no_region), torch.randn(2, WIDTH), 2.0)  # type: ignore[arg-type]


def test_too_many_inputs_are_refused() -> None:
    with pytest.raises(TraceError, match=r"called with 2 inputs, by position.*: too many positional"):
        trace(Model(no_region), torch.randn(2, WIDTH), torch.randn(2, WIDTH))


def test_too_few_inputs_are_refused() -> None:
    class WithLabels(Model):
        def forward(self, value: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
            return value + labels

    with pytest.raises(TraceError, match=r"with 1 input, by.*'labels'; further arguments need a default"):
        trace(WithLabels(no_region), torch.randn(2, WIDTH))


def test_a_trace_that_failed_leaves_nothing_behind() -> None:
    with pytest.raises(TraceError):
        trace(Model(nest), torch.randn(2, WIDTH))
    good = trace(Model(other_tag), torch.randn(2, WIDTH), tag="EP")
    assert good.tags == ({"EP": 0},)
    assert not logging.getLogger("torch._subclasses.fake_tensor").disabled
