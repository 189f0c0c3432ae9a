"""A scaler whose ranks agree: all of them step, or none, and the scale is the same on each."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from owners import NAMES, Rank, Weights, errors, near, ranks
from tiny import one_torch_thread
from torch import nn

from piper_owner.assignment import assign_over
from piper_owner.errors import ConfigError
from piper_owner.grad_scaler import GradScaler
from piper_owner.optimizer_wrap import OwnerOptimizer
from piper_owner.transport import Fabric

HALF = near(0.5)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


def scaler(**options: Any) -> GradScaler:  # noqa: ANN401 - the options of torch's
    return GradScaler("cpu", **{"init_scale": 8.0, "growth_interval": 1000, **options})


def scaled_backward(scale: torch.amp.GradScaler, parameter: nn.Parameter, grad: float | None) -> None:
    if grad is not None:
        scale.scale((parameter * grad).sum()).backward()


def two_steps(fabric: Fabric, *, bad_rank: int, bad: float, unscale: bool, clip: bool) -> list[float]:
    """The tied weight and the scale after each of two steps, and the local weight.

    Rank 2 holds a weight of its own alone; the ranks 0 and 1 also the tie.
    """
    rank = Rank(fabric, local=1.0)
    scale = scaler()
    seen = []
    for step in range(2):
        is_bad = step == 0 and fabric.rank == bad_rank
        if fabric.rank < 2:
            scaled_backward(scale, rank.weight, bad if is_bad else rank.grad)
        scaled_backward(scale, rank.local, bad if is_bad and fabric.rank == 2 else 1.0)
        if unscale:
            scale.unscale_(rank.opt)
        if clip:
            rank.opt.clip_grad_norm_(100.0)
        scale.step(rank.opt)
        scale.update()
        rank.opt.zero_grad()
        assert rank.own.check()
        seen += [rank.weight.item() if fabric.rank < 2 else 0.0, float(scale.get_scale())]
    return [*seen, rank.local.item()]


@pytest.mark.parametrize(
    ("bad_rank", "bad"), [(0, math.inf), (1, math.inf), (2, math.nan), (1, -math.inf), (0, math.nan)]
)
@pytest.mark.parametrize(("unscale", "clip"), [(False, False), (True, False), (True, True)])
def test_case_28_all_ranks_skip_together(bad_rank: int, bad: float, unscale: bool, clip: bool) -> None:
    found = ranks(3, partial(two_steps, bad_rank=bad_rank, bad=bad, unscale=unscale, clip=clip))
    assert found == [near([1.0, 4.0, 0.5, 4.0, 0.9])] * 2 + [near([0.0, 4.0, 0.0, 4.0, 0.9])]


def test_case_28_unscaled_once() -> None:
    def work(fabric: Fabric) -> tuple[float, float, float]:
        rank = Rank(fabric)
        scale = scaler()
        scaled_backward(scale, rank.weight, rank.grad)
        scale.unscale_(rank.opt)
        norm = rank.opt.clip_grad_norm_(1.0)
        scale.step(rank.opt)
        scale.update()
        return float(norm), rank.value(), float(scale.get_scale())

    clipped = near(1 - 0.1, 1e-6)
    assert ranks(2, work) == [(near(5.0), clipped, 8.0)] * 2


def test_case_28_a_second_unscale_and_a_second_step_are_refused_as_in_torch() -> None:
    def work(fabric: Fabric) -> list[str]:
        rank = Rank(fabric)
        scale = scaler()
        scaled_backward(scale, rank.weight, rank.grad)
        scale.unscale_(rank.opt)
        said = []
        for again in (scale.unscale_, scale.step, scale.step, scale.unscale_):
            try:
                again(rank.opt)
            except RuntimeError as error:
                said.append(str(error))
        return said

    for said in ranks(2, work):
        assert ["already been called" in text or "after step()" in text for text in said] == [True] * 3


@pytest.mark.parametrize("owner", [0, 1])
def test_case_28_ranks_without_gradients_or_a_scaled_loss(owner: int) -> None:
    """Of four ranks one has only a replica, one no parameters, one a parameter without a gradient."""

    def work(fabric: Fabric) -> tuple[float, float]:
        names = {0: NAMES[0], 1: NAMES[1], 3: "idle.weight"}
        values = {names[fabric.rank]: 1.0} if fabric.rank in names else {}
        rank = Rank(fabric, values=values, assign={"owner": owner})
        scale = scaler(growth_interval=2)
        for _ in range(2):
            if fabric.rank < 2:
                scaled_backward(scale, rank.weight, rank.grad)
            scale.step(rank.opt)
            scale.update()
            rank.opt.zero_grad()
        return (rank.weight.item() if fabric.rank < 2 else 0.0), float(scale.get_scale())

    zero = near(0.0)
    assert ranks(4, work) == [(zero, 16.0)] * 4


@pytest.mark.parametrize("grads", [(2.0, None), (None, 3.0), (None, None)])
def test_case_28_none_gradients(grads: tuple[float | None, float | None]) -> None:
    def work(fabric: Fabric) -> float:
        rank = Rank(fabric, grads=grads)
        scale = scaler()
        scaled_backward(scale, rank.weight, rank.grad)
        scale.step(rank.opt)
        scale.update()
        return rank.value()

    value = near(1 - 0.1 * sum(grad or 0.0 for grad in grads))
    assert ranks(2, work) == [value, value]


@pytest.mark.parametrize(("master", "value", "scale"), [(torch.float32, 0.2, 8.0), (None, 1.0, 4.0)])
def test_case_12_fp16_sums_step_with_masters_and_are_found_infinite_without(
    master: torch.dtype | None, value: float, scale: float
) -> None:
    def work(fabric: Fabric) -> tuple[float, float]:
        rank = Rank(fabric, dtype=torch.float16, master_dtype=master, lr=8e-5)
        scale = scaler()
        scaled_backward(scale, rank.weight, 5000.0)  # 40000 with the scale, on each rank
        scale.step(rank.opt)
        scale.update()
        return rank.value(), float(scale.get_scale())

    assert ranks(2, work) == [(near(value, 1e-3), scale)] * 2


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Adadelta])
def test_case_28_a_skip_leaves_state_and_weights_alone(kind: type[torch.optim.Optimizer]) -> None:
    def work(fabric: Fabric) -> tuple[float, float, int]:
        rank = Rank(fabric, kind)
        scale = scaler()
        for grad in (rank.grad, math.inf):
            scaled_backward(scale, rank.weight, grad)
            scale.step(rank.opt)
            scale.update()
            rank.opt.zero_grad()
            if grad == rank.grad:
                first = rank.value()
        steps = [int(state["step"]) for state in rank.opt.state.values()]
        return first, rank.value(), sum(steps)

    owner, replica = ranks(2, work)
    assert owner[0] == owner[1] == replica[0] == replica[1] != 1.0
    assert (owner[2], replica[2]) == (1, 0)


def test_a_plain_optimizer_has_a_scaler_of_its_own_or_the_scales_part() -> None:
    def work(fabric: Fabric, shared: bool) -> list[float]:
        module = Weights({NAMES[fabric.rank]: 1.0, "own.weight": 1.0})
        own = assign_over(fabric, module, (NAMES,))
        tied, local = module.get_parameter(NAMES[fabric.rank]), module.get_parameter("own.weight")
        first = OwnerOptimizer([tied], torch.optim.SGD, ownership=own, lr=0.1)
        second = torch.optim.SGD([local], lr=0.1)
        ours = scaler()
        plain: torch.amp.GradScaler = ours if shared else torch.amp.GradScaler("cpu", init_scale=8.0)
        for grad in (math.inf if fabric.rank == 1 else 1.0, 1.0):
            scaled_backward(ours, tied, 2.0 + fabric.rank)
            scaled_backward(plain, local, grad)
            ours.step(first)
            plain.step(second)
            for each in {id(s): s for s in (ours, plain)}.values():
                each.update()
            first.zero_grad()
            second.zero_grad()
        return [tied.item(), local.item(), float(ours.get_scale())]

    assert ranks(2, partial(work, shared=False)) == [near([0.0, 0.8, 8.0]), near([0.0, 0.9, 8.0])]
    for error in errors(2, partial(work, shared=True)):
        assert "rank 1 scales its losses by 4 and another rank by 8" in str(error)


def test_a_closure_is_refused() -> None:
    def work(fabric: Fabric) -> None:
        rank = Rank(fabric)
        scale = scaler()
        scale.step(rank.opt, closure=lambda: 1.0)

    for error in errors(2, work):
        assert "closure" in str(error)


def test_a_disabled_scaler_does_nothing_but_step() -> None:
    def work(fabric: Fabric, kind: type[torch.amp.GradScaler]) -> float:
        rank = Rank(fabric)
        scale = kind("cpu", enabled=False)
        scale.scale((rank.weight * (2.0 + fabric.rank)).sum()).backward()
        scale.unscale_(rank.opt)
        scale.step(rank.opt)
        scale.update()
        return rank.value()

    assert ranks(2, partial(work, kind=GradScaler)) == [HALF, HALF]
    assert ranks(2, partial(work, kind=torch.amp.GradScaler)) == [HALF, HALF]


def test_a_plain_scaler_is_refused_on_two_ranks_and_ours_takes_over() -> None:
    def work(fabric: Fabric) -> tuple[str, float]:
        rank = Rank(fabric)
        plain = torch.amp.GradScaler("cpu", init_scale=8.0)
        plain.scale((rank.weight * (2.0 + fabric.rank)).sum()).backward()
        said = ""
        try:
            plain.step(rank.opt)
        except ConfigError as error:
            said = str(error)
        scale = scaler()
        scale.step(rank.opt)
        return said, rank.value()

    for said, value in ranks(2, work):
        assert "piper_owner.GradScaler" in said
        assert value == HALF


def test_a_plain_scaler_is_refused_also_where_a_step_hook_wants_the_gradient() -> None:
    def work(fabric: Fabric) -> str:
        rank = Rank(fabric)
        rank.opt.register_step_pre_hook(lambda *_: None)
        plain = torch.amp.GradScaler("cpu", init_scale=8.0)
        plain.scale((rank.weight * 2.0).sum()).backward()
        try:
            plain.step(rank.opt)
        except ConfigError as error:
            return str(error)
        return ""

    assert ["piper_owner.GradScaler" in said for said in ranks(2, work)] == [True, True]


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, GradScaler])
@pytest.mark.parametrize("unscale", [False, True])
def test_either_scaler_works_in_a_world_of_one(kind: type[torch.amp.GradScaler], unscale: bool) -> None:
    def work(fabric: Fabric) -> list[float]:
        module = Weights(dict.fromkeys(NAMES, 1.0))
        own = assign_over(fabric, module, (NAMES,))
        opt = OwnerOptimizer(module.parameters(), torch.optim.SGD, ownership=own, lr=0.1)
        scale = kind("cpu", init_scale=8.0)
        seen = []
        for grad in (math.inf, 5.0):
            scale.scale((module.get_parameter(NAMES[1]) * grad).sum()).backward()
            if unscale:
                scale.unscale_(opt)
                opt.clip_grad_norm_(100.0)
            scale.step(opt)
            scale.update()
            opt.zero_grad()
            seen += [module.get_parameter(NAMES[0]).item(), float(scale.get_scale())]
        return seen

    assert ranks(1, work) == [near([1.0, 4.0, 0.5, 4.0])]


def test_the_scale_grows_alike_and_its_state_loads() -> None:
    def work(fabric: Fabric) -> list[float]:
        rank = Rank(fabric)
        scale = scaler(growth_interval=2)
        scales = []
        for _ in range(4):
            scaled_backward(scale, rank.weight, rank.grad)
            scale.step(rank.opt)
            scale.update()
            rank.opt.zero_grad()
            scales.append(float(scale.get_scale()))
        again = scaler()
        again.load_state_dict(scale.state_dict())
        return [*scales, float(again.get_scale())]

    assert ranks(2, work) == [[8.0, 16.0, 16.0, 32.0, 32.0]] * 2


def test_schedulers_do_not_warn_when_the_first_step_was_not_skipped() -> None:
    def work(fabric: Fabric) -> float:
        rank = Rank(fabric)
        schedule = torch.optim.lr_scheduler.StepLR(rank.opt, 1)
        scale = scaler()
        scaled_backward(scale, rank.weight, rank.grad)
        scale.step(rank.opt)
        scale.update()
        schedule.step()
        return rank.value()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ranks(2, work) == [HALF, HALF]
