"""Ties under every schedule of torch.distributed.pipelining: equal to one process, over real gloo groups."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator

import pytest
import torch
from pipelines import (
    OPTIMIZERS,
    SCHEDULES,
    SIZE,
    STEPS,
    TOKENS,
    WIDTH,
    Case,
    Model,
    alone,
    check_run,
    process_group,
    weights_of,
)
from ranks import RankPool
from torch import Tensor
from torch.distributed.pipelining import (
    Pipe,
    Schedule1F1B,
    SplitPoint,
    pipeline,
)

import piper_owner as po
from piper_owner.frontends.torch_pipelining import attach, ties_of
from piper_owner.transport import Fabric


def all_cases() -> Iterator[Case]:
    """Every combination that torch itself can get right.

    Without `attach`, a schedule with `scale_grads` scales what was accumulated before again, of
    tied and other parameters alike.
    """
    flags = (True, False)
    for name, ranks, optimizer in itertools.product(SCHEDULES, (2, 4), OPTIMIZERS):
        for scale, attached, accumulate, modules in itertools.product(flags, flags, (1, 2), flags):
            if attached or (not (scale and accumulate > 1) and not modules):
                yield Case(
                    schedule=name,
                    ranks=ranks,
                    optimizer=optimizer,
                    scale_grads=scale,
                    attached=attached,
                    accumulate=accumulate,
                    modules=modules,
                )


def sample() -> list[Case]:
    """Every schedule on 2 and on 4 ranks, with the other choices in turn."""
    cases = list(all_cases())
    found = []
    for index, (name, ranks) in enumerate(itertools.product(SCHEDULES, (2, 4))):
        own = [case for case in cases if (case.schedule, case.ranks) == (name, ranks)]
        found.append(own[index * 7 % len(own)])
    return found


@pytest.mark.parametrize("case", sample(), ids=str)
def test_training_equals_one_process(rank_pool: RankPool, case: Case) -> None:
    ranks = check_run(rank_pool, case)
    assert sum(rank.expected_messages for rank in ranks) > 0, "a tie over ranks"


@pytest.mark.slow
@pytest.mark.parametrize("case", list(all_cases()), ids=str)
def test_training_equals_one_process_for_all(rank_pool: RankPool, case: Case) -> None:
    check_run(rank_pool, case)


@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize("owners", [(0, 1), (1, 0), (1, 1)])
def test_any_rank_may_own_any_tie(rank_pool: RankPool, attached: bool, owners: tuple[int, ...]) -> None:
    check_run(rank_pool, Case(schedule="Schedule1F1B", ranks=2, owners=owners, attached=attached))


def test_modules_are_fine_where_nothing_scales(rank_pool: RankPool) -> None:
    case = Case(schedule="ScheduleZBVZeroBubble", ranks=2, attached=False, modules=True, scale_grads=False)
    check_run(rank_pool, case)


def traced(model: Model, case: Case) -> Pipe:
    ids, _ = case.batch(0, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, from the tracer
        return pipeline(model, (ids[:SIZE],), split_spec={"layers.1": SplitPoint.BEGINNING})


def train_traced(fabric: Fabric, case: Case) -> tuple[dict[str, Tensor], list[str], int]:
    with process_group(fabric):
        pipe = traced(case.model, case)
        ties = ties_of(pipe)
        stage = pipe.build_stage(fabric.rank, torch.device("cpu"))
        schedule = Schedule1F1B(stage, case.microbatches, loss_fn=case.loss, scale_grads=case.scale_grads)
        own = po.assign_owners(stage, ties)
        opt = po.OwnerOptimizer(stage.submod.parameters(), OPTIMIZERS[case.optimizer], ownership=own)
        if case.attached:
            attach(schedule, opt)
        for step in range(STEPS):
            ids, labels = case.batch(step, 0)
            schedule.step(*[ids] * stage.is_first, target=labels, return_outputs=False)
            opt.step()
            opt.zero_grad()
        assert own.check()
        own.close()
        state = sum(len(entry) for entry in opt.state.values())
        return weights_of([stage.submod]), list(stage.submod.state_dict()), state


@pytest.mark.parametrize("attached", [True, False])
def test_a_traced_model_equals_one_process(rank_pool: RankPool, attached: bool) -> None:
    case = Case(schedule="Schedule1F1B", ranks=2, optimizer="adamw", attached=attached)
    ranks = rank_pool.run(2, train_traced, case)
    reference = alone(case)
    for weights, saved, _ in ranks:
        assert sorted(saved) == sorted(weights)
        assert all(float((value - reference[name]).abs().max()) < 1e-10 for name, value in weights.items())
    assert {*ranks[0][0], *ranks[1][0]} == set(reference)
    assert not {*ranks[0][0]} & {*ranks[1][0]}
    # Adam keeps three tensors for each parameter, and nothing for the two replicas.
    assert [state for _, _, state in ranks] == [3 * len(ranks[0][0]), 3 * (len(ranks[1][0]) - 2)]


def test_ties_of_a_traced_model_are_named_as_in_the_model() -> None:
    case = Case(schedule="Schedule1F1B", ranks=2)
    model = case.model
    pipe = traced(model, case)
    assert "head.weight" in pipe.get_stage_module(0).state_dict(), "guards our assumption: a dead third copy"
    before = {index: pipe.get_stage_module(index)(*args) for index, args in stage_inputs(case)}
    assert set(ties_of(pipe)) == set(po.find_ties(model))
    assert set(ties_of(pipe)) == set(po.find_ties(model)), "a second time changes nothing"
    names = [set(pipe.get_stage_module(index).state_dict()) for index in range(2)]
    assert "head.weight" not in names[0]
    assert "head.weight" in names[1]
    assert names[0] | names[1] == set(model.state_dict())
    for index, args in stage_inputs(case):
        assert torch.equal(pipe.get_stage_module(index)(*args), before[index])


def stage_inputs(case: Case) -> list[tuple[int, tuple[Tensor]]]:
    ids, _ = case.batch(0, 0)
    return [(0, (ids[:SIZE],)), (1, (torch.ones(SIZE, TOKENS, WIDTH, dtype=torch.float64),))]
