"""What `attach` promises and refuses, and what a torch schedule does to gradients without it."""

from __future__ import annotations

import re
from contextlib import ExitStack
from typing import Any, Final

import pytest
import torch
from pipelines import (
    OPTIMIZERS,
    SCHEDULES,
    SINGLE,
    STEPS,
    VOCAB,
    WIDTH,
    Case,
    Model,
    alone,
    check_run,
    largest_difference,
    loop,
    mean_loss,
    num_messages,
    train,
    weights_of,
)
from ranks import RankPool
from torch import Tensor, nn

import piper_owner as po
from piper_owner.frontends.torch_pipelining import attach
from piper_owner.transport import BytesSent, Fabric


def first_step_error(fabric: Fabric, case: Case) -> str:
    with loop(fabric, case) as here:
        before = weights_of(here.modules)
        here.run()
        try:
            here.opt.step()
        except po.PiperOwnerError as error:
            after = weights_of(here.modules)
            assert all(torch.equal(after[name], value) for name, value in before.items())
            assert not any(here.opt.state.values())
            with pytest.raises(po.PiperOwnerError):  # also who catches it and goes on
                here.opt.ownership.check_scaling()
            return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("name", ["ScheduleZBVZeroBubble", "ScheduleInterleaved1F1B"])
def test_a_gradient_that_was_scaled_twice_is_refused_on_every_rank(rank_pool: RankPool, name: str) -> None:
    case = Case(schedule=name, ranks=2, attached=False, modules=True)
    errors = rank_pool.run(2, first_step_error, case)
    assert errors[0].startswith("ConfigError")
    assert f"{name} has divided its gradient by the 8 microbatches once for each of the stages" in errors[0]
    assert "attach(schedule, opt)" in errors[0]
    assert f"{name} has divided" in errors[1]


def test_ranks_that_hold_no_tie_learn_of_a_gradient_that_was_scaled_twice(rank_pool: RankPool) -> None:
    case = Case(schedule="ScheduleZBVZeroBubble", ranks=4, attached=False, modules=True, shares_layers=False)
    errors = rank_pool.run(4, first_step_error, case)
    assert all(error.startswith("ConfigError") for error in errors)
    assert all("tie 'embed.weight': ScheduleZBVZeroBubble has divided" in error for error in errors)


def drift(fabric: Fabric, case: Case) -> dict[str, Tensor]:
    with loop(fabric, case) as here:
        for pass_ in range(case.accumulate):
            here.run(0, pass_)
        here.opt.finalize_grads()
        parameters = [item for module in here.modules for item in module.named_parameters()]
        return {name: p.grad.clone() for name, p in parameters if p.grad is not None}


def test_torch_scales_what_was_accumulated_again(rank_pool: RankPool) -> None:
    """Guards our assumption that it does, to parameters without a tie too, and that `attach` does not."""
    case = Case(schedule="ScheduleGPipe", ranks=2, accumulate=2, attached=False)
    model = case.model
    passes = []
    for pass_ in range(2):
        ids, labels = case.batch(0, pass_)
        mean_loss(model(ids), labels).backward()
        passes.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    first, both = passes
    found = {name: grad for rank in rank_pool.run(2, drift, case) for name, grad in rank.items()}
    assert "layers.1.own.weight" in found
    for name, grad in found.items():
        wrong = both[name] - first[name] + first[name] / case.microbatches
        torch.testing.assert_close(grad, wrong, rtol=0, atol=1e-12)
        assert float((grad - both[name]).abs().max()) > 1e-3


def attach_error(fabric: Fabric, case: Case) -> str:
    try:
        with loop(fabric, case):
            return ""
    except po.ConfigError as error:
        return str(error)


SWAPPED: Final = [
    ("ScheduleInterleavedZeroBubble", 2),
    ("ScheduleZBVZeroBubble", 2),
    ("ScheduleZBVZeroBubble", 4),
    ("ScheduleDualPipeV", 4),
]


@pytest.mark.parametrize(("name", "ranks"), SWAPPED)
def test_deferred_receives_in_another_order_are_refused_on_every_rank(
    rank_pool: RankPool, name: str, ranks: int
) -> None:
    errors = rank_pool.run(ranks, attach_error, Case(schedule=name, ranks=ranks, defer_pp_recv=True))
    assert len(set(errors)) == 1
    assert re.match(rf"{name}: rank (\d) takes what comes from rank (?!\1)\d for the ", errors[0])
    assert "without defer_pp_recv=True" in errors[0]


@pytest.mark.parametrize(("name", "ranks"), SWAPPED[:2])
def test_torch_trains_wrongly_with_receives_in_another_order(
    rank_pool: RankPool, name: str, ranks: int
) -> None:
    """Guards our assumption that it does, without an error."""
    case = Case(schedule=name, ranks=ranks, attached=False, defer_pp_recv=True)
    assert largest_difference(rank_pool.run(ranks, train, case), alone(case)) > 1e-3


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("ScheduleLoopedBFS", 2),
        ("ScheduleInterleaved1F1B", 2),
        ("ScheduleInterleavedZeroBubble", 4),
        ("ScheduleDualPipeV", 2),
    ],
)
def test_deferred_receives_in_order_are_fine(rank_pool: RankPool, name: str, ranks: int) -> None:
    check_run(rank_pool, Case(schedule=name, ranks=ranks, defer_pp_recv=True))


