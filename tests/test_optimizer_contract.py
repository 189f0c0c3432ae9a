"""OwnerOptimizer is a torch Optimizer by every test that torch's own tools apply."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from owners import NAMES, TIE, Rank, Weights, add_grad, errors, near, ranks
from tiny import one_torch_thread
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from piper_owner.assignment import assign_over
from piper_owner.errors import ConfigError, TieError
from piper_owner.optimizer_wrap import OwnerOptimizer
from piper_owner.transport import Fabric

HALF = near(0.5)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


def alone(fabric: Fabric, kind: Callable[..., torch.optim.Optimizer], **options: Any) -> Rank:  # noqa: ANN401
    """A world of one: both names on this rank."""
    return Rank(fabric, kind, values=dict.fromkeys(NAMES, 1.0), **options)


# -- what it is


def test_case_29_it_is_an_optimizer_whose_parts_are_the_inner_ones() -> None:
    def work(fabric: Fabric) -> tuple[bool, int, int, float, str]:
        rank = Rank(fabric, torch.optim.AdamW, weight_decay=0.25)
        opt = rank.opt
        assert isinstance(opt, torch.optim.Optimizer)
        assert opt.param_groups is opt.param_groups
        for _ in range(2):
            rank.step()
            saved = opt.state_dict()
            opt.load_state_dict(saved)  # rebinds groups and state of the inner optimizer
            opt.param_groups[0]["lr"] *= 1.0
        text = repr(opt)
        assert opt.defaults["weight_decay"] == 0.25
        return bool(opt.state), len(opt.state), len(opt.param_groups[0]["params"]), rank.value(), text

    owner, replica = ranks(2, work)
    assert owner[:3] == (True, 1, 1)
    assert replica[:3] == (True, 0, 0)  # true, so that torch's checkpoint does not step it alone
    assert owner[3] == replica[3] != 1.0
    for text in (owner[4], replica[4]):
        assert text.startswith("OwnerOptimizer over AdamW (")
        assert "weight_decay: 0.25" in text


def test_hyper_parameters_take_effect_after_a_load() -> None:
    def work(fabric: Fabric) -> float:
        rank = Rank(fabric)
        rank.opt.load_state_dict(rank.opt.state_dict())
        rank.opt.param_groups[0]["lr"] = 0.2
        rank.step()
        return rank.value()

    assert ranks(2, work) == [near(0.0), near(0.0)]


def one_cycle(opt: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.OneCycleLR(opt, max_lr=0.3, total_steps=20)


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda opt: lr_scheduler.LambdaLR(opt, lambda step: (step + 1) / 10),
    "LambdaLR from zero": lambda opt: lr_scheduler.LambdaLR(opt, lambda step: step / 4),
    "StepLR": lambda opt: lr_scheduler.StepLR(opt, 2, 0.5),
    "OneCycleLR": one_cycle,
    "CosineAnnealingLR": lambda opt: lr_scheduler.CosineAnnealingLR(opt, 10),
    "ReduceLROnPlateau": lambda opt: lr_scheduler.ReduceLROnPlateau(opt, patience=0, factor=0.5),
    "SequentialLR": lambda opt: lr_scheduler.SequentialLR(
        opt,
        [lr_scheduler.LinearLR(opt, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(opt, 4)],
        milestones=[2],
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_case_29_schedulers_on_every_rank(name: str, kind: Callable[..., torch.optim.Optimizer]) -> None:
    """Also on a replica alone, and on a rank with no parameters. Warnings are errors."""
    options: dict[str, Any] = {"momentum": 0.9} if kind is torch.optim.SGD else {}

    def work(fabric: Fabric) -> tuple[list[float], list[float]]:
        rank = Rank(fabric, kind, **options)
        schedule = SCHEDULES[name](rank.opt)
        rates, values = [], []
        for step in range(5):
            if fabric.rank < 2:
                rank.backward()
            rank.opt.step()
            rank.opt.zero_grad()
            rates.append(float(rank.opt.param_groups[0]["lr"]))
            values.append(rank.weight.item() if fabric.rank < 2 else 0.0)
            schedule.step(*([float(step)] if name == "ReduceLROnPlateau" else []))
        rank.own.check()
        return rates, values

    parameter = nn.Parameter(torch.ones(1, dtype=torch.float64))
    bare = kind([parameter], lr=0.1, **options)
    schedule = SCHEDULES[name](bare)
    rates, values = [], []
    for step in range(5):
        add_grad(parameter, 5.0)
        bare.step()
        bare.zero_grad()
        rates.append(float(bare.param_groups[0]["lr"]))
        values.append(parameter.item())
        schedule.step(*([float(step)] if name == "ReduceLROnPlateau" else []))
    assert ranks(3, work) == [(rates, values), (rates, values), (rates, [0.0] * 5)]
    assert len(set(rates)) > 1


# -- hooks


def test_case_30_step_hooks_run_once_and_see_the_whole_gradient() -> None:
    def work(fabric: Fabric) -> tuple[list[Any], float]:
        rank = Rank(fabric)
        seen: list[Any] = []

        def before(opt: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ANN401
            assert opt is rank.opt
            assert args == (opt,)
            assert kwargs == {}
            seen.append([p.grad.item() for group in opt.param_groups for p in group["params"]])

        def after(opt: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ANN401
            seen.append(rank.weight.item())

        handles = [rank.opt.register_step_pre_hook(before), rank.opt.register_step_post_hook(after)]
        rank.step()
        for handle in handles:
            handle.remove()
        value = rank.value()
        rank.step()
        assert rank.value() == near(0.0)
        return seen, value

    assert ranks(2, work) == [([[5.0], HALF], HALF), ([[], HALF], HALF)]


def test_case_30_a_hook_that_fails_on_one_rank_fails_both_at_once() -> None:
    def work(fabric: Fabric) -> float:
        rank = Rank(fabric)
        if fabric.rank == 0:
            rank.opt.register_step_pre_hook(lambda *_: rank.weight)  # type: ignore[arg-type]
        rank.step()
        return rank.value()

    # A hook gives new arguments, or None: a tensor is refused as torch refuses it.
    first, second = errors(2, work, timeout=60.0)
    assert "must return None or a tuple" in str(first)
    assert "rank 0 failed first, at step 0: RuntimeError" in str(second)


def test_case_32_a_closure_that_fails_on_one_rank_fails_both_at_once() -> None:
    def work(fabric: Fabric) -> None:
        rank = Rank(fabric)

        def closure() -> float:
            if fabric.rank == 1:
                raise KeyError("the data ran out")
            rank.backward()
            return 1.0

        rank.opt.step(closure)

    first, second = errors(2, work, timeout=60.0)
    assert "rank 1 failed first, at step 0: KeyError: 'the data ran out'" in str(first)
    assert isinstance(second, KeyError)


def test_case_30_a_pre_hook_may_write_the_gradient() -> None:
    def work(fabric: Fabric) -> float:
        rank = Rank(fabric)

        def double(*_: object) -> None:
            assert rank.weight.grad is not None
            rank.weight.grad.mul_(2.0)

        if fabric.rank == 0:
            rank.opt.register_step_pre_hook(double)
        rank.step()
        return rank.value()

    assert ranks(2, work) == [near(0.0), near(0.0)]


def test_case_30_global_hooks_run_once_per_step() -> None:
    calls: list[tuple[str, type]] = []
    handles = [
        register_optimizer_step_pre_hook(lambda opt, *_: calls.append(("pre", type(opt)))),
        register_optimizer_step_post_hook(lambda opt, *_: calls.append(("post", type(opt)))),
    ]
    try:
        found = ranks(2, lambda fabric: _stepped(fabric, torch.optim.Adam))
    finally:
        for handle in handles:
            handle.remove()
    assert found[0] == found[1]
    assert sorted(calls, key=str) == [("post", OwnerOptimizer)] * 2 + [("pre", OwnerOptimizer)] * 2


def _stepped(fabric: Fabric, kind: type[torch.optim.Optimizer], **options: Any) -> float:  # noqa: ANN401
    rank = Rank(fabric, kind, **options)
    rank.step()
    return rank.value()


def test_case_30_state_dict_hooks_are_called() -> None:
    def work(fabric: Fabric) -> list[str]:
        rank = Rank(fabric)
        calls: list[str] = []

        def note(name: str, *_: object) -> None:
            calls.append(name)

        def added(opt: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
            return {**state, "note": 1}

        def taken(opt: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
            assert state.pop("note") == 1
            return state

        rank.opt.register_state_dict_pre_hook(partial(note, "before save"))
        rank.opt.register_state_dict_post_hook(added)
        rank.opt.register_load_state_dict_pre_hook(taken)
        rank.opt.register_load_state_dict_post_hook(partial(note, "after load"))
        rank.opt.load_state_dict(rank.opt.state_dict())
        return calls

    assert ranks(2, work) == [["before save", "after load"]] * 2


# -- groups


def test_case_30_add_param_group() -> None:
    def work(fabric: Fabric) -> tuple[list[float], list[int], int]:
        rank = Rank(fabric, local=1.0, params=lambda module: [module.get_parameter("own.weight")])
        rank.opt.add_param_group({"params": [rank.weight], "lr": 0.2})
        rank.backward()
        add_grad(rank.local, 1.0)
        rank.opt.step()
        sizes = [len(group["params"]) for group in rank.opt.param_groups]
        return [rank.value(), rank.local.item()], sizes, rank.opt.stats.sent.total

    owner, replica = ranks(2, work)
    assert owner[:2] == (near([0.0, 0.9]), [1, 1])
    assert replica[:2] == (near([0.0, 0.9]), [1, 0])


def test_case_30_a_first_group_added_to_an_empty_optimizer() -> None:
    def work(fabric: Fabric) -> tuple[float, int]:
        rank = Rank(fabric, torch.optim.Adam, params=lambda _: [])
        assert bool(rank.opt.state)
        rank.opt.add_param_group({"params": [rank.weight]})
        rank.step()
        return rank.value(), len(rank.opt.state)

    found = ranks(2, work)
    assert [number for _, number in found] == [1, 0]
    assert found[0][0] == found[1][0] == near(0.9, 1e-6)


@pytest.mark.parametrize("fault", ["again", "one rank", "options", "bad lr"])
def test_case_30_a_wrong_group_is_refused_on_both_and_changes_nothing(fault: str) -> None:
    def work(fabric: Fabric) -> str:
        listed = fault == "again"
        rank = Rank(fabric, torch.optim.Adam, params=lambda m: list(m.parameters()) if listed else [])
        here = listed or fault != "one rank" or fabric.rank == 0
        group: dict[str, Any] = {"params": [rank.weight] if here else []}
        if fault == "options":
            group["weight_decay"] = 0.1 * fabric.rank
        if fault == "bad lr" and fabric.rank == 1:
            group["params"] = ["a word"]
        with pytest.raises((ValueError, TypeError)) as caught:
            rank.opt.add_param_group(group)
        assert len(rank.opt.param_groups) == 1
        if not listed:
            rank.opt.add_param_group({"params": [rank.weight]})
        rank.step()
        assert rank.value() == near(0.9, 1e-6)
        return str(caught.value)

    said = {
        "again": "an earlier group",
        "one rank": "on the ranks [0] and not on the ranks [1]",
        "options": "weight_decay",
        "bad lr": "rank 1",
    }
    found = ranks(2, work)
    assert said[fault] in found[0]
    if fault != "bad lr":
        assert said[fault] in found[1]


@pytest.mark.parametrize(
    "params", [[], [{"params": []}], [{"params": []}, {"params": [], "lr": 1.0}]], ids=str
)
def test_case_31_empty_parameter_lists(params: list[Any]) -> None:
    def work(fabric: Fabric) -> int:
        rank = Rank(fabric, torch.optim.AdamW, values={}, ties=(), params=lambda _: params)
        rank.opt.step()
        rank.opt.zero_grad()
        rank.opt.clip_grad_norm_(1.0)
        rank.opt.zero_grad()
        rank.opt.load_state_dict(rank.opt.state_dict())
        assert bool(rank.opt.state)
        return len(rank.opt.param_groups)

    assert ranks(2, work) == [max(1, len(params))] * 2


def test_case_33_the_order_tied_local_tied_stays() -> None:
    ties = (("a.w", "b.w"), ("c.w", "d.w"))

    def params(rank: int, module: nn.Module) -> Any:  # noqa: ANN401
        first, second = (module.get_parameter(names[rank]) for names in ties)
        return [
            {"params": [first], "lr": 0.1},
            {"params": [module.get_parameter("own.weight")], "lr": 0.2},
            {"params": [second], "lr": 0.3},
        ]

    def work(fabric: Fabric) -> tuple[list[float], list[int], list[list[int]], list[float]]:
        names = [names[fabric.rank] for names in ties]
        rank = Rank(
            fabric,
            values={**dict.fromkeys(names, 1.0), "own.weight": 1.0},
            ties=ties,
            params=partial(params, fabric.rank),
        )
        parameters = [rank.module.get_parameter(n) for n in (names[0], "own.weight", names[1])]
        for parameter in parameters:
            add_grad(parameter, 1.0)
        rank.opt.step()
        rank.own.check()
        saved = rank.opt.state_dict()["param_groups"]
        return (
            [group["lr"] for group in rank.opt.param_groups],
            [len(group["params"]) for group in rank.opt.param_groups],
            [group["params"] for group in saved],
            [p.item() for p in parameters],
        )

    owner, replica = ranks(2, work)
    values = near([0.8, 0.8, 0.4])
    assert owner == ([0.1, 0.2, 0.3], [1, 1, 1], [[0], [1], [2]], values)
    assert replica == ([0.1, 0.2, 0.3], [0, 1, 0], [[], [0], []], values)


def test_named_parameters() -> None:
    def groups(module: nn.Module) -> Any:  # noqa: ANN401
        named = list(module.named_parameters())
        return [{"params": named[:1]}, {"params": named[1:], "lr": 0.2}]

    def work(fabric: Fabric) -> tuple[list[list[str]], float, float]:
        rank = Rank(fabric, local=1.0, params=groups)
        rank.backward()
        add_grad(rank.local, 1.0)
        rank.opt.step()
        rank.opt.load_state_dict(rank.opt.state_dict())
        return [group["param_names"] for group in rank.opt.param_groups], rank.value(), rank.local.item()

    owner, replica = ranks(2, work)
    assert owner == ([[NAMES[0]], ["own.weight"]], HALF, near(0.8))
    assert replica == ([[], ["own.weight"]], HALF, near(0.8))


def test_a_generator_of_named_parameters() -> None:
    assert (
        ranks(2, lambda f: _stepped(f, torch.optim.SGD, params=lambda m: m.named_parameters())) == [HALF] * 2
    )


def test_the_same_parameter_twice_in_one_group_counts_once() -> None:
    def work(fabric: Fabric) -> tuple[float, int]:
        rank = alone(fabric, torch.optim.SGD, params=lambda m: [*m.parameters(), *m.parameters()])
        rank.backward(2.5)
        rank.opt.step()
        return rank.weight.item(), len(rank.opt.param_groups[0]["params"])

    assert ranks(1, work) == [(HALF, 1)]


def test_the_same_parameter_in_two_groups_is_refused() -> None:
    def work(fabric: Fabric) -> None:
        Rank(fabric, params=lambda m: [{"params": list(m.parameters())}, {"params": list(m.parameters())}])

    for error in errors(2, work):
        assert isinstance(error, ConfigError)
        assert "group 0" in str(error)


@pytest.mark.parametrize(
    "params", [torch.ones(1), [torch.ones(1) * nn.Parameter(torch.ones(1))], ["w"]], ids=str
)
def test_what_is_no_parameter_list_is_refused_on_every_rank(params: Any) -> None:  # noqa: ANN401
    def work(fabric: Fabric) -> None:
        Rank(fabric, params=lambda m: params if fabric.rank == 0 else list(m.parameters()))

    for error in errors(2, work):
        assert isinstance(error, ValueError | TypeError)


# -- gradients, copies, closures


def test_case_30_zero_grad_to_zeros_reaches_replicas_too() -> None:
    def work(fabric: Fabric) -> list[float | None]:
        rank = Rank(fabric, local=1.0)
        rank.backward()
        add_grad(rank.local, 1.0)
        rank.opt.zero_grad(set_to_none=False)
        grads = [None if p.grad is None else p.grad.item() for p in rank.module.parameters()]
        rank.backward()
        rank.opt.step()
        rank.backward()
        rank.opt.zero_grad()
        assert all(p.grad is None for p in rank.module.parameters())
        assert rank.value() == HALF
        return grads

    assert ranks(2, work) == [[0.0, 0.0]] * 2


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_case_30_copies_and_pickles_are_refused_loudly(duplicate: Callable[[Any], Any]) -> None:
    def work(fabric: Fabric) -> str:
        rank = Rank(fabric)
        with pytest.raises(TypeError) as caught:
            duplicate(rank.opt)
        rank.step()
        assert rank.value() == HALF
        return str(caught.value)

    for said in ranks(2, work):
        assert "state_dict" in said


def test_case_32_a_closure_runs_before_the_exchange_and_its_loss_is_returned() -> None:
    def work(fabric: Fabric) -> tuple[float, float, list[bool]]:
        rank = Rank(fabric)
        enabled = []

        def closure() -> Tensor:
            enabled.append(torch.is_grad_enabled())
            rank.opt.zero_grad()
            loss = (rank.weight * (2.0 + fabric.rank)).sum()
            loss.backward()
            return loss.detach()

        order: list[str] = []
        rank.opt.register_step_pre_hook(lambda *_: order.append("pre"))
        with torch.no_grad():
            loss = rank.opt.step(closure)
        assert order == ["pre"]
        assert rank.opt.step(lambda: 7) == 7  # no gradients: no step
        return float(loss), rank.value(), enabled

    assert ranks(2, work) == [(2.0, HALF, [True]), (3.0, HALF, [True])]


class NeedsClosure(torch.optim.SGD):
    """An optimizer that evaluates the model itself."""

    def step(self, closure: Any) -> Any:  # type: ignore[override]  # noqa: ANN401
        return closure()


@pytest.mark.parametrize(
    "kind",
    [torch.optim.LBFGS, partial(torch.optim.LBFGS, max_iter=2), NeedsClosure],
    ids=["LBFGS", "partial", "closure"],
)
def test_case_32_optimizers_that_call_the_model_are_refused_early(kind: Any) -> None:  # noqa: ANN401
    for error in errors(2, lambda f: Rank(f, kind)):
        assert isinstance(error, ConfigError)
        assert "first-order" in str(error)


def test_a_wrong_option_on_one_rank_is_an_error_on_both() -> None:
    def work(fabric: Fabric) -> None:
        wrong: dict[str, Any] = {"momentum": 0.9} if fabric.rank == 1 else {}
        Rank(fabric, torch.optim.Adam, **wrong)

    found = errors(2, work)
    assert "momentum" in str(found[0])
    assert "momentum" in str(found[1])


# -- inner optimizers


class Lion(torch.optim.Optimizer):
    """A third-party optimizer with its own way to keep, save and load its state."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.5) -> None:  # noqa: ANN401
        super().__init__(params, {"lr": lr, "beta": beta})
        self.average: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # noqa: ANN401
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    average = self.average.get(parameter, torch.zeros_like(parameter))
                    average = group["beta"] * average + (1 - group["beta"]) * parameter.grad
                    parameter.sub_(group["lr"] * average.sign())
                    self.average[parameter] = average
        return None

    def state_dict(self) -> dict[str, Any]:
        averages = [self.average.get(p) for group in self.param_groups for p in group["params"]]
        return {"averages": averages, "lr": [group["lr"] for group in self.param_groups]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for group, lr in zip(self.param_groups, state_dict["lr"], strict=True):
            group["lr"] = lr
        parameters = [p for group in self.param_groups for p in group["params"]]
        found = zip(parameters, state_dict["averages"], strict=True)
        self.average = {p: average.clone() for p, average in found if average is not None}


def test_a_third_party_optimizer_keeps_saves_and_loads_its_own_state() -> None:
    def work(fabric: Fabric) -> tuple[list[float], list[float], int]:
        values, again = [], []
        rank = Rank(fabric, Lion)
        for grad in (1.0, -1.5, -1.5, 3.0):
            rank.backward(grad)
            rank.opt.step()
            rank.opt.zero_grad()
            values.append(rank.value())
        other = Rank(fabric, Lion)
        other.backward(1.0)
        other.opt.step()
        resumed = Rank(fabric, Lion)
        with torch.no_grad():
            resumed.weight.copy_(other.weight)
        resumed.opt.load_state_dict(other.opt.state_dict())
        for grad in (-1.5, -1.5, 3.0):
            resumed.opt.zero_grad()
            resumed.backward(grad)
            resumed.opt.step()
            again.append(resumed.value())
        return values, again, len([a for a in rank.opt.state_dict()["averages"] if a is not None])

    owner, replica = ranks(2, work)
    assert owner[0] == replica[0] == near([0.9, 1.0, 1.1, 1.0])
    assert owner[1] == replica[1] == owner[0][1:]
    assert (owner[2], replica[2]) == (1, 0)


MATRIX = torch.linspace(-1.0, 2.0, 24).view(8, 3)


def as_one(kind: Callable[..., torch.optim.Optimizer], start: Tensor, **options: Any) -> Tensor:  # noqa: ANN401
    """Three steps of one copy that gets both gradients."""
    parameter = nn.Parameter(start.clone())
    bare = kind([parameter], lr=0.1, **options)
    for step in range(3):
        parameter.grad = start.sin() * (step + 1) + start.cos()
        bare.step()
    return parameter.detach()


def as_two(fabric: Fabric, kind: Callable[..., torch.optim.Optimizer], **options: Any) -> Tensor:  # noqa: ANN401
    rank = Rank(
        fabric,
        kind,
        values={NAMES[fabric.rank]: MATRIX},
        dtype=torch.float32,
        assign={"chunk_bytes": 1},
        **options,
    )
    for step in range(3):
        add_grad(rank.weight, MATRIX.sin() * (step + 1) if fabric.rank == 0 else MATRIX.cos())
        rank.opt.step()
        rank.opt.zero_grad()
        assert rank.own.check()
    return rank.weight.detach()


INNER: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.SGD, {"fused": True}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.AdamW, {"foreach": True}),
    (torch.optim.AdamW, {"foreach": False}),
    (torch.optim.Adagrad, {"fused": True}),
    (torch.optim.RMSprop, {"centered": True}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.Adadelta, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.Rprop, {}),
    (torch.optim.Adafactor, {}),
    (Lion, {}),
    *([(torch.optim.Muon, {})] if hasattr(torch.optim, "Muon") else []),
]


