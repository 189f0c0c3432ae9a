"""Random pipelines, placed and tied anyhow, train for real, and equal one process.

The same cases that the rules and the dry run are tested on: 1 to 8 ranks, 1 to 16 stages, every
schedule, ties of 2 to 5 uses in any stages, by lookup and whole, of any owner and layout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from datetime import timedelta
from functools import partial

import pytest
import torch
from dag_cases import Case, cases
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import one_torch_thread, squared_loss, tie_by_hand
from torch import Tensor, nn

from piper_owner.executor.buckets import OptimizerFactory
from piper_owner.executor.local import run_threads
from piper_owner.executor.ports import StagePorts, ValueSource
from piper_owner.executor.rank import RankExecutor
from piper_owner.ownership import Use
from piper_owner.p2p_nodes import executable
from piper_owner.rows import RowsParameter
from piper_owner.simulate import simulate
from piper_owner.transport.base import Fabric

VOCAB, WIDTH, TOKENS, STEPS = 8, 2, 3, 2
OPTIMIZERS: dict[str, OptimizerFactory] = {
    "sgd": partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
    "adafactor": partial(torch.optim.Adafactor, lr=1e-2),
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


class Stage(nn.Module):
    """A layer of its own, then each table that is used here: looked up by the ids, or multiplied with."""

    def __init__(self, case: Case, stage: int) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(stage)
        self.add_module(f"own{stage}", nn.Linear(WIDTH, WIDTH, dtype=torch.float64))
        self.own = f"own{stage}"
        self.tables: list[str] = []
        for use in case.uses:
            if use.stage == stage:
                tie, place, _ = use.name.split(".")
                table: nn.Module = nn.Linear(WIDTH, VOCAB, bias=False, dtype=torch.float64)
                if use.use is Use.LOOKUP:
                    table = nn.Embedding(VOCAB, WIDTH, dtype=torch.float64)
                self.add_module(tie, nn.Module())
                self.get_submodule(tie).add_module(place, table)
                self.tables.append(f"{tie}.{place}")
        for name, parameter in self.named_parameters():
            if name.startswith("tie"):  # the same everywhere, as a user makes it
                made = torch.Generator().manual_seed(100 + int(name.split(".")[0].removeprefix("tie")))
            nn.init.normal_(parameter, 0, 0.5, generator=made)

    def forward(self, ids: Tensor, hidden: Tensor | None = None) -> Tensor:
        if hidden is None:
            hidden = torch.ones(len(ids), WIDTH, dtype=torch.float64)
        hidden = hidden + torch.tanh(self.get_submodule(self.own)(hidden))
        for name in self.tables:
            table = self.get_submodule(name)
            if isinstance(table, nn.Embedding):
                hidden = hidden + torch.tanh(table(ids))
            else:
                hidden = hidden + torch.sin(table(hidden)).sum(1, keepdim=True) / VOCAB
        return hidden


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """A case, and how it is trained."""

    case: Case
    optimizer: str
    clip: float | None
    chunk_bytes: int

    @property
    def ports(self) -> tuple[StagePorts, ...]:
        """Every stage takes the ids of the batch, and what the stage before it gives."""
        looking = {use.stage for use in self.case.uses if use.use is Use.LOOKUP}
        ids = ValueSource(index=0)
        return tuple(
            StagePorts(
                inputs=(ids, ValueSource(index=0, stage=stage - 1)) if stage else (ids,),
                ids=(0,) if stage in looking else (),
            )
            for stage in range(len(self.case.placement))
        )

    def batch(self, step: int) -> tuple[list[Tensor], list[Tensor]]:
        """Ids and labels of each microbatch."""
        made = torch.Generator().manual_seed(step)
        shape = (self.case.num_microbatches, TOKENS)
        ids = torch.randint(VOCAB, shape, generator=made)
        labels = torch.randn((*shape, WIDTH), generator=made, dtype=torch.float64)
        return list(ids.unbind()), list(labels.unbind())


Found = tuple[list[float], dict[str, Tensor]]
"""The loss of each step, and the weights at the end by stage and name."""


def _named(stages: dict[int, nn.Module]) -> dict[str, Tensor]:
    return {
        f"{number}:{name}": parameter.detach().clone()
        for number, stage in stages.items()
        for name, parameter in stage.named_parameters(remove_duplicate=False)
        if not isinstance(parameter, RowsParameter)
    }


def alone(training: Training) -> Found:
    """The same in one process, without any of the code under test."""
    stages = [Stage(training.case, stage) for stage in range(len(training.case.placement))]
    for names in training.case.names:
        tie_by_hand(stages, names)
    parameters = list(dict.fromkeys(p for stage in stages for p in stage.parameters()))
    optimizer = OPTIMIZERS[training.optimizer](parameters)
    losses = []
    for step in range(STEPS):
        total = 0.0
        for ids, labels in zip(*training.batch(step), strict=True):
            hidden = None
            for stage in stages:
                hidden = stage(ids, hidden)
            assert hidden is not None
            loss = squared_loss(hidden, labels)
            loss.backward()
            total += loss.item()
        if training.clip is not None:
            nn.utils.clip_grad_norm_(parameters, training.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, _named(dict(enumerate(stages)))


def together(training: Training) -> Found:
    """On all ranks, each a thread."""
    case = training.case
    dag = executable(case.build(), case.plan, clip=training.clip is not None)
    simulate(dag)

    def work(fabric: Fabric) -> Found:
        stages: dict[int, nn.Module] = {stage: Stage(case, stage) for stage in dag.stages_of(fabric.rank)}
        executor = RankExecutor(
            dag,
            case.plan,
            rank=fabric.rank,
            stages=stages,
            optimizer=OPTIMIZERS[training.optimizer],
            loss=squared_loss,
            fabric=fabric,
            ports=training.ports,
            chunk_bytes=training.chunk_bytes,
            clip=training.clip,
        )
        losses = [executor.train_step(*training.batch(step)) for step in range(STEPS)]
        assert executor.check()
        assert not any(runner.num_in_flight for runner in executor.stages.values())
        executor.close()
        return losses, _named(stages)

    ranks = run_threads(case.num_ranks, work, timeout=timedelta(seconds=30))
    losses = [sum(shares) for shares in zip(*(found for found, _ in ranks), strict=True)]
    return losses, {name: value for _, weights in ranks for name, value in weights.items()}


@st.composite
def trainings(draw: st.DrawFn, /, **limits: int) -> Training:
    """Any case of `cases(**limits)`, with float64 tables that modules hold."""
    case = draw(cases(**limits))
    case = dataclasses.replace(
        case,
        uses=tuple(dataclasses.replace(use, name=f"{use.name}.weight", dtype="float64") for use in case.uses),
        names=tuple(tuple(f"{name}.weight" for name in names) for names in case.names),
        owners={f"{name}.weight": owner for name, owner in case.owners.items()},
        layouts={f"{name}.weight": layout for name, layout in case.layouts.items()},
    )
    return Training(
        case=case,
        optimizer=draw(st.sampled_from(sorted(OPTIMIZERS))),
        clip=draw(st.sampled_from([None, 0.1])),
        chunk_bytes=draw(st.sampled_from([1, 2**20])),
    )


def check(training: Training) -> None:
    """Losses and weights equal those of one process."""
    losses, weights = together(training)
    expected_losses, expected_weights = alone(training)
    # A loss is a sum over everything, so its rounding grows with it.
    assert losses == pytest.approx(expected_losses, rel=1e-11, abs=1e-10)
    plan, placement = training.case.plan, training.case.placement
    rows = {
        f"{use.stage}:{use.name}"
        for tie in plan.ties
        for use in training.case.uses
        if use.name in tie.tie.names and placement[use.stage] in tie.row_replicas
    }
    assert set(weights) == set(expected_weights) - rows
    for name, weight in weights.items():
        assert torch.allclose(weight, expected_weights[name], rtol=0, atol=1e-10), name


@settings(max_examples=40, deadline=None)
@given(trainings(max_ranks=4, max_stages=8, max_microbatches=5))
def test_random_pipelines_equal_one_process(training: Training) -> None:
    check(training)


@pytest.mark.slow
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(trainings())
def test_many_random_pipelines_equal_one_process(training: Training) -> None:
    check(training)
