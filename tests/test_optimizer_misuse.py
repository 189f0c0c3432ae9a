"""What users do to parameters, groups, gradients and state between steps: right, or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from owners import NAMES, TIE, Rank, Weights, add_grad, errors, near, process_group, ranks
from tiny import one_torch_thread
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrize, prune

from piper_owner.assignment import assign_over, assign_owners
from piper_owner.errors import ConfigError, ExchangeError, TieError
from piper_owner.optimizer_wrap import OwnerOptimizer
from piper_owner.transport import Fabric

if TYPE_CHECKING:
    from ranks import RankPool


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


# -- a Parameter that is replaced


def load_assigning(module: nn.Module) -> None:
    module.load_state_dict({k: v.clone() for k, v in module.state_dict().items()}, assign=True)


def assign_anew(module: nn.Module) -> None:
    for part in module.children():
        part.weight = nn.Parameter(torch.ones(1, dtype=torch.float64))


def take_weights_apart(module: nn.Module) -> None:
    """As torch.nn.utils.weight_norm does."""
    for part in module.children():
        part.direction = nn.Parameter(part.get_parameter("weight").detach().clone())
        del part.weight


REPLACING = pytest.mark.parametrize("replace", [load_assigning, assign_anew, take_weights_apart])


@REPLACING
def test_a_parameter_replaced_before_the_optimizer_is_made(replace: Callable[[nn.Module], None]) -> None:
    """On one rank alone: the others hear of it, because the constructor is collective."""

    def work(fabric: Fabric) -> None:
        module = Weights({NAMES[fabric.rank]: 1.0})
        own = assign_over(fabric, module, TIE)
        if fabric.rank == 1:
            replace(module)
        OwnerOptimizer(module.parameters(), torch.optim.SGD, ownership=own, lr=0.1)

    for error in errors(2, work):
        assert isinstance(error, TieError)
        for word in (*NAMES, "on rank 1", "call assign_owners after it"):
            assert word in str(error)


@REPLACING
@pytest.mark.parametrize("use", ["check", "sync", "step", "clip", "begin"])
def test_a_parameter_replaced_after_the_optimizer_was_made(
    replace: Callable[[nn.Module], None], use: str
) -> None:
    def work(fabric: Fabric) -> None:
        rank = Rank(fabric)
        rank.step()
        rank.backward()
        if fabric.rank == 1:
            replace(rank.module)
        if use == "begin":
            rank.opt.begin_exchange()
        if use == "check":
            rank.own.check()
        elif use == "sync":
            rank.own.sync()
        elif use == "clip":
            rank.opt.clip_grad_norm_(1.0)
        else:
            rank.opt.step()

    owner, replica = errors(2, work)
    assert isinstance(replica, TieError)
    assert "call assign_owners after it" in str(replica)
    assert isinstance(owner, ExchangeError)
    assert "TieError" in str(owner)
    assert "rank 1 failed first" in str(owner)


def test_a_parameter_that_is_kept_under_another_name_is_the_same() -> None:
    def work(fabric: Fabric) -> float:
        rank = Rank(fabric)
        weight = rank.weight
        part = next(rank.module.children())
        if fabric.rank == 0:
            parametrize.register_parametrization(part, "weight", nn.Identity())
        else:
            prune.identity(part, "weight")
        add_grad(weight, rank.grad)
        rank.opt.step()
        assert rank.own.check()
        return weight.item()

    assert ranks(2, work) == [near(0.5)] * 2


def sharded(fabric: Fabric, replaces: bool) -> bool:
    """Two ranks shard one stage that holds both names."""
    with process_group(fabric):
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))
        module = Weights(dict.fromkeys(NAMES, torch.ones(4, 2)), dtype=torch.float32)
        module.get_submodule("head").weight = module.get_parameter(NAMES[0])
        stage = fully_shard(module, mesh=mesh["dp"])
        own = assign_owners(module, TIE, group=mesh["pp"])
        opt = OwnerOptimizer(module.parameters(), torch.optim.SGD, ownership=own, lr=0.1)
        weight = next(module.parameters())
        weight.grad = torch.ones_like(weight)
        if replaces:
            load_assigning(module)
        else:
            stage.unshard()  # shows the whole parameter, as a forward pass does
            assert next(module.parameters()) is not weight
        try:
            opt.step()
        except TieError:
            return True
        assert own.check()
        stage.reshard()
        return False


@pytest.mark.parametrize("replaces", [False, True])
def test_a_sharded_parameter_that_is_shown_whole_is_not_replaced(rank_pool: RankPool, replaces: bool) -> None:
    assert rank_pool.run(2, sharded, replaces) == [replaces] * 2


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_tie_that_no_optimizer_lists_is_named_in_a_warning(is_frozen: bool) -> None:
    def work(fabric: Fabric) -> list[float]:
        rank = Rank(fabric, local=1.0, params=lambda module: [module.get_parameter("own.weight")])
        rank.weight.requires_grad_(not is_frozen)
        for _ in range(2):
            rank.local.grad = torch.ones_like(rank.local)
            if not is_frozen:
                rank.backward()
            rank.opt.step()
        return [rank.weight.item(), rank.local.item()]

    if is_frozen:
        assert ranks(2, work) == [[1.0, near(0.8)]] * 2
        return
    with pytest.warns(UserWarning, match="no OwnerOptimizer lists it") as caught:
        assert ranks(2, work) == [[1.0, near(0.8)]] * 2
    assert len(caught) == 2  # once on each rank


# -- groups that change


def reverse(rank: Rank) -> None:
    rank.opt.param_groups.reverse()


def insert(rank: Rank) -> None:
    other = nn.Parameter(torch.ones(1, dtype=torch.float64))
    rank.opt.param_groups.insert(0, {**rank.opt.param_groups[0], "params": [other], "lr": 7.0})


def delete(rank: Rank) -> None:
    del rank.opt.param_groups[0]


def swap(rank: Rank) -> None:
    groups = rank.opt.param_groups
    groups[0]["params"], groups[1]["params"] = groups[1]["params"], groups[0]["params"]


def remove(rank: Rank) -> None:
    groups = rank.opt.param_groups
    groups[1]["params"] = []


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Rprop])  # streamed, and whole
@pytest.mark.parametrize("master", [None, torch.float64])
@pytest.mark.parametrize("change", [reverse, insert, delete, swap, remove])
def test_groups_that_change_between_steps(
    change: Callable[[Rank], None], master: torch.dtype | None, kind: type[torch.optim.Optimizer]
) -> None:
    """The tie is stepped with the group that it is in then, or not at all, as in one process."""
    value = torch.ones(6, 4)
    options: dict[str, Any] = {"lr": 0.125}

    def groups(weights: list[nn.Parameter], local: nn.Parameter) -> list[dict[str, Any]]:
        return [{"params": [local], "lr": 0.5}, {"params": weights, "lr": 0.125}]

    def alone() -> torch.Tensor:
        weight, local = nn.Parameter(value.clone()), nn.Parameter(torch.ones(1))
        opt = kind(groups([weight], local), **options)
        for step in range(3):
            weight.grad = torch.full_like(value, 5.0)
            if step == 1:
                change(_Alone(opt))  # type: ignore[arg-type]
            opt.step()
        return weight.detach()

    def work(fabric: Fabric) -> torch.Tensor:
        rank = Rank(
            fabric,
            kind,
            values={NAMES[fabric.rank]: value},
            local=1.0,
            dtype=torch.float32,
            params=lambda m: groups([m.get_parameter(NAMES[fabric.rank])], m.get_parameter("own.weight")),
            assign={"chunk_bytes": 32},
            master_dtype=master,
            **options,
        )
        for step in range(3):
            rank.backward()
            if step == 1:
                change(rank)
            rank.opt.step()
            rank.opt.zero_grad()
        assert rank.own.check()
        return rank.weight.detach()

    expected = alone()
    for weight in ranks(2, work):
        assert torch.equal(weight, expected)


class _Alone:
    def __init__(self, opt: torch.optim.Optimizer) -> None:
        self.opt = opt


# -- a backward after the exchange


@pytest.mark.parametrize("exchange", ["finalize", "clip"])
def test_a_backward_on_the_owner_after_the_exchange_into_masters(exchange: str) -> None:
    def work(fabric: Fabric) -> None:
        rank = Rank(fabric, dtype=torch.bfloat16, master_dtype=torch.float32)
        rank.backward()
        if exchange == "clip":
            rank.opt.clip_grad_norm_(1.0)
        else:
            rank.opt.finalize_grads()
        if fabric.rank == 0:
            rank.backward()
        rank.opt.step()

    owner, replica = errors(2, work)
    assert isinstance(owner, ExchangeError)
    assert "a backward ran on rank 0 after its gradient had been exchanged" in str(owner)
    assert "rank 0 failed first" in str(replica)


# -- a first step that looks like the one that makes state


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("still", [0, 1])
def test_a_warm_up_whose_state_was_read_is_stepped(
    still: int, kind: Callable[..., torch.optim.Optimizer]
) -> None:
    """All gradients of one rank are zero in the first step, and its lr is 0."""

    def work(fabric: Fabric) -> tuple[int, float]:
        rank = Rank(fabric, kind, local=1.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(rank.opt, lambda step: step / 2)
        for step in range(3):
            assert len(rank.opt.state) >= 0  # as a logger would
            rank.backward(0.0 if step == 0 and fabric.rank == still else 1.0)
            rank.local.grad = torch.zeros_like(rank.local)
            rank.opt.step()
            rank.opt.zero_grad()
            schedule.step()
        return rank.own.step, rank.value()

    weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
    alone = kind([weight], lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(alone, lambda step: step / 2)
    for step in range(3):
        weight.grad = torch.full_like(weight, (3.0, 2.0)[still] if step == 0 else 5.0)
        alone.step()
        schedule.step()
    assert ranks(2, work) == [(3, near(weight.item()))] * 2


def test_the_state_making_step_is_known_by_its_caller() -> None:
    """Also while lr is a tensor, and where a schedule has wrapped `step`."""

    def work(fabric: Fabric) -> int:
        rank = Rank(fabric, torch.optim.Adam, local=1.0, lr=torch.tensor(0.1), foreach=False)
        torch.optim.lr_scheduler.LambdaLR(rank.opt, lambda step: 1.0)
        if fabric.rank == 0:
            get_optimizer_state_dict(rank.module, rank.opt)
            assert len(rank.opt.state) == 2
        assert rank.value() == 1.0
        return rank.own.step

    assert ranks(2, work) == [0, 0]


# -- options and classes that cannot work


@pytest.mark.parametrize("option", ["grad_dtype", "master_dtype"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, "bf16"])
def test_a_dtype_that_is_not_of_floating_point(option: str, dtype: object) -> None:
    def work(fabric: Fabric) -> None:
        options: dict[str, Any] = {option: dtype} if fabric.rank == 1 else {}
        Rank(fabric, **options)

    for error in errors(2, work):
        assert isinstance(error, ConfigError)
        assert f"{option}={dtype!r}" in str(error)


def with_pre_hook(params: Any, **options: Any) -> torch.optim.Optimizer:  # noqa: ANN401 - as in torch
    made = torch.optim.SGD(params, **options)
    made.register_step_pre_hook(lambda *_: None)
    return made


def with_post_hook(params: Any, **options: Any) -> torch.optim.Optimizer:  # noqa: ANN401 - as in torch
    made = torch.optim.SGD(params, **options)
    made.register_step_post_hook(lambda *_: None)
    return made


def with_own_step(params: Any, **options: Any) -> torch.optim.Optimizer:  # noqa: ANN401 - as in torch
    made = torch.optim.SGD(params, **options)
    made.step = made.step  # type: ignore[method-assign]
    return made


@pytest.mark.parametrize(
    ("factory", "what"),
    [(with_pre_hook, "pre-hooks"), (with_post_hook, "post-hooks"), (with_own_step, "a step of its own")],
)
def test_a_factory_whose_optimizer_does_more_than_its_class(
    factory: Callable[..., torch.optim.Optimizer], what: str
) -> None:
    for error in errors(2, lambda fabric: Rank(fabric, factory if fabric.rank == 0 else torch.optim.SGD)):
        assert isinstance(error, ConfigError)
        assert what in str(error)


# -- state of another run


@pytest.mark.parametrize("saved", [None, torch.float64])
def test_state_of_other_masters_or_none_takes_the_dtype_of_masters(saved: torch.dtype | None) -> None:
    def work(fabric: Fabric) -> tuple[float, list[torch.dtype]]:
        first = Rank(fabric, torch.optim.AdamW, dtype=torch.bfloat16, master_dtype=saved)
        first.step()
        state = first.opt.state_dict()
        second = Rank(fabric, torch.optim.AdamW, dtype=torch.bfloat16, master_dtype=torch.float32)
        second.opt.load_state_dict(state)
        second.step()
        held = second.opt.state[second.weight] if fabric.rank == 0 else {}
        return second.value(), [value.dtype for value in held.values()]

    (owner, dtypes), (replica, none) = ranks(2, work)
    assert owner == replica < 1.0
    assert set(dtypes) == {torch.float32}
    assert len(dtypes) == 4  # step, two moments and the master
    assert none == []


@pytest.mark.parametrize("master", [None, torch.float64])
def test_state_of_another_shape_changes_nothing(master: torch.dtype | None) -> None:
    def work(fabric: Fabric) -> None:
        options: dict[str, Any] = {"dtype": torch.float32, "master_dtype": master, "local": 1.0}

        def made(shape: tuple[int, int]) -> Rank:
            rank = Rank(fabric, torch.optim.AdamW, values={NAMES[fabric.rank]: torch.ones(shape)}, **options)
            rank.local.grad = torch.ones_like(rank.local)
            rank.backward()
            rank.opt.step()
            return rank

        first, second = made((4, 2)), made((3, 5))
        first.opt.param_groups[0]["lr"] = 0.5
        second.opt.zero_grad()
        before = str(second.opt.state_dict())
        try:
            second.opt.load_state_dict(first.opt.state_dict())
        finally:
            assert str(second.opt.state_dict()) == before
            second.step()
            assert second.own.check()

    for error in errors(2, work):
        assert isinstance(error, ConfigError)
        assert "has shape (4, 2)" in str(error)
        assert "(3, 5)" in str(error)


@pytest.mark.parametrize("wrong", [{}, {"state": {}, "param_groups": [{"params": [0, 1, 2]}]}])
def test_state_of_other_groups_changes_nothing_on_any_rank(wrong: dict[str, Any]) -> None:
    def work(fabric: Fabric) -> None:
        rank = Rank(fabric, torch.optim.AdamW, local=1.0)
        saved = rank.opt.state_dict()
        rank.local.grad = torch.ones_like(rank.local)
        rank.step()
        before = str(rank.opt.state_dict())
        try:
            rank.opt.load_state_dict(wrong if fabric.rank == 1 else saved)
        finally:
            assert str(rank.opt.state_dict()) == before

    for error in errors(2, work):
        assert isinstance(error, ConfigError)
        assert "load_state_dict: " in str(error)


# -- clipping


@pytest.mark.parametrize("norm", [(1.0, "inf"), (0.0, 2.0), (float("inf"), 1.0), (torch.tensor(1.0), 3)])
def test_clipping_takes_what_torch_takes(norm: tuple[Any, Any]) -> None:
    weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
    weight.grad = torch.full_like(weight, 5.0)
    total = torch.nn.utils.clip_grad_norm_([weight], *norm)
    right = 1.0 - 0.1 * weight.grad.item()

    def work(fabric: Fabric) -> tuple[float, float]:
        rank = Rank(fabric)
        rank.backward()
        found = rank.opt.clip_grad_norm_(*norm)
        rank.opt.step()
        return float(found), rank.value()

    assert ranks(2, work) == [(near(float(total)), near(right))] * 2


@pytest.mark.parametrize(
    "norm",
    [
        (-1.0, 2.0),
        (float("nan"), 2.0),
        (1.0, 0.0),
        (1.0, -1.0),
        (1.0, "-inf"),
        (1.0, float("nan")),
        ("x", 2.0),
    ],
)
def test_clipping_to_no_norm(norm: tuple[Any, Any]) -> None:
    def work(fabric: Fabric) -> None:
        rank = Rank(fabric)
        rank.backward()
        grad = rank.weight.grad
        assert grad is not None
        try:
            rank.opt.clip_grad_norm_(*norm)
        finally:
            assert rank.weight.grad is grad
            assert grad.item() == rank.grad

    for error in errors(2, work):
        assert isinstance(error, ConfigError)
        assert "clip_grad_norm_: " in str(error)