@pytest.mark.parametrize(("kind", "options"), INNER, ids=lambda v: getattr(v, "__name__", None) or str(v))
def test_every_inner_optimizer_steps_as_on_one_copy(kind: Any, options: dict[str, Any]) -> None:  # noqa: ANN401
    expected = as_one(kind, MATRIX, **options)
    assert not torch.equal(expected, MATRIX)
    for found in ranks(2, partial(as_two, kind=kind, **options)):
        assert torch.equal(found, expected)


def test_capturable_fails_as_in_torch_where_the_device_cannot() -> None:
    """torch wants capturable parameters on an accelerator; the option reaches the inner optimizer."""
    with pytest.raises(AssertionError, match="capturable"):
        as_one(torch.optim.AdamW, MATRIX, capturable=True)
    for error in errors(2, partial(as_two, kind=torch.optim.AdamW, capturable=True)):
        assert "capturable" in str(error)


def test_a_tensor_lr_that_a_scheduler_writes_in_place() -> None:
    def work(fabric: Fabric) -> float:
        rank = Rank(fabric, torch.optim.Adam, lr=torch.tensor(0.1, dtype=torch.float64))
        schedule = lr_scheduler.StepLR(rank.opt, 1, gamma=0.5)
        for _ in range(2):
            rank.step()
            schedule.step()
        return rank.value()

    owner, replica = ranks(2, work)
    assert owner == replica == near(0.85, 1e-6)


