"""torch.distributed.checkpoint takes OwnerOptimizer for any optimizer, on two real ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from owners import NAMES, TIE, Weights, add_grad, near, process_group, ranks
from tiny import one_torch_thread
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from piper_owner.assignment import Ownership, assign_over, assign_owners
from piper_owner.grad_scaler import GradScaler
from piper_owner.optimizer_wrap import OwnerOptimizer
from piper_owner.transport import Fabric

if TYPE_CHECKING:
    from ranks import RankPool

START = torch.linspace(-1.0, 1.0, 10).view(5, 2)
STATELESS = {"kind": torch.optim.SGD, "lr": 0.1}
PLAIN = {"kind": torch.optim.Adam, "lr": 0.1}
MASTERS = {"kind": torch.optim.Adam, "lr": 0.1, "dtype": torch.bfloat16, "master_dtype": torch.float32}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


class Trainer:
    """A stage with the tied table, and with a weight of its own unless `only_tied`."""

    def __init__(
        self,
        own: Ownership | None,
        rank: int,
        *,
        kind: Any,  # noqa: ANN401
        dtype: torch.dtype = torch.float32,
        only_tied: bool = False,
        **options: Any,  # noqa: ANN401
    ) -> None:
        self.rank = rank
        values: dict[str, float | Tensor] = {NAMES[rank]: START}
        if not only_tied:
            values[f"stage{rank}.weight"] = 1.0
        self.module = Weights(values, dtype=dtype)
        self.own = own or assign_owners(self.module, TIE)
        self.opt = OwnerOptimizer(self.module.parameters(), kind, ownership=self.own, **options)

    def step(self, seed: float) -> None:
        """One step whose gradients depend on the step and the rank."""
        for parameter in self.module.parameters():
            add_grad(parameter, (parameter.detach() * seed).cos() + self.rank)
        self.opt.step()
        self.opt.zero_grad()

    def proof(self) -> list[Tensor]:
        """Weights and state, after a proof that the copies are equal."""
        assert self.own.check()
        tensors = [p.detach() for p in self.module.parameters()]
        for parameter in self.module.parameters():
            state = self.opt.state.get(parameter, {})
            tensors += [value for _, value in sorted(state.items()) if isinstance(value, Tensor)]
        return [tensor.clone() for tensor in tensors]


def same(one: list[Tensor], two: list[Tensor]) -> bool:
    return [t.dtype for t in one] == [t.dtype for t in two] and all(map(torch.equal, one, two))


def round_trip(fabric: Fabric, setup: dict[str, Any], steps: int, flatten: bool) -> bool:
    """Save in memory after `steps`, load into a fresh optimizer, and take one more step on both."""
    with process_group(fabric):
        first = Trainer(None, fabric.rank, **setup)
        for step in range(steps):
            first.step(step + 1.0)
        options = StateDictOptions(flatten_optimizer_state_dict=flatten)
        saved = get_optimizer_state_dict(first.module, first.opt, options=options)
        second = Trainer(None, fabric.rank, **setup)
        second.module.load_state_dict(first.module.state_dict())
        # A copy: as in torch, what is loaded is not cloned, and `first` goes on in place.
        set_optimizer_state_dict(second.module, second.opt, copy.deepcopy(saved), options=options)
        assert same(first.proof(), second.proof())
        first.step(9.0)
        second.step(9.0)
        return same(first.proof(), second.proof())


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("setup", [STATELESS, PLAIN, MASTERS], ids=["SGD", "Adam", "masters"])
def test_in_memory_both_directions(rank_pool: RankPool, setup: dict[str, Any], steps: int) -> None:
    assert rank_pool.run(2, round_trip, setup, steps, False) == [True, True]


def test_flattened_where_every_rank_steps_something(rank_pool: RankPool) -> None:
    assert rank_pool.run(2, round_trip, PLAIN, 2, True) == [True, True]


def test_where_one_rank_steps_nothing(rank_pool: RankPool) -> None:
    assert rank_pool.run(2, round_trip, {**PLAIN, "only_tied": True}, 2, False) == [True, True]


def save(fabric: Fabric, setup: dict[str, Any], path: str) -> list[Tensor]:
    """Two steps, save to disk, one more step."""
    with process_group(fabric):
        trainer = Trainer(None, fabric.rank, **setup)
        trainer.step(1.0)
        trainer.step(2.0)
        model, optimizer = get_state_dict(trainer.module, trainer.opt)
        # A rank's list of groups is its own; under one key torch would keep that of one rank.
        mine = {f"rank{fabric.rank}": {"model": model, "optimizer": optimizer}}
        state_dict_saver.save(mine, checkpoint_id=path)
        trainer.step(3.0)
        return trainer.proof()


def resume(fabric: Fabric, setup: dict[str, Any], path: str) -> list[Tensor]:
    """A fresh start from disk, and the same third step."""
    with process_group(fabric):
        trainer = Trainer(None, fabric.rank, **setup)
        with torch.no_grad():
            for parameter in trainer.module.parameters():
                parameter.fill_(7.0)
        model, optimizer = get_state_dict(trainer.module, trainer.opt)
        state: dict[str, Any] = {f"rank{fabric.rank}": {"model": model, "optimizer": optimizer}}
        state_dict_loader.load(state, checkpoint_id=path)
        loaded = state[f"rank{fabric.rank}"]
        set_state_dict(
            trainer.module,
            trainer.opt,
            model_state_dict=loaded["model"],
            optim_state_dict=loaded["optimizer"],
        )
        assert trainer.own.check()
        trainer.step(3.0)
        return trainer.proof()


@pytest.mark.parametrize("setup", [PLAIN, MASTERS], ids=["Adam", "masters"])
def test_case_34_a_fresh_resume_from_disk(rank_pool: RankPool, tmp_path: Path, setup: dict[str, Any]) -> None:
    straight = rank_pool.run(2, save, setup, str(tmp_path))
    resumed = rank_pool.run(2, resume, setup, str(tmp_path))
    for one, two in zip(straight, resumed, strict=True):
        assert same(one, two)


def test_the_state_making_step_is_local() -> None:
    """torch steps an optimizer whose state is empty. A rank alone does so here: nobody else may be needed."""

    def work(fabric: Fabric) -> list[float]:
        module = Weights({NAMES[fabric.rank]: START, f"stage{fabric.rank}.weight": 1.0})
        own = assign_over(fabric, module, TIE)
        trainer_options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.5}
        opt = OwnerOptimizer(module.parameters(), torch.optim.AdamW, ownership=own, **trainer_options)
        before = [p.detach().clone() for p in module.parameters()]
        if fabric.rank == 0:
            get_optimizer_state_dict(module, opt)
            assert len(opt.state) == 2
        assert own.step == 0
        assert all(map(torch.equal, before, module.parameters()))
        assert own.check()
        return [float(group["lr"]) for group in opt.param_groups]

    assert ranks(2, work) == [[0.1], [0.1]]


@pytest.mark.parametrize("hooked", [False, True])
def test_the_state_making_step_is_local_with_frozen_weights_and_hooks(hooked: bool) -> None:
    def work(fabric: Fabric) -> bool:
        module = Weights({NAMES[fabric.rank]: START, f"stage{fabric.rank}.weight": 1.0})
        module.get_parameter(f"stage{fabric.rank}.weight").requires_grad_(False)
        own = assign_over(fabric, module, TIE)
        opt = OwnerOptimizer(module.parameters(), torch.optim.Adam, ownership=own, lr=0.1)
        if hooked:
            opt.register_step_pre_hook(lambda *_: None)
        if fabric.rank == 1:  # only the frozen weight is in its groups
            get_optimizer_state_dict(module, opt)
        return own.check()

    assert ranks(2, work) == [True, True]


def test_a_warm_up_from_zero_on_a_replica_whose_state_was_read() -> None:
    """Its lr is 0 and it steps nothing itself, and yet the owner waits for its gradient."""

    def work(fabric: Fabric) -> float:
        module = Weights({NAMES[fabric.rank]: START, f"stage{fabric.rank}.weight": 1.0})
        if fabric.rank == 1:
            module.get_parameter("stage1.weight").requires_grad_(False)
        own = assign_over(fabric, module, TIE)
        opt = OwnerOptimizer(module.parameters(), torch.optim.SGD, ownership=own, lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: step / 2)
        for _ in range(2):
            add_grad(module.get_parameter(NAMES[fabric.rank]), 1.0)
            assert "state" in opt.state_dict()
            assert bool(opt.state) == (fabric.rank == 1)
            opt.step()
            opt.zero_grad()
            schedule.step()
        assert own.check()
        return module.get_parameter(NAMES[fabric.rank])[0, 0].item()

    assert ranks(2, work) == [near(-1.1), near(-1.1)]


def test_a_weight_thawed_on_an_idle_rank_makes_its_state_known() -> None:
    def work(fabric: Fabric) -> list[bool]:
        module = Weights({NAMES[fabric.rank]: START, f"stage{fabric.rank}.weight": 1.0})
        local = module.get_parameter(f"stage{fabric.rank}.weight")
        local.requires_grad_(False)
        own = assign_over(fabric, module, TIE)
        opt = OwnerOptimizer(module.parameters(), torch.optim.Adam, ownership=own, lr=0.1)
        seen = [bool(opt.state)]
        local.requires_grad_(True)
        seen.append(bool(opt.state))
        if fabric.rank == 1:
            get_optimizer_state_dict(module, opt)
            assert list(opt.state) == [local]
        local.requires_grad_(False)
        return [*seen, bool(opt.state), own.check()]

    # The tie is in the owner's groups, so that rank is never idle.
    assert ranks(2, work) == [[False, False, False, True], [True, False, True, True]]


def mixed(fabric: Fabric) -> tuple[list[float], float]:
    """Automatic mixed precision as torch documents it, over a pipeline of an embedding and a head."""
    with process_group(fabric):
        torch.manual_seed(0)
        parts: list[nn.Module] = [nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)]
        module = nn.ModuleDict({("embed", "head")[fabric.rank]: parts[fabric.rank]})
        with torch.no_grad():
            next(module.parameters()).copy_(torch.linspace(-1, 1, 20).view(5, 4))
        own = assign_owners(module, TIE)
        opt = OwnerOptimizer(module.parameters(), torch.optim.AdamW, ownership=own, lr=0.01)
        scaler = GradScaler("cpu", init_scale=16.0)
        for step in range(4):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                if fabric.rank == 0:
                    loss = module["embed"](torch.tensor([1, 2])).square().mean()
                else:
                    loss = module["head"](torch.ones(2, 4)).float().logsumexp(-1).mean()
            if step == 2 and fabric.rank == 1:
                loss = loss * float("inf")
            scaled: Any = scaler.scale(loss)
            scaled.backward()
            scaler.unscale_(opt)
            opt.clip_grad_norm_(1.0)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
            assert own.check()
        weights = next(module.parameters()).detach().flatten().tolist()
        own.close()
        return weights, scaler.get_scale()


def test_case_28_mixed_precision_end_to_end(rank_pool: RankPool) -> None:
    (first, scale), (second, other) = rank_pool.run(2, mixed)
    assert first == second != torch.linspace(-1, 1, 20).tolist()
    assert scale == other == near(8.0)
