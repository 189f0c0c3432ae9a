"""Ties under every schedule of torch.distributed.pipelining: equal to one process, over real gloo groups."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from pipelines import (
    OPTIMIZERS,
    SCHEDULES,
    SIZE,
    STEPS,
    TOKENS,
    V_SHAPED,
    WIDTH,
    Case,
    Model,
    alone,
    check_run,
    process_group,
    weights_of,
)
from ranks import RankPool
from torch import Tensor, nn
from torch.distributed.pipelining import (
    Pipe,
    PipelineStage,
    Schedule1F1B,
    SplitPoint,
    pipeline,
)

import piper_owner as po
from piper_owner.frontends.torch_pipelining import attach, ties_of
from piper_owner.rows import RowsTable
from piper_owner.stages import scale_shared_once
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


def sample(*, offset: int = 0) -> list[Case]:
    """Every schedule on 2 and on 4 ranks, with the other choices in turn."""
    cases = list(all_cases())
    found = []
    for index, (name, ranks) in enumerate(itertools.product(SCHEDULES, (2, 4))):
        own = [case for case in cases if (case.schedule, case.ranks) == (name, ranks)]
        found.append(own[(index * 7 + offset) % len(own)])
    return found


@pytest.mark.parametrize("case", sample(), ids=str)
def test_training_equals_one_process(rank_pool: RankPool, case: Case) -> None:
    ranks = check_run(rank_pool, case)
    assert sum(rank.expected_messages for rank in ranks) > 0, "a tie over ranks"


@pytest.mark.slow
@pytest.mark.parametrize("case", list(all_cases()), ids=str)
def test_training_equals_one_process_for_all(rank_pool: RankPool, case: Case) -> None:
    check_run(rank_pool, case)


def rows_of(cases: Iterable[Case]) -> list[Case]:
    return [replace(case, layout="auto") for case in cases]


def check_rows(pool: RankPool, case: Case) -> None:
    """The embedding keeps rows, but where the head is on its rank: then nothing of it travels."""
    ranks = check_run(pool, case)
    same_rank = SCHEDULES[case.schedule] in V_SHAPED
    assert ranks[0].left_out == ([] if same_rank else ["embed.weight"])
    assert all((sent.ids > 0) == (not same_rank) for sent in ranks[0].sent)


def alternating(cases: Sequence[Case]) -> list[Case]:
    """Of each schedule the one on 2 or on 4 ranks, in turn."""
    return [case for index, case in enumerate(cases) if index % 2 == index // 2 % 2]


@pytest.mark.parametrize("case", alternating(rows_of(sample(offset=3))), ids=str)
def test_rows_equal_one_process(rank_pool: RankPool, case: Case) -> None:
    check_rows(rank_pool, case)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("name", ["Schedule1F1B", "ScheduleInterleavedZeroBubble"])
def test_a_table_of_rows_that_grows_is_scaled_once(rank_pool: RankPool, name: str, accumulate: int) -> None:
    """Each of the passes adds rows, and a schedule scales what was accumulated."""
    case = Case(schedule=name, ranks=2, accumulate=accumulate, layout="auto", vocab=300)
    check_rows(rank_pool, case)


def scaled_after_growth(fabric: Fabric) -> list[float]:
    """Two stages of one rank look up in one table; its gradient, after both have scaled it."""
    with process_group(fabric):
        modules = [nn.Sequential(nn.Embedding(500, 2)) for _ in range(2)]
        embeds = [module[0] for module in modules]
        embeds[1].weight = embeds[0].weight
        stages = [PipelineStage(m, i, 2, torch.device("cpu")) for i, m in enumerate(modules)]
        table = RowsTable(embeds, embeds[0].weight, what="a tie", device=torch.device("cpu"))  # type: ignore[arg-type]
        scale_shared_once(stages)
        for num in (1, 300):
            ids, _ = table.request(torch.arange(num))
            table.fill(iter([(0, len(ids), torch.zeros(len(ids), 2))]))
            for module in modules:
                module(torch.tensor([0])).sum().backward()
        for stage in stages:
            stage.scale_grads(4)
        grad = table.take_grad()
        assert grad is not None
        return grad[:2].flatten().tolist()


def test_a_table_that_stages_share_is_scaled_once_though_it_grows(rank_pool: RankPool) -> None:
    assert rank_pool.run(1, scaled_after_growth) == [[1.0, 1.0, 0.0, 0.0]]


@pytest.mark.slow
@pytest.mark.parametrize("case", rows_of(all_cases()), ids=str)
def test_rows_equal_one_process_for_all(rank_pool: RankPool, case: Case) -> None:
    check_rows(rank_pool, case)


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