def run_twice(fabric: Fabric, case: Case) -> tuple[str, dict[str, Tensor]]:
    with loop(fabric, case) as here:
        here.run(0, 0)
        message = ""
        try:
            here.run(0, 1)
        except po.ConfigError as error:
            message = str(error)
        here.opt.skip_step()
        here.opt.zero_grad()
        assert here.own.check()
        for step in range(STEPS):
            here.run(step)
            here.opt.step()
            here.opt.zero_grad()
            assert here.own.check()
        return message, weights_of(here.modules)


def test_a_second_pass_outside_no_sync_is_refused_and_can_be_skipped(rank_pool: RankPool) -> None:
    case = Case(schedule="ScheduleInterleaved1F1B", ranks=2)
    reference = alone(case)
    for rank, (message, weights) in enumerate(rank_pool.run(2, run_twice, case)):
        assert f"rank {rank}: a second backward pass in step 0" in message
        assert "opt.no_sync()" in message
        assert all(float((value - reference[name]).abs().max()) < 1e-10 for name, value in weights.items())


def step_after_no_sync(fabric: Fabric, case: Case, odd: tuple[int, ...]) -> str:
    """The passes of the ranks `odd` are all in no_sync."""
    with loop(fabric, case) as here:
        before = weights_of(here.modules)
        with ExitStack() as stack:
            if fabric.rank in odd:
                stack.enter_context(here.opt.no_sync())
            here.run()
        try:
            here.opt.step()
        except po.PiperOwnerError as error:
            after = weights_of(here.modules)
            is_ours = fabric.rank in odd
            assert not is_ours or all(torch.equal(after[name], value) for name, value in before.items())
            return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("name", "num", "odd"),
    [("Schedule1F1B", 2, (0, 1)), ("Schedule1F1B", 3, (0, 2)), ("ScheduleZBVZeroBubble", 2, (1,))],
)
def test_a_step_of_gradients_that_no_pass_has_divided_is_refused(
    rank_pool: RankPool, name: str, num: int, odd: tuple[int, ...]
) -> None:
    case = Case(schedule=name, ranks=num, shares_layers=False)
    for rank, error in enumerate(rank_pool.run(num, step_after_no_sync, case, odd)):
        if 0 < rank < num - 1:  # it holds no tie, and its own gradients are right
            assert rank not in odd
            continue
        assert "opt.no_sync()" in error
        assert "never divided by the 8 microbatches" in error
        assert error.startswith("ConfigError: stage" if rank in odd else "PeerLostError"), error


def discard_then_train(fabric: Fabric, case: Case) -> dict[str, Tensor]:
    with loop(fabric, case) as here:
        with here.opt.no_sync():
            here.run(0, 1)
        here.opt.zero_grad(set_to_none=False)
        here.opt.step()  # of zeros
        here.opt.zero_grad()
        for step in range(STEPS):
            if not case.scale_grads:  # then there is nothing to divide by
                with here.opt.no_sync():
                    here.run(step)
            else:
                here.run(step)
            here.opt.step()
            here.opt.zero_grad()
        return weights_of(here.modules)


@pytest.mark.parametrize("scale_grads", [True, False])
def test_a_pass_in_no_sync_may_be_thrown_away(rank_pool: RankPool, scale_grads: bool) -> None:
    case = Case(schedule="ScheduleInterleaved1F1B", ranks=2, scale_grads=scale_grads)
    reference = alone(case)
    for weights in rank_pool.run(2, discard_then_train, case):
        assert all(float((value - reference[name]).abs().max()) < 1e-10 for name, value in weights.items())


def clipped(fabric: Fabric, case: Case) -> tuple[list[float], dict[str, Tensor]]:
    norms = []
    with loop(fabric, case) as here:
        attach(here.schedule, here.opt)  # a second time changes nothing
        for step in range(STEPS):
            ids, labels = case.batch(step, 0)
            if SCHEDULES[case.schedule] in SINGLE:  # torch's own eval fails on V schedules
                here.schedule.eval(*[ids] * here.stages[0].is_first, target=labels)
            here.opt.zero_grad()
            here.run(step)
            assert here.own.check(), "also while gradients are on their way"
            norms.append(float(here.opt.clip_grad_norm_(0.1)))
            here.opt.step()
        return norms, weights_of(here.modules)


@pytest.mark.parametrize("name", ["Schedule1F1B", "ScheduleZBVZeroBubble"])
def test_clip_eval_and_check_between_the_schedule_and_the_step(rank_pool: RankPool, name: str) -> None:
    case = Case(schedule=name, ranks=2, modules=True)
    model = case.model
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    expected = []
    for step in range(STEPS):
        ids, labels = case.batch(step, 0)
        optimizer.zero_grad()
        mean_loss(model(ids), labels).backward()
        expected.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
    reference = weights_of([model])
    for norms, weights in rank_pool.run(2, clipped, case):
        assert norms == pytest.approx(expected, abs=1e-12)
        assert all(float((value - reference[each]).abs().max()) < 1e-10 for each, value in weights.items())


