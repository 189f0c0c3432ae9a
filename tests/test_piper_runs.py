"""Annotated models under pipeline parallelism equal one process; each replica sends one gradient a step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Final

import pytest
import torch
from annotated_models import (
    LENGTH,
    VOCABULARY,
    EncoderDecoder,
    FourRegions,
    Functional,
    MultiToken,
    SharedLayer,
    TwoRegions,
)
from tiny import one_torch_thread
from torch import Tensor, nn

from piper_owner.dag.graph import Bucket, TrainingDAG
from piper_owner.dag.nodes import Sync, SyncKind
from piper_owner.executor.local import run_threads
from piper_owner.executor.rank import RankExecutor
from piper_owner.executor.stage import Tensors
from piper_owner.frontends.piper import TracedModel, trace
from piper_owner.ownership import LayoutChoice, OwnershipPlan, Use, plan_ownership
from piper_owner.p2p_nodes import executable
from piper_owner.rows import RowsParameter
from piper_owner.schedules import Schedule, build_dag
from piper_owner.simulate import simulate
from piper_owner.ties import describe_uses
from piper_owner.transport.base import Fabric

MICROBATCHES: Final = 4
STEPS: Final = 3
BOTH: Final = [
    (TwoRegions, (0, 0)),
    (TwoRegions, (0, 1)),
    (EncoderDecoder, (0, 1, 2, 3)),
    (EncoderDecoder, (0, 0, 1, 1)),
    (EncoderDecoder, (1, 0, 0, 1)),
    (MultiToken, (0, 1, 2, 3)),
    (MultiToken, (0, 1, 1, 0)),
    (SharedLayer, (0, 1, 2, 3)),
    (SharedLayer, (0, 0, 1, 0)),
    (Functional, (0, 1, 2)),
]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


def loss(outputs: Tensors, labels: Tensor) -> Tensor:
    """Cross entropy of every output, each against other labels."""
    every = (outputs,) if isinstance(outputs, Tensor) else outputs
    shares = [
        nn.functional.cross_entropy(logits.flatten(0, 1), labels.roll(shift, 1).flatten())
        for shift, logits in enumerate(every)
    ]
    return torch.stack(shares).sum() / MICROBATCHES


def batch(step: int) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(100 + step)
    draw = partial(torch.randint, 0, VOCABULARY, (2, LENGTH), generator=generator)
    return [draw() for _ in range(MICROBATCHES)], [draw() for _ in range(MICROBATCHES)]


@dataclass(frozen=True)
class Run:
    """What one process, or one rank, has to show."""

    losses: list[float]
    weights: dict[str, Tensor]
    gradients_sent: list[int]


def alone(model: nn.Module) -> Run:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        shares = [loss(model(ids), labels) for ids, labels in zip(*batch(step), strict=True)]
        torch.stack(shares).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(sum(share.detach() for share in shares)))
    return Run(losses, {n: p.detach() for n, p in model.named_parameters(remove_duplicate=False)}, [])


def plan_of(
    traced: TracedModel, placement: tuple[int, ...], schedule: Schedule, layout: LayoutChoice
) -> tuple[TrainingDAG, OwnershipPlan]:
    dense = dict.fromkeys(traced.dense, Use.DENSE)
    uses = [
        use
        for stage, module in enumerate(traced.segments)
        for use in describe_uses({stage: module}, rank=placement[stage], uses=dense)
    ]
    plan = plan_ownership(traced.ties, uses, world_size=max(placement) + 1, layout=layout)
    built = build_dag(
        schedule,
        placement=placement,
        num_ranks=max(placement) + 1,
        num_microbatches=MICROBATCHES,
        buckets=[Bucket(name=f"stage{stage}", stages=(stage,)) for stage in range(len(placement))],
        stage_edges=traced.stage_edges,
    )
    dag = executable(built, plan)
    simulate(dag)
    return dag, plan


def worker(traced: TracedModel, dag: TrainingDAG, plan: OwnershipPlan) -> Callable[[Fabric], Run]:
    def work(fabric: Fabric) -> Run:
        segments = copy.deepcopy(traced.segments)
        stages = {stage: segments[stage] for stage in dag.stages_of(fabric.rank)}
        executor = RankExecutor(
            dag,
            plan,
            rank=fabric.rank,
            stages=stages,
            optimizer=partial(torch.optim.AdamW, lr=0.01),
            loss=loss,
            fabric=fabric,
            ports=traced.ports,
        )
        losses, sent = [], []
        for step in range(STEPS):
            losses.append(executor.train_step(*batch(step)))
            sent.append(executor.take_tied_bytes_sent().grads)
        assert executor.check()
        executor.close()
        named = {n: p for m in stages.values() for n, p in m.named_parameters(remove_duplicate=False)}
        kept = {n: p.detach() for n, p in named.items() if not isinstance(p, RowsParameter)}
        return Run(losses, kept, sent)

    return work


def check(
    model_type: type[nn.Module],
    placement: tuple[int, ...],
    schedule: Schedule = Schedule.ONE_F_ONE_B,
    layout: LayoutChoice = "auto",
) -> OwnershipPlan:
    torch.manual_seed(3)
    model = model_type().double()
    traced = trace(model, batch(0)[0][0])
    dag, plan = plan_of(traced, placement, schedule, layout)
    ranks = run_threads(dag.num_ranks, worker(traced, dag, plan), timeout=timedelta(seconds=20))
    reference = alone(model)
    name_of = {name: tie.names[0] for tie in traced.ties for name in tie.names}
    for step, expected in enumerate(reference.losses):
        assert sum(rank.losses[step] for rank in ranks) == pytest.approx(expected, abs=1e-12)
    for rank in ranks:
        for name, value in rank.weights.items():
            expected_value = reference.weights[name_of.get(name, name)]
            torch.testing.assert_close(value, expected_value, rtol=0, atol=1e-10)
    for number, rank in enumerate(ranks):
        replicated = [tie for tie in plan.ties if number in tie.ranks and number != tie.owner]
        sends = [
            node.bucket
            for node in dag.programs[number]
            if isinstance(node, Sync) and node.kind is SyncKind.SEND_GRAD
        ]
        assert sorted(sends) == sorted(tie.name for tie in replicated), "one gradient a replica and step"
        whole = sum(8 * torch.Size(tie.shape).numel() for tie in replicated if number not in tie.row_replicas)
        assert all(count >= whole for count in rank.gradients_sent)
        if not any(number in tie.row_replicas for tie in replicated):
            assert rank.gradients_sent == [whole] * STEPS
    return plan


@pytest.mark.parametrize(("model_type", "placement"), BOTH)
@pytest.mark.parametrize("layout", ["auto", "dense"])
def test_models_train_as_in_one_process(
    model_type: type[nn.Module], placement: tuple[int, ...], layout: LayoutChoice
) -> None:
    plan = check(model_type, placement, layout=layout)
    rows = [rank for tie in plan.ties for rank in tie.row_replicas]
    if layout == "dense" or max(placement) == 0 or model_type is SharedLayer:
        assert rows == []
    elif placement in ((0, 1), (0, 1, 2)):
        assert rows == [0], "the embedding's stage keeps rows only"


@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize("placement", [(0, 1, 1, 0), (0, 1, 2, 3)])
def test_four_regions_under_every_schedule(schedule: Schedule, placement: tuple[int, ...]) -> None:
    plan = check(FourRegions, placement, schedule)
    (tie,) = plan.ties
    assert tie.ranks == ((0,) if placement[3] == 0 else (0, 3))


def test_three_holders_keep_rows_where_they_only_look_up() -> None:
    plan = check(EncoderDecoder, (0, 1, 2, 3), Schedule.GPIPE, "rows")
    assert plan.ties[0].owner == 3
    assert plan.ties[0].row_replicas == (0, 1)