def test_a_world_of_one_does_everything() -> None:
    def work(fabric: Fabric) -> None:
        rank = alone(fabric, torch.optim.AdamW, dtype=torch.bfloat16, master_dtype=torch.float32)
        with rank.opt.no_sync():
            rank.backward()
        rank.backward()
        rank.opt.finalize_grads()
        assert float(rank.opt.clip_grad_norm_(1.0)) == 4.0
        rank.opt.step()
        rank.opt.zero_grad()
        assert rank.own.check()
        rank.own.sync()
        rank.opt.load_state_dict(rank.opt.state_dict())
        assert "one parameter" in rank.own.describe()
        assert rank.opt.stats.sent.total == 0
        assert rank.opt.ownership is rank.own
        assert next(iter(rank.opt.state.values()))["master"].dtype == torch.float32
        rank.own.close()

    ranks(1, work)


def test_a_tie_error_of_the_constructor_leaves_the_ownership_usable() -> None:
    def work(fabric: Fabric) -> float:
        module = Weights({NAMES[fabric.rank]: 1.0})
        own = assign_over(fabric, module, TIE)
        with pytest.raises(TieError):
            OwnerOptimizer(module.parameters() if fabric.rank else [], torch.optim.SGD, ownership=own, lr=0.1)
        opt = OwnerOptimizer(module.parameters(), torch.optim.SGD, ownership=own, lr=0.1)
        add_grad(module.get_parameter(NAMES[fabric.rank]), 2.0 + fabric.rank)
        assert float(opt.clip_grad_norm_(math.inf)) == 5.0
        opt.step()
        return module.get_parameter(NAMES[fabric.rank]).item()

    assert ranks(2, work) == [HALF, HALF]