def messages_of(fabric: Fabric, case: Case) -> list[tuple[int, BytesSent]]:
    with loop(fabric, case) as here:
        found = []
        for step in range(2):
            before = num_messages(here.own)
            here.run(step)
            here.opt.step()
            found.append((num_messages(here.own) - before, here.opt.stats.sent))
        return found


@pytest.mark.parametrize("attached", [True, False])
def test_messages_do_not_depend_on_the_number_of_microbatches(rank_pool: RankPool, attached: bool) -> None:
    few, many = (
        rank_pool.run(
            2,
            messages_of,
            Case(schedule="ScheduleInterleaved1F1B", ranks=2, attached=attached, microbatches=n),
        )
        for n in (2, 16)
    )
    assert few == many
    grads, weights = VOCAB * WIDTH * 8, WIDTH * WIDTH * 8
    # The head's gradient goes to the embedding's rank, the layer's weight is on both.
    assert {sent.grads for _, sent in few[1]} == {grads + weights}
    assert {sent.weights for _, sent in few[0]} == {grads + weights}
    assert [count for rank in few for count, _ in rank] == [2] * 4


def late_backward(fabric: Fabric, case: Case) -> str:
    with loop(fabric, case) as here:
        here.run()
        if fabric.rank == 1:
            head = here.modules[-1].get_parameter("head.weight")
            head.sum().backward()
        try:
            here.opt.step()
        except po.ExchangeError as error:
            return str(error)
    return ""


def test_a_backward_after_the_schedule_is_refused(rank_pool: RankPool) -> None:
    errors = rank_pool.run(2, late_backward, Case(schedule="ScheduleGPipe", ranks=2))
    assert "a backward ran on rank 1 after the schedule had sent its gradient" in errors[1]
    assert "rank 1 failed first" in errors[0]


def frozen(fabric: Fabric, case: Case) -> tuple[list[int], list[bool]]:
    with loop(fabric, case) as here:
        start = weights_of(here.modules)
        counts = []
        moves = []
        for step, live in enumerate((False, False, True, True, False)):
            for tie in here.own.exchange.tied.values():
                tie.parameter.requires_grad_(live)
            before = num_messages(here.own)
            here.run(step)
            here.opt.step()
            here.opt.zero_grad()
            counts.append(num_messages(here.own) - before)
            name = "embed.weight" if fabric.rank == 0 else "head.weight"
            moves.append(not torch.equal(weights_of(here.modules)[name], start[name]))
            start = weights_of(here.modules)
            assert here.own.check()
        return counts, moves


@pytest.mark.parametrize("attached", [True, False])
def test_a_tie_that_thaws_is_sent_from_then_on(rank_pool: RankPool, attached: bool) -> None:
    """Each rank announces a change of each of the two ties once."""
    case = Case(schedule="Schedule1F1B", ranks=2, attached=attached)
    found = rank_pool.run(2, frozen, case)
    assert found == [([2, 0, 4, 2, 2], [False, False, True, True, False])] * 2


def frozen_alone(fabric: Fabric, case: Case, odd: int) -> str:
    with loop(fabric, case) as here:
        tied = here.own.exchange.tied.values()
        here.run()
        here.opt.step()
        here.opt.zero_grad()
        for tie in tied:
            if fabric.rank == odd:
                tie.parameter.requires_grad_(False)
        before = weights_of(here.modules)
        here.run(1)
        with pytest.raises(po.ExchangeError) as caught:
            here.opt.step()
        for tie in tied:
            assert torch.equal(tie.parameter, before[tie.plan.holder(fabric.rank).names[0]])
        return str(caught.value)


@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize("odd", [0, 1])
def test_a_tie_that_one_rank_freezes_is_named_on_both(rank_pool: RankPool, odd: int, attached: bool) -> None:
    case = Case(schedule="Schedule1F1B", ranks=2, attached=attached)
    for text in rank_pool.run(2, frozen_alone, case, odd):
        assert "('embed.weight', 'head.weight')" in text
        assert f"requires_grad is False on rank {odd} and True on rank {1 - odd} in step 1" in text


def test_attach_takes_a_schedule_and_an_owner_optimizer() -> None:
    model = Model(2)
    own = po.assign_owners(model, po.find_ties(model))
    opt = po.OwnerOptimizer(model.parameters(), torch.optim.SGD, ownership=own, lr=0.1)
    wrong: Any = model
    with pytest.raises(po.ConfigError, match="Model is no schedule of torch"):
        attach(wrong, opt)
    with pytest.raises(po.ConfigError, match="opt is a SGD, not an OwnerOptimizer"):
        attach(wrong, torch.optim.SGD(model.parameters(), lr=0.1))  # type: ignore[arg-type]
