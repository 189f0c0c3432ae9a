"""Stages with several inputs and outputs, and values that skip stages, against one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Final

import pytest
import torch
from tiny import one_torch_thread
from torch import Tensor, nn

from piper_owner.dag.graph import Bucket, TrainingDAG
from piper_owner.dag.nodes import Compute, ComputeKind
from piper_owner.errors import ConfigError, DagError
from piper_owner.executor.local import run_threads
from piper_owner.executor.ports import (
    StagePorts,
    ValueSource,
    chain_ports,
    crossing_values,
    stage_edges,
)
from piper_owner.executor.rank import RankExecutor
from piper_owner.ownership import LayoutChoice, OwnershipPlan, Tie, Use, plan_ownership
from piper_owner.p2p_nodes import executable
from piper_owner.rows import RowsParameter
from piper_owner.schedules import Schedule, build_dag
from piper_owner.ties import describe_uses
from piper_owner.transport.base import Fabric

WIDTH: Final = 6
VOCAB: Final = 16
MICROBATCHES: Final = 4
STEPS: Final = 3
TIE: Final = Tie(("encoder.weight", "decoder.weight", "head.weight"))


class Encode(nn.Module):
    """Ids to hidden states, their sum, and how many ids there are (an integer that crosses too)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(VOCAB, WIDTH)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden: Tensor = self.encoder(ids)
        return hidden, hidden.sum(1), torch.full((len(ids), 1), ids.shape[1])


class Middle(nn.Module):
    """Hidden states to hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.mix(hidden))


class Decode(nn.Module):
    """Its own ids beside the encoder's values, of which one came past the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.Embedding(VOCAB, WIDTH)

    def forward(self, ids: Tensor, hidden: Tensor, total: Tensor, count: Tensor) -> Tensor:
        out: Tensor = self.decoder(ids) + hidden + (total / count)[:, None]
        return out


class Head(nn.Module):
    """Logits of the decoder, and beside them what the middle gave."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, hidden: Tensor, early: Tensor) -> tuple[Tensor, Tensor]:
        return self.head(hidden), early


PORTS: Final = (
    StagePorts(inputs=(ValueSource(index=0),), num_outputs=3, ids=(0,)),
    StagePorts(inputs=(ValueSource(index=0, stage=0),)),
    StagePorts(
        inputs=(
            ValueSource(index=1),
            ValueSource(index=0, stage=1),
            ValueSource(index=1, stage=0),
            ValueSource(index=2, stage=0),
        ),
        ids=(1,),
    ),
    StagePorts(inputs=(ValueSource(index=0, stage=2), ValueSource(index=0, stage=1)), num_outputs=2),
)


def make_stages() -> list[nn.Module]:
    """The stages with equal copies of the tie; not from the global random state, which threads share."""
    generator = torch.Generator().manual_seed(5)
    stages: list[nn.Module] = [Encode(), Middle(), Decode(), Head()]
    drawn = torch.empty(VOCAB, WIDTH, dtype=torch.float64).normal_(generator=generator)
    with torch.no_grad():
        for stage in stages:
            stage.double()
            for name, parameter in stage.named_parameters():
                other = drawn[:WIDTH].sin() if parameter.dim() > 1 else drawn[0].cos()
                parameter.copy_(drawn if name in TIE.names else other)
    return stages


def loss(outputs: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    logits, early = outputs
    likely = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return (likely + early.square().mean()) / MICROBATCHES


def batch(step: int) -> tuple[list[tuple[Tensor, Tensor]], list[Tensor]]:
    generator = torch.Generator().manual_seed(100 + step)
    draw = partial(torch.randint, 0, VOCAB, (2, 5), generator=generator)
    return [(draw(), draw()) for _ in range(MICROBATCHES)], [draw() for _ in range(MICROBATCHES)]


def alone() -> tuple[list[float], dict[str, Tensor]]:
    """The same stages in one process, with one tied Parameter."""
    stages = make_stages()
    tied = stages[0].get_parameter("encoder.weight")
    stages[2].get_submodule("decoder").weight = tied
    stages[3].get_submodule("head").weight = tied
    named = {name: p for stage in stages for name, p in stage.named_parameters()}
    optimizer = torch.optim.AdamW(list({id(p): p for p in named.values()}.values()), lr=0.01)
    losses = []
    for step in range(STEPS):
        inputs, labels = batch(step)
        total = 0.0
        for (ids, other), wanted in zip(inputs, labels, strict=True):
            hidden, summed, count = stages[0](ids)
            middle = stages[1](hidden)
            share = loss(stages[3](stages[2](other, middle, summed, count), middle), wanted)
            share.backward()
            total += float(share.detach())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, {name: p.detach().clone() for name, p in named.items()}


def split_backwards(dag: TrainingDAG) -> list[list[Compute]]:
    """Every backward in two parts, the weights' as late as they can be."""
    programs: list[list[Compute]] = []
    for program in dag.programs:
        computes = [action for action in program if isinstance(action, Compute)]
        weights = [
            dataclasses.replace(action, kind=ComputeKind.BACKWARD_WEIGHT)
            for action in computes
            if action.kind is ComputeKind.BACKWARD
        ]
        inputs = [
            dataclasses.replace(action, kind=ComputeKind.BACKWARD_INPUT)
            if action.kind is ComputeKind.BACKWARD
            else action
            for action in computes
        ]
        programs.append([*inputs, *weights])
    return programs


