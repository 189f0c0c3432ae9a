"""Programs of copies that each rank steps itself, and programs that do not fit what a rank is to run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

import pytest
from tiny import ADAM, Pipeline, Term, one_torch_thread, sum_loss, term_batch

from piper_owner.dag.graph import Bucket, TrainingDAG
from piper_owner.errors import DagError
from piper_owner.executor.local import run_threads
from piper_owner.executor.rank import RankExecutor
from piper_owner.ownership import OwnershipPlan
from piper_owner.p2p_nodes import executable_copies
from piper_owner.schedules import Schedule, build_dag
from piper_owner.transport.base import Fabric

COPIES: Final = ("first.weight", "last.weight")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


def copies_dag(plan: OwnershipPlan) -> TrainingDAG:
    """Two stages, each with a copy that it steps itself."""
    buckets = tuple(Bucket(name=name, stages=(stage,)) for stage, name in enumerate(COPIES))
    built = build_dag(Schedule.GPIPE, placement=(0, 1), num_ranks=2, num_microbatches=1, buckets=buckets)
    return executable_copies(built, plan, all_reduce=True)


def copies_executor(fabric: Fabric, dag: TrainingDAG, plan: OwnershipPlan, **options: Any) -> RankExecutor:  # noqa: ANN401
    rank = fabric.rank
    module = Term(COPIES[rank], rank, (2.0, 3.0)[rank])
    return RankExecutor(
        dag,
        plan,
        rank=rank,
        stages={rank: module},
        optimizer=ADAM,
        loss=sum_loss(1),
        fabric=fabric,
        **options,
    )


@pytest.mark.parametrize(("mask", "value"), [(0, 0.8), (1, 0.804251), (3, 0.9)])
def test_all_reduced_copies_without_any_gradient_are_not_stepped(mask: int, value: float) -> None:
    """Adam from 1.0 with one earlier step: zeros in place of None would move the weight on to 0.833."""
    plan = Pipeline(
        build=lambda stage: Term(COPIES[stage], stage, 1.0), placement=(0, 1), ties=[COPIES], loss=sum_loss(1)
    ).plan()
    dag = copies_dag(plan)

    def work(fabric: Fabric) -> float:
        executor = copies_executor(fabric, dag, plan, copies=True)
        for each in (0, mask):
            executor.train_step(*term_batch(1, mask=each))
        executor.close()
        return executor.stages[fabric.rank].module.get_parameter(COPIES[fabric.rank]).item()

    first, second = run_threads(2, work, timeout=timedelta(seconds=10))
    assert first == second
    assert first == pytest.approx(value, abs=1e-6)


def test_a_program_that_is_not_the_plan_s_is_refused() -> None:
    pipeline = Pipeline(
        build=lambda stage: Term(COPIES[stage], stage, 1.0), placement=(0, 1), ties=[COPIES], loss=sum_loss(1)
    )
    plan, owned = pipeline.plan(), pipeline.dag()
    moved = dataclasses.replace(pipeline, owner="last").plan()
    faults: list[tuple[TrainingDAG, OwnershipPlan, dict[str, Any], str]] = [
        (copies_dag(plan), plan, {}, "where the ownership plan has"),
        (owned, moved, {}, "where the ownership plan has"),
        (owned, plan, {"copies": True}, "where the ownership plan has"),
        (owned, plan, {"clip": 1.0}, "clip is given, and its program does not clip"),
        (dataclasses.replace(pipeline, clip=1.0).dag(), plan, {}, "clip is not given, and its program does"),
    ]
    for dag, ownership, options, said in faults:

        def work(
            fabric: Fabric,
            dag: TrainingDAG = dag,
            ownership: OwnershipPlan = ownership,
            options: dict[str, Any] = options,
        ) -> str:
            with pytest.raises(DagError) as caught:
                copies_executor(fabric, dag, ownership, **options)
            return str(caught.value)

        for rank, text in enumerate(run_threads(2, work, timeout=timedelta(seconds=5))):
            assert said in text
            assert f"rank {rank}" in text
