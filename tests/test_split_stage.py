"""A stage's backward in two parts gives the gradients of the whole one, and computes nothing twice."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import pytest
import torch
from tiny import one_torch_thread
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from piper_owner.executor.ports import StagePorts, ValueSource
from piper_owner.executor.stage import StageRunner

WIDTH: Final = 6


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


class Deep(nn.Module):
    """Layers one after the other, one of them twice, with a norm and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, self.layers[0]):
            x = x + torch.tanh(layer(self.norm(x)))
        return x


class Shared(nn.Module):
    """`(x @ W) @ W.T * W[0]`: one weight in several ways, and once without the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x @ self.weight @ self.weight.T * self.weight[0], self.weight.square().sum()


class Several(nn.Module):
    """Two inputs and three outputs, of which one is an input, and one needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mixed = self.left(a) * self.right(b)
        return mixed.transpose(0, 1), b, torch.arange(3)


class Recomputed(nn.Module):
    """Activation checkpointing around a block."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Deep()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return out


class Twofold(torch.autograd.Function):
    """Two outputs, of which a user may take one alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401 - torch's context
        ctx.save_for_backward(x, w)
        return x * w, x + w

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401 - torch's context
        x, w = ctx.saved_tensors
        return grads[0] * w + grads[1], (grads[0] * x + grads[1]).sum((0, 1))


class Custom(nn.Module):
    """A function of the user's, and a parameter that only an index reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH))
        self.table = nn.Embedding(4, WIDTH)
        self.unused = nn.Parameter(torch.empty(2))

    def forward(self, x: Tensor) -> Tensor:
        first, _ = Twofold.apply(x, self.weight)  # type: ignore[no-untyped-call]  # torch has no types here
        out: Tensor = first + self.table(torch.tensor([1, 1, 2]))
        return out


def filled(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.double().parameters():
            parameter.copy_(torch.empty(parameter.shape, dtype=torch.float64).normal_(generator=generator))
    return module


def runner_of(module: nn.Module, *, num_inputs: int = 1, num_outputs: int = 1) -> StageRunner:
    inputs = tuple(ValueSource(index=i, stage=0) for i in range(num_inputs))
    return StageRunner(module, StagePorts(inputs=inputs, num_outputs=num_outputs), None)


def tensors(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.empty(shape, dtype=torch.float64).normal_(generator=generator) for shape in shapes]


GRID: Final = (2, 3, WIDTH)
MODELS: Final[list[tuple[Callable[[], nn.Module], int, list[tuple[int, ...] | None]]]] = [
    (Deep, 1, [GRID]),
    (Shared, 1, [GRID, ()]),
    (Shared, 1, [GRID, None]),
    (Shared, 1, [None, ()]),
    (Several, 2, [(3, 2, WIDTH), GRID, None]),
    (Several, 2, [None, GRID, None]),
    (Several, 2, [None, None, None]),
    (Recomputed, 1, [GRID]),
    (Custom, 1, [GRID]),
]


@pytest.mark.parametrize(("make", "num_inputs", "shapes"), MODELS)
def test_two_parts_give_the_gradients_of_the_whole(
    make: Callable[[], nn.Module], num_inputs: int, shapes: list[tuple[int, ...] | None]
) -> None:
    whole = runner_of(filled(make()), num_inputs=num_inputs, num_outputs=len(shapes))
    parts = runner_of(copy.deepcopy(whole.module), num_inputs=num_inputs, num_outputs=len(shapes))
    order = ((0, 1, 2, 3), (2, 0, 3, 1))
    expected: dict[int, Sequence[Tensor | None]] = {}
    found: dict[int, Sequence[Tensor | None]] = {}
    grads = {m: [None if shape is None else tensors(50 + m, shape)[0] for shape in shapes] for m in order[0]}
    for microbatch in order[0]:
        for runner in (whole, parts):
            runner.forward(microbatch, tensors(microbatch, *[GRID] * num_inputs), None)
        expected[microbatch] = whole.backward(microbatch, grads[microbatch])
        found[microbatch] = parts.backward_input(microbatch, grads[microbatch])
    if any(p.grad is not None for p in whole.module.parameters()):
        assert all(p.grad is None for p in parts.module.parameters()), "nothing of them comes early"
    for microbatch in order[1]:
        parts.backward_weight(microbatch)
    assert parts.num_in_flight == whole.num_in_flight == 0
    for microbatch in order[0]:
        for mine, theirs in zip(found[microbatch], expected[microbatch], strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None and theirs is not None:
                torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
    for (name, mine), theirs in zip(parts.module.named_parameters(), whole.module.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if mine.grad is not None and theirs.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=1e-12, msg=name)


class Counting(TorchDispatchMode):
    """Counts the matrix products."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - torch's protocol
        self.count[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_no_matrix_product_is_computed_twice() -> None:
    runner = runner_of(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(5))).double())
    counts = []
    for split in (False, True):
        runner.forward(0, tensors(0, (4, WIDTH)), None)
        with Counting() as counting:
            if split:
                runner.backward_input(0, tensors(1, (4, WIDTH)))
                inputs = counting.count["mm"]
                runner.backward_weight(0)
                assert inputs == 5
            else:
                runner.backward(0, tensors(1, (4, WIDTH)))
        counts.append(counting.count["mm"])
    assert counts == [10, 10]


def test_a_lone_stage_with_the_loss_has_all_of_its_backward_in_the_second_part() -> None:
    torch.manual_seed(0)
    module = nn.Linear(WIDTH, 1).double()
    ports = StagePorts(inputs=(ValueSource(index=0),))
    whole = StageRunner(copy.deepcopy(module), ports, lambda output, labels: (output - labels).square().sum())
    parts = StageRunner(module, ports, whole.loss)
    (x,) = tensors(0, (4, WIDTH))
    for runner in (whole, parts):
        runner.forward(0, [x], torch.ones(4, 1, dtype=torch.float64))
    whole.backward(0, ())
    assert parts.backward_input(0, ()) == (None,)
    assert module.weight.grad is None
    parts.backward_weight(0)
    for mine, theirs in zip(module.parameters(), whole.module.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad)


def test_hooks_of_a_parameter_run_once_for_each_microbatch() -> None:
    module = filled(Deep())
    seen: Counter[str] = Counter()
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.update([name]))
    runner = runner_of(module)
    for microbatch in range(3):
        runner.forward(microbatch, tensors(microbatch, GRID), None)
        runner.backward_input(microbatch, tensors(9, GRID))
    assert not seen
    for microbatch in range(3):
        runner.backward_weight(microbatch)
    assert set(seen.values()) == {3}
