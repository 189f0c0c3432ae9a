"""The rows layout between steps, before the first one, and where a step is skipped or a tie is frozen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from chains import Chain, Loop, Part, alone, closeness, microbatches, train
from owners import errors, ranks
from tiny import one_torch_thread
from torch import Tensor, nn

import piper_owner as po
from piper_owner.assignment import Ownership, assign_over
from piper_owner.errors import (
    ReplicaMismatchError,
    RowsError,
    TieError,
)
from piper_owner.optimizer_wrap import OwnerOptimizer
from piper_owner.transport import Fabric

LOOKUP, HEAD = Part(rank=0), Part(rank=1, looks_up=False)
TWO = Chain(parts=(LOOKUP, HEAD))
DATA = [microbatches(step) for step in range(5)]
NAMES = ("t0p0.use.weight", "t0p1.use.weight")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


# -- between steps


def test_evaluation_between_steps_changes_nothing() -> None:
    def work(loop: Loop) -> Any:  # noqa: ANN401
        first = loop.steps(DATA[:2])
        loop.stage.eval()
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                loop.prefetch(DATA[4])
                for each in DATA[4]:
                    loop.forward(each)
                assert loop.own.check()
        loop.prefetch(DATA[3])
        if loop.rank == 0:
            loop.forward(DATA[3][0])  # with a graph that nobody needs
        else:
            loop.lines[1][0].get(timeout=5)
        loop.opt.zero_grad()
        loop.stage.train()
        rest = loop.steps(DATA[2:])
        rest.losses = [*first.losses, *rest.losses]
        return rest

    assert closeness(train(TWO, (), work=work), alone(TWO, DATA)) < 1e-10


def test_rows_are_not_stale_after_a_load_or_a_sync() -> None:
    def work(loop: Loop) -> Any:  # noqa: ANN401
        before = {key: value.clone() for key, value in loop.stage.state_dict().items()}
        assert len(before) == 2 + loop.rank, "the owner's has the table"
        saved = loop.opt.state_dict()
        saved = torch.utils._pytree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, saved)
        loop.steps(DATA[3:])
        loop.prefetch(DATA[0])
        loop.stage.load_state_dict(before, strict=True)
        loop.own.sync()
        assert loop.own.check()
        loop.opt.load_state_dict(saved)
        assert loop.own.check()
        if loop.rank == 0:
            with pytest.raises(RowsError, match="was not fetched"):
                loop.forward(DATA[0][0])
        return loop.steps(DATA)

    # The state of AdamW before its first step is none.
    chain = replace(TWO, kind=torch.optim.SGD, options={"lr": 0.1})
    assert closeness(train(chain, (), work=work), alone(chain, DATA)) < 1e-10


def test_rows_that_were_fetched_before_a_sync_are_forgotten() -> None:
    def work(loop: Loop) -> None:
        loop.prefetch([torch.tensor([1, 2])])
        if loop.rank == 1:
            with torch.no_grad():
                loop.stage.get_parameter(NAMES[1]).mul_(2)
        loop.own.sync()
        assert loop.own.check()
        if loop.rank == 0:
            with pytest.raises(RowsError, match="id 1 was not fetched"):
                loop.forward(torch.tensor([1]))

    train(TWO, (), work=work)


def test_check_finds_a_row_that_something_else_has_written() -> None:
    def work(loop: Loop) -> None:
        loop.prefetch([torch.tensor([1, 2])])
        assert loop.own.check()
        if loop.rank == 1:
            with torch.no_grad():
                loop.stage.get_parameter(NAMES[1])[2] += 0.25
        with pytest.raises(ReplicaMismatchError, match=r"by up to 0\.25"):
            loop.own.check()

    train(TWO, (), work=work)


def test_a_frozen_tie_is_looked_up_and_sends_nothing_but_rows() -> None:
    def work(loop: Loop) -> Any:  # noqa: ANN401
        weight = loop.stage.get_submodule(NAMES[loop.rank].rpartition(".")[0]).weight
        weight.requires_grad_(False)
        for step in range(3):
            loop.prefetch(DATA[step])
            for each in DATA[step]:
                loop.pass_(each, share=2)
            loop.opt.step()
            loop.opt.zero_grad()
            sent = loop.opt.stats.sent
            assert sent.grads == sent.weights == 0
            assert (sent.rows > 0) == (loop.rank == 1)
            assert loop.own.check()
        return loop.steps(())

    chain = replace(TWO, kind=torch.optim.SGD, options={"lr": 0.1})
    found = train(chain, (), work=work)
    assert torch.equal(found.weights[NAMES[1]], chain.initial(0))


def test_a_skipped_step_of_a_grad_scaler_forgets_the_rows() -> None:
    def work(loop: Loop) -> Any:  # noqa: ANN401
        scaler = po.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
        scaler.scale(torch.ones(()))
        for number, step in enumerate((DATA[4], DATA[0], DATA[1])):
            loop.prefetch(step)
            for ids in step:
                done = loop.forward(ids, share=2)
                done = [(i, h, out * scaler.get_scale() if i == 1 else out) for i, h, out in done]
                loop.backward(done)
            if number == 0 and loop.rank == 0:
                weight = loop.stage.get_submodule("t0p0.use").weight
                weight.grad.mul_(float("inf"))  # type: ignore[operator, union-attr]
            scaler.step(loop.opt)
            scaler.update()
            loop.opt.zero_grad()
            assert scaler.get_scale() == 4.0
            assert loop.own.check()
            assert loop.opt.stats.sent.total > 0
        return loop.steps(())

    found, right = train(TWO, (), work=work), alone(TWO, DATA[:2])
    for key, value in found.weights.items():
        assert float((value - right.weights[key]).abs().max()) < 1e-10


# -- the first value


class Holder(nn.Module):
    """A module that holds the table as an embedding or as a head."""

    def __init__(self, rank: int, value: float | None, *, scale: float = 1.0) -> None:
        super().__init__()
        device = "meta" if value is None else "cpu"
        module: nn.Module = (
            nn.Embedding(6, 2, device=device) if rank == 0 else nn.Linear(2, 6, bias=False, device=device)
        )
        if value is not None:
            nn.init.constant_(module.weight, value)  # type: ignore[arg-type]
        self.add_module("embed" if rank == 0 else "head", module)
        self.own = nn.Linear(2, 2)


def first_value(embed: float | None, head: float | None, *, order: int = 1) -> list[float]:
    """The owner's value and the fetched rows' after assign_owners."""

    def work(fabric: Fabric) -> float:
        stage = Holder(fabric.rank, (embed, head)[fabric.rank])
        ties = [("embed.weight", "head.weight")[::order]]
        own: Ownership = assign_over(fabric, stage, ties, layout="rows")
        opt = OwnerOptimizer(stage.parameters(), torch.optim.SGD, ownership=own, lr=0.1)
        opt.prefetch(torch.tensor([3, 4]) if fabric.rank == 0 else None)
        assert own.check()
        if fabric.rank == 0:
            assert stage.embed.weight.device.type == "cpu"  # type: ignore[union-attr]
            return float(stage.embed(torch.tensor([4])).detach()[0, 1])  # type: ignore[operator]
        return float(stage.head.weight.detach()[5, 0])  # type: ignore[operator, union-attr]

    return ranks(2, work)


@pytest.mark.parametrize("order", [1, -1])
def test_the_value_comes_from_where_there_is_one(order: int) -> None:
    assert first_value(None, 3.0, order=order) == [3.0, 3.0]
    if order == 1:
        assert first_value(2.0, None) == [2.0, 2.0]
        with pytest.warns(UserWarning, match="differed from that of rank 0 by up to 1"):
            assert first_value(2.0, 3.0) == [2.0, 2.0]


def test_a_value_that_nobody_has_is_an_error_on_every_rank() -> None:
    def work(fabric: Fabric) -> None:
        assign_over(fabric, Holder(fabric.rank, None), [("embed.weight", "head.weight")], layout="rows")

    for error in errors(2, work):
        assert isinstance(error, TieError)
        assert "have both no value yet" in str(error)


def test_a_replica_has_no_state_and_no_row_before_the_first_prefetch() -> None:
    def work(loop: Loop) -> None:
        if loop.rank == 0:
            assert loop.stage.get_parameter(NAMES[0]).numel() == 0
        loop.steps(DATA[:1])
        held = [p for group in loop.opt.param_groups for p in group["params"]]
        assert len(held) == 2 + loop.rank, "the layer of its own, and on the owner the table"
        assert len(loop.opt.state) == len(held)

    train(TWO, (), work=work)


def test_a_second_optimizer_or_an_early_list_is_an_error() -> None:
    def work(fabric: Fabric) -> None:
        stage = Holder(fabric.rank, 1.0)
        early = list(stage.parameters())
        own = assign_over(fabric, stage, [("embed.weight", "head.weight")], layout="rows")
        OwnerOptimizer(early, torch.optim.SGD, ownership=own, lr=0.1)

    for error in errors(2, work):
        assert isinstance(error, TieError)
