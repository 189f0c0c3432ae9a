"""Rows of the next step are stepped and sent before all others, and are what the whole step makes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from owners import ranks
from torch import Tensor, nn

from piper_owner.assignment import assign_over
from piper_owner.optimizer_wrap import OwnerOptimizer
from piper_owner.stepping import ELEMENT_WISE, Masters, ParameterStepper
from piper_owner.transport import Fabric

VOCAB, WIDTH = 301, 7  # so that neither the table nor its rows end with a vector register
TIE = (("embed.weight", "head.weight"),)


class Lookup(nn.Module):
    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.embed.weight = nn.Parameter(table.clone())


class Head(nn.Module):
    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = nn.Parameter(table.clone())


@pytest.mark.parametrize("kind", ELEMENT_WISE, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("master", [None, torch.float32])
def test_a_preview_is_what_the_step_makes_of_the_rows(
    kind: type[torch.optim.Optimizer], master: torch.dtype | None
) -> None:
    torch.manual_seed(0)
    dtype = torch.float32 if master is None else torch.bfloat16
    parameter = nn.Parameter(torch.randn(64, 8, dtype=dtype))
    optimizer = kind([parameter], lr=0.01)  # type: ignore[call-arg]
    masters = Masters(master)
    masters.make(optimizer.param_groups)
    stepper = ParameterStepper(optimizer, parameter, masters.get(parameter))
    ids = torch.tensor([5, 0, 63, 17])
    for _ in range(3):
        grad = torch.randn(64, 8)
        before = parameter.detach().clone()
        previewed = stepper.preview_rows(ids, grad[ids])
        assert torch.equal(parameter, before), "a preview steps nothing"
        stepper.step_rows(0, 32, grad[:32])
        stepper.step_rows(32, 64, grad[32:])
        stepper.finish()
        assert previewed.dtype == dtype
        assert torch.equal(previewed, parameter.detach()[ids])
        assert not torch.equal(previewed, before[ids])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_every_row_is_the_owners_bit_for_bit_and_leaves_before_the_table_is_stepped(
    dtype: torch.dtype,
    kind: type[torch.optim.Optimizer],
    clip: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    table = torch.randn(VOCAB, WIDTH, dtype=dtype)
    ids = torch.randint(0, VOCAB, (6, 40))
    ids[:, 0] = VOCAB - 1
    order: list[str] = []
    step_rows, push = ParameterStepper.step_rows, ParameterStepper.preview_rows

    def stepping(self: ParameterStepper, *args: Any) -> None:  # noqa: ANN401 - passed on
        order.append("step")
        step_rows(self, *args)

    def previewing(self: ParameterStepper, *args: Any) -> Tensor:  # noqa: ANN401 - passed on
        order.append("push")
        return push(self, *args)

    monkeypatch.setattr(ParameterStepper, "step_rows", stepping)
    monkeypatch.setattr(ParameterStepper, "preview_rows", previewing)

    def work(fabric: Fabric) -> Tensor:
        module: Any = Lookup(table) if fabric.rank == 0 else Head(table)
        own = assign_over(fabric, module, TIE, layout="rows", chunk_bytes=64 * WIDTH * 4)
        options = {"master_dtype": torch.float32} if dtype is torch.bfloat16 else {}
        opt = OwnerOptimizer(module.parameters(), kind, ownership=own, lr=0.05, **options)
        opt.prefetch(ids[0])
        for step in range(5):
            if fabric.rank == 0:
                module.embed(ids[step]).double().sin().sum().backward()
            else:
                module.head.weight.double().cos().sum().backward()
            opt.prefetch(ids[step + 1], next_step=True)
            if clip is not None:
                opt.clip_grad_norm_(clip)
            opt.step()
            opt.zero_grad()
            assert own.check()
        if fabric.rank == 0:
            return module.embed(ids[5]).detach()  # type: ignore[no-any-return]
        return module.head.weight.detach()[ids[5]]  # type: ignore[no-any-return]

    rows, weights = ranks(2, work)
    assert torch.equal(rows, weights)
    if kind is torch.optim.Adafactor:  # steps whole: nothing can go ahead
        assert "push" not in order
    else:
        assert order[0] == "push"
        assert order.count("push") == 5


def test_rows_fetched_in_inference_mode_leave_a_table_that_trains() -> None:
    table = torch.randn(VOCAB, WIDTH, dtype=torch.float64)
    ids = torch.arange(70)

    def work(fabric: Fabric) -> Tensor | None:
        module: Any = Lookup(table) if fabric.rank == 0 else Head(table)
        own = assign_over(fabric, module, TIE, layout="rows")
        opt = OwnerOptimizer(module.parameters(), torch.optim.SGD, ownership=own, lr=0.5)
        with torch.inference_mode():
            opt.prefetch(ids)
        opt.prefetch(ids + 1)
        if fabric.rank == 0:
            module.embed(ids + 1).sum().backward()
        opt.step()
        return None if fabric.rank == 0 else module.head.weight.detach()

    _, weights = ranks(2, work)
    assert weights is not None
    expected = table.clone()
    expected[1:71] -= 0.5
    assert torch.equal(weights, expected)