def plan_of(
    placement: Sequence[int], schedule: Schedule, layout: LayoutChoice, split: bool
) -> tuple[TrainingDAG, OwnershipPlan]:
    uses = [
        use
        for stage, module in enumerate(make_stages())
        for use in describe_uses({stage: module}, rank=placement[stage])
    ]
    plan = plan_ownership([TIE], uses, world_size=max(placement) + 1, layout=layout)
    built = build_dag(
        schedule,
        placement=tuple(placement),
        num_ranks=max(placement) + 1,
        num_microbatches=MICROBATCHES,
        buckets=[Bucket(name=f"stage{stage}", stages=(stage,)) for stage in range(4)],
        stage_edges=stage_edges(PORTS),
    )
    if split:
        built = dataclasses.replace(built, programs=tuple(map(tuple, split_backwards(built))))
    return executable(built, plan), plan


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


Work = Callable[[Fabric], tuple[list[float], dict[str, Tensor]]]


def worker(dag: TrainingDAG, plan: OwnershipPlan) -> Work:
    def work(fabric: Fabric) -> tuple[list[float], dict[str, Tensor]]:
        stages = {s: m for s, m in enumerate(make_stages()) if s in dag.stages_of(fabric.rank)}
        executor = RankExecutor(
            dag,
            plan,
            rank=fabric.rank,
            stages=stages,
            optimizer=partial(torch.optim.AdamW, lr=0.01),
            loss=loss,
            fabric=fabric,
            ports=PORTS,
        )
        losses = [executor.train_step(*batch(step)) for step in range(STEPS)]
        assert executor.check()
        executor.close()
        assert all(runner.num_in_flight == 0 for runner in executor.stages.values())
        named = {n: p for module in stages.values() for n, p in module.named_parameters()}
        whole = {n: p.detach().clone() for n, p in named.items() if not isinstance(p, RowsParameter)}
        return losses, whole

    return work


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("layout", ["dense", "rows"])
@pytest.mark.parametrize("placement", [(0, 0, 0, 0), (0, 1, 2, 3), (0, 1, 1, 0), (0, 1, 0, 1)])
def test_values_that_skip_stages_train_as_in_one_process(
    placement: tuple[int, ...], layout: LayoutChoice, split: bool
) -> None:
    holders = {placement[stage] for stage in (0, 2)} - {placement[3]}
    if layout == "rows" and not holders:
        pytest.skip("no rank only looks rows up here")
    dag, plan = plan_of(placement, Schedule.GPIPE if split else Schedule.ONE_F_ONE_B, layout, split)
    ranks = run_threads(dag.num_ranks, worker(dag, plan), timeout=timedelta(seconds=20))
    losses, weights = alone()
    for step, expected in enumerate(losses):
        assert sum(shares[step] for shares, _ in ranks) == pytest.approx(expected, abs=1e-12)
    for _, held in ranks:
        for name, value in held.items():
            torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-10)
    kept = {name for _, held in ranks for name in held}
    assert kept.issuperset(set(weights) - (set(TIE.names[:2]) if layout == "rows" else set()))


def test_a_bundle_is_one_transfer_for_each_pair_of_stages_and_microbatch() -> None:
    dag, _ = plan_of((0, 1, 2, 3), Schedule.GPIPE, "dense", split=False)
    assert dag.stage_edges == ((0, 1), (0, 2), (1, 2), (1, 3), (2, 3))
    sends = [repr(action) for action in dag.programs[0] if "SEND_F" in repr(action)]
    assert len(sends) == 2 * MICROBATCHES


def test_the_crossing_values_of_ports() -> None:
    assert crossing_values(PORTS) == {(0, 1): (0,), (0, 2): (1, 2), (1, 2): (0,), (1, 3): (0,), (2, 3): (0,)}
    assert stage_edges(chain_ports(3)) == ((0, 1), (1, 2))
    assert chain_ports(2)[0].ids == (0,)
    assert chain_ports(2)[1].ids == ()


@pytest.mark.parametrize("source", [ValueSource(index=0, stage=1), ValueSource(index=1, stage=0)])
def test_a_value_that_is_not_made_before_its_use_is_refused(source: ValueSource) -> None:
    ports = (chain_ports(1)[0], StagePorts(inputs=(source,)))
    with pytest.raises(ConfigError, match="stage 1 takes output"):
        crossing_values(ports)
    with pytest.raises(ConfigError, match="stage 0 takes no value"):
        crossing_values((StagePorts(inputs=()),))


def test_ports_that_do_not_fit_are_refused() -> None:
    dag, plan = plan_of((0, 0, 0, 0), Schedule.GPIPE, "dense", split=False)

    def start(ports: Sequence[StagePorts]) -> Callable[[Fabric], RankExecutor]:
        def work(fabric: Fabric) -> RankExecutor:
            return RankExecutor(
                dag,
                plan,
                rank=0,
                stages=dict(enumerate(make_stages())),
                optimizer=partial(torch.optim.AdamW, lr=0.01),
                loss=loss,
                fabric=fabric,
                ports=ports,
            )

        return work

    with pytest.raises(DagError, match="ports of 4 stages have the edges"):
        run_threads(1, start(chain_ports(4)), timeout=timedelta(seconds=5))
    (executor,) = run_threads(1, start(PORTS), timeout=timedelta(seconds=5))
    inputs, labels = batch(0)
    with pytest.raises(DagError, match=r"microbatch 0 has 1 inputs, and the stages read those at \[0, 1\]"):
        executor.train_step([ids for ids, _ in inputs], labels)
    swapped = (PORTS[0], PORTS[1], PORTS[2], StagePorts(inputs=PORTS[3].inputs))
    (executor,) = run_threads(1, start(swapped), timeout=timedelta(seconds=5))
    with pytest.raises(ConfigError, match=r"Head gave .* promise 1 tensor"):
        executor.train_step(inputs, labels)
    assert describe_uses({0: make_stages()[0]}, rank=0)[0].use is Use.LOOKUP
