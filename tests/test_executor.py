"""The executor of one rank: many holders, owners in a circle, failures, lateness, memory, random runs."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial
from itertools import permutations
from typing import TYPE_CHECKING, Final

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import (
    ADAM,
    LateFabric,
    Mix,
    Pipeline,
    Term,
    batch_losses,
    largest_difference,
    one_torch_thread,
    row_batch,
    sum_loss,
    term_batch,
)
from torch import Tensor, nn

from piper_owner.dag.graph import Bucket
from piper_owner.dag.nodes import Action, BucketStep, Compute, ComputeKind, Sync, SyncKind
from piper_owner.data.batches import TokenStream
from piper_owner.errors import ConfigError, DagError, ExchangeError, ReplicaMismatchError
from piper_owner.executor.buckets import OptimizerFactory
from piper_owner.executor.config import RunKind, TrainConfig
from piper_owner.executor.local import run_threads
from piper_owner.executor.rank import RankExecutor
from piper_owner.executor.session import RankReport, RankSession
from piper_owner.executor.stage import Tensors
from piper_owner.schedules import Placement, Schedule, build_dag, place_stages
from piper_owner.transport.base import Fabric

if TYPE_CHECKING:
    from ranks import RankPool

ADAFACTOR: Final[OptimizerFactory] = partial(torch.optim.Adafactor, lr=1e-2)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


def tie_name(tie: int, stage: int) -> str:
    """The name of tie `tie` in stage `stage`."""
    return f"t{tie}s{stage}.weight"


def mixed(placement: tuple[int, ...], ties: Sequence[Sequence[int]], **options: object) -> Pipeline:
    """`Mix` stages; each tie is given by the stages that use it."""

    def build(stage: int) -> nn.Module:
        return Mix(stage, [tie_name(i, stage) for i, stages in enumerate(ties) if stage in stages])

    return Pipeline(
        build=build,
        placement=placement,
        ties=[[tie_name(i, stage) for stage in stages] for i, stages in enumerate(ties)],
        **{"optimizer": partial(torch.optim.AdamW, lr=1e-2), **options},  # type: ignore[arg-type]
    )


def check(pipeline: Pipeline, *, steps: int = 3) -> None:
    """Owner run equals one process."""
    batches = [row_batch(pipeline.microbatches, seed) for seed in range(steps)]
    ranks = pipeline.run(batches)
    assert largest_difference(pipeline, ranks, pipeline.reference(batches)) < 1e-10


# -- many holders


@pytest.mark.parametrize("holders", [3, 4])
@pytest.mark.parametrize("owner", ["first", "last", 1])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_three_and_four_holders(holders: int, owner: str | int, clip: float | None) -> None:
    stages = tuple(range(holders))
    check(mixed(stages, [stages], owner=owner, clip=clip, microbatches=3, chunk_bytes=1))


@pytest.mark.parametrize("placement", [(0, 1, 2, 3), (0, 1, 1, 0), (0, 1, 0, 1), (0, 0, 0, 0)])
def test_a_layer_shared_by_all_stages_under_one_name(placement: tuple[int, ...]) -> None:
    pipeline = Pipeline(
        build=lambda stage: Mix(stage, ["shared.weight"]),
        placement=placement,
        ties=[["shared.weight"]],
        microbatches=2,
        optimizer=ADAM,
    )
    check(pipeline)


def test_several_holders_on_one_rank_send_one_message() -> None:
    pipeline = mixed((0, 1, 1, 0, 1), [(0, 1, 2, 3, 4)], microbatches=4)
    ranks = pipeline.run([row_batch(4, 0)])
    assert [rank.messages for rank in ranks] == [[1], [1]]
    check(pipeline)


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("chunk_bytes", [1, 4 * 2**20])
@pytest.mark.parametrize("optimizer", [ADAM, ADAFACTOR], ids=["adam", "adafactor"])
def test_owners_in_a_circle(clip: float | None, chunk_bytes: int, optimizer: OptimizerFactory) -> None:
    # Each rank owns a tie of each other one, and the ties are received in an order in which every
    # rank would wait for the next if it waited for more than the message that it needs.
    ties = [(0, 1), (1, 2), (0, 2), (0, 2), (0, 1), (1, 2)]
    owners = [1, 2, 0, 2, 0, 1]
    pipeline = mixed(
        (0, 1, 2),
        ties,
        owner={
            tie_name(i, stages[0]): owner for i, (stages, owner) in enumerate(zip(ties, owners, strict=True))
        },
        microbatches=2,
        clip=clip,
        chunk_bytes=chunk_bytes,
        optimizer=optimizer,
        timeout=10.0,
    )
    check(pipeline)


@pytest.mark.parametrize("owners", [(0, 1), (1, 0), (0, 0), (1, 1)])
def test_two_ranks_that_own_ties_of_each_other(owners: tuple[int, int]) -> None:
    chosen = {tie_name(0, 0): owners[0], tie_name(1, 0): owners[1]}
    check(mixed((0, 1), [(0, 1), (0, 1)], owner=chosen, microbatches=2, timeout=10.0))


@pytest.mark.parametrize("owner", [0, 1, 2])
def test_shares_are_added_in_ascending_order_of_rank(owner: int) -> None:
    names = [f"s{stage}.weight" for stage in range(3)]
    for factors in permutations((1e8, -1e8, 1.0)):
        pipeline = Pipeline(
            build=lambda stage, factors=factors: Term(  # type: ignore[misc]
                names[stage], stage, factors[stage], dtype=torch.float32
            ),
            placement=(0, 1, 2),
            ties=[names],
            loss=sum_loss(1),
            owner=owner,
        )
        first, second, third = map(np.float32, factors)
        expected = np.float32(1) - np.float32(0.1) * ((first + second) + third)
        ranks = pipeline.run([term_batch(1, dtype=torch.float32)])
        assert [float(rank.weights[1][names[rank.rank]]) for rank in ranks] == [float(expected)] * 3


@pytest.mark.parametrize("owner", [0, 1])
def test_a_gradient_that_shares_memory_is_not_written(owner: int) -> None:
    names = ("first.weight", "last.weight")

    class Sharing(RankExecutor):
        def _run(
            self, action: Action, inputs: Sequence[tuple[Tensor, ...]], labels: Sequence[Tensor]
        ) -> tuple[Tensor, ...]:
            if not isinstance(action, Sync) or action.kind is not SyncKind.OWNER_STEP:
                return super()._run(action, inputs, labels)
            # torch's split weight-backward may give two parameters one gradient tensor.
            shared = self.exchange.tied[action.bucket].parameter.grad
            assert shared is not None
            before = shared.clone()
            super()._run(action, inputs, labels)
            assert torch.equal(shared, before)
            return ()

    pipeline = Pipeline(
        build=lambda stage: Term(names[stage], stage, (2.0, 3.0)[stage], shape=(200,), value=0.0),
        placement=(0, 1),
        ties=[names],
        loss=sum_loss(1),
        owner=owner,
        chunk_bytes=1,
        kind=Sharing,
    )
    ranks = pipeline.run([term_batch(1)])
    assert all(
        torch.equal(rank.weights[1][names[rank.rank]], torch.full((200,), -0.5).double()) for rank in ranks
    )


def test_a_run_repeats_bit_for_bit() -> None:
    pipeline = mixed((0, 1, 2, 1), [(0, 1, 2), (1, 2, 3)], microbatches=4, clip=0.5, chunk_bytes=1)
    batches = [row_batch(4, seed) for seed in range(4)]
    one, two = pipeline.run(batches), pipeline.run(batches)
    assert batch_losses(one) == batch_losses(two)
    for mine, theirs in zip(one, two, strict=True):
        for name, value in mine.weights[-1].items():
            assert torch.equal(value, theirs.weights[-1][name])


# -- random pipelines


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    """1 to 4 devices, 1 to 6 stages placed anyhow, 1 or 2 ties of 2 to 4 uses, any owners."""
    num_ranks, num_stages = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    anyhow = st.lists(st.integers(0, num_ranks - 1), min_size=num_stages, max_size=num_stages).map(tuple)
    regular = st.sampled_from(Placement).map(lambda placement: place_stages(num_stages, num_ranks, placement))
    placement = draw(anyhow | regular)
    users = st.lists(
        st.integers(0, num_stages - 1), min_size=min(2, num_stages), max_size=min(4, num_stages), unique=True
    )
    ties = draw(st.lists(users, min_size=1, max_size=2))
    owners = {
        tie_name(i, stages[0]): draw(st.sampled_from(["auto", "first", "last", placement[stages[-1]]]))
        for i, stages in enumerate(ties)
    }
    microbatches, schedule = draw(st.integers(1, 6)), draw(st.sampled_from(Schedule))
    programs: tuple[str, ...] = ()
    if draw(st.booleans()):
        programs = split_backwards(placement, num_ranks, microbatches, schedule)
    optimizers = (
        partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
        partial(torch.optim.AdamW, lr=1e-2),
        partial(torch.optim.Adafactor, lr=1e-2),
    )
    return mixed(
        placement,
        ties,
        num_ranks=num_ranks,
        owner=owners,
        microbatches=microbatches,
        schedule=schedule,
        programs=programs,
        optimizer=draw(st.sampled_from(optimizers)),
        clip=draw(st.sampled_from([None, 0.1])),
        chunk_bytes=draw(st.sampled_from([1, 2**20])),
    )


def split_backwards(
    placement: tuple[int, ...], num_ranks: int, microbatches: int, schedule: Schedule
) -> tuple[str, ...]:
    """The schedule's programs with each backward in two halves, the second ones deferred to the end."""
    dag = build_dag(
        schedule,
        placement=placement,
        num_ranks=num_ranks,
        num_microbatches=microbatches,
        buckets=[Bucket(name=f"stage{stage}", stages=(stage,)) for stage in range(len(placement))],
    )
    programs = []
    for program in dag.programs:
        first, deferred = [], []
        for action in program:
            assert isinstance(action, Compute)
            if action.kind is ComputeKind.BACKWARD:
                first.append(f"{action.stage}I{action.microbatch}")
                deferred.append(f"{action.stage}W{action.microbatch}")
            else:
                first.append(repr(action))
        programs.append(" ".join([*first, *deferred]))
    return tuple(programs)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(pipelines())
def test_random_pipelines_equal_one_process(pipeline: Pipeline) -> None:
    check(pipeline, steps=2)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(pipelines())
def test_many_random_pipelines_equal_one_process(pipeline: Pipeline) -> None:
    check(pipeline, steps=3)


# -- failures


class Planted(Exception):
    """The failure that a test plants."""


class _FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, rows: Tensor) -> Tensor:
        return rows.clone()

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        raise Planted("in backward")


class FailingStage(Mix):
    """Fails in `where` once its rows hold the number that `marked_batch` plants."""

    where = ""

    def forward(self, rows: Tensor) -> Tensor:
        if self.where == "forward" and FailingExecutor.armed(self):
            raise Planted("in forward")
        out = super().forward(rows)
        if self.where == "backward" and FailingExecutor.armed(self):
            out = _FailingBackward.apply(out)  # type: ignore[no-untyped-call]
        return out


class FailingExecutor(RankExecutor):
    """Tells its stages the step, and fails by itself in an optimizer's step."""

    def train_step(self, inputs: Sequence[Tensors], labels: Sequence[Tensor]) -> float:
        for runner in self.stages.values():
            runner.module.failing_step = self.step == 1  # type: ignore[assignment]
        return super().train_step(inputs, labels)

    @staticmethod
    def armed(module: nn.Module) -> bool:
        """Whether the second step runs."""
        return bool(module.__dict__.get("failing_step"))


class FailingAdam(torch.optim.SGD):
    """Fails in the second step."""

    calls = 0

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.calls += 1
        if self.calls == 2:
            raise Planted("in step")
        super().step()


def failing(where: str, rank: int) -> Pipeline:
    """Four ranks, a tie of the first and last, and a failure in the second step."""

    def build(stage: int) -> nn.Module:
        module = FailingStage(stage, [tie_name(0, stage)] if stage in (0, 3) else [])
        module.where = where if stage == rank else ""
        return module

    def loss(output: Tensor, labels: Tensor) -> Tensor:
        if where == "loss" and float(labels.flatten()[0]) == 12345.0:
            raise Planted("in loss")
        return ((output - labels) ** 2).sum()

    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        mine = threading.current_thread().name == f"rank {rank}"
        return (FailingAdam if where == "step" and mine else torch.optim.SGD)(parameters, lr=1e-3)

    return Pipeline(
        build=build,
        placement=(0, 1, 2, 3),
        ties=[(tie_name(0, 0), tie_name(0, 3))],
        microbatches=4,
        loss=loss,
        optimizer=optimizer,
        kind=FailingExecutor,
        timeout=30.0,
    )


FAILURES = [
    *(("forward", rank, f"{rank}F0 of step 1") for rank in range(4)),
    *(("backward", rank, f"{rank}B0 of step 1") for rank in range(4)),
    *(("step", rank, f"STEP[stage{rank}] of step 1") for rank in range(1, 4)),
    ("step", 0, "OWNER_STEP[t0s0.weight] of step 1"),
    ("loss", 3, "3F0 of step 1"),
]


@pytest.mark.parametrize(("where", "rank", "action"), FAILURES)
def test_case_44_a_failing_rank_is_named_by_every_other(where: str, rank: int, action: str) -> None:
    batches = [row_batch(4, seed) for seed in range(4)]
    batches[1][1][0][0, 0] = 12345.0
    start = time.monotonic()
    errors = failing(where, rank).errors(batches)
    assert time.monotonic() - start < 10.0
    assert isinstance(errors[rank], Planted)
    assert errors[rank].__notes__ == [f"on rank {rank}, at {action}"]
    for other, error in enumerate(errors):
        if other != rank:
            assert isinstance(error, ExchangeError)
            assert f"rank {rank} failed first, at {action}: Planted: in {where}" in str(error)
            assert f"rank {other} lost rank" in str(error)


def test_the_error_of_a_run_is_that_of_the_rank_that_failed_first() -> None:
    with pytest.raises(Planted, match="in backward"):
        failing("backward", 2).run([row_batch(4, seed) for seed in range(3)], check=False)


def train_failing(fabric: Fabric, where: str, rank: int) -> None:
    """One process of the failing pipeline."""
    threading.current_thread().name = f"rank {fabric.rank}"
    pipeline = failing(where, rank)
    pipeline.train(fabric, pipeline.dag(), [row_batch(4, seed) for seed in range(4)], check=False)


def test_case_44_a_failing_rank_is_named_over_gloo(rank_pool: RankPool) -> None:
    from ranks import RankFailures

    with pytest.raises(RankFailures) as caught:
        rank_pool.run(4, train_failing, "backward", 1)
    failures = caught.value.failures
    assert sorted(failures) == [0, 1, 2, 3]
    assert failures[1].kind == "Planted"
    for rank in (0, 2, 3):
        assert "rank 1 failed first, at 1B0 of step 1: Planted: in backward" in failures[rank].text


@pytest.mark.parametrize("rank", [0, 1])
def test_wrong_stages_are_named(rank: int) -> None:
    pipeline = mixed((0, 1), [(0, 1)], timeout=1.0)
    dag = pipeline.dag()

    def work(fabric: Fabric) -> BaseException:
        modules = (
            {1: pipeline.build(1)} if fabric.rank == rank == 0 else {fabric.rank: pipeline.build(fabric.rank)}
        )
        if fabric.rank == rank == 1:
            modules = {0: pipeline.build(0), 1: pipeline.build(1)}
        with pytest.raises((DagError, ExchangeError)) as caught:
            pipeline.executor(dag, fabric, modules)
        return caught.value

    errors = run_threads(2, work, timeout=timedelta(seconds=1))
    given_stages = [1] if rank == 0 else [0, 1]
    assert f"rank {rank} runs the stages [{rank}], not {given_stages}" in str(errors[rank])
    assert f"rank {rank} failed first, at start-up: DagError" in str(errors[1 - rank])


@pytest.mark.parametrize("which", ["inputs", "labels"])
def test_a_batch_of_the_wrong_length_is_named(which: str) -> None:
    pipeline = mixed((0, 1), [(0, 1)], microbatches=3)
    inputs, labels = row_batch(3, 0)
    batch = (inputs[:2], labels) if which == "inputs" else (inputs, [*labels, labels[0]])
    counts = "2 of inputs and 3 of labels" if which == "inputs" else "3 of inputs and 4 of labels"
    errors = pipeline.errors([batch])
    assert all(isinstance(error, DagError) for error in errors)
    assert all(f"runs 3 microbatches, and the batch has {counts}" in str(error) for error in errors)


def test_a_wrong_batch_on_one_rank_does_not_leave_the_others_waiting() -> None:
    pipeline = mixed((0, 1), [(0, 1)], microbatches=3)
    dag = pipeline.dag()

    def work(fabric: Fabric) -> BaseException:
        inputs, labels = row_batch(3, 0)
        with pytest.raises((DagError, ExchangeError)) as caught:
            pipeline.train(fabric, dag, [(inputs[: 3 - fabric.rank], labels)] * 2, check=False)
        return caught.value

    start = time.monotonic()
    errors = run_threads(2, work, timeout=timedelta(seconds=20))
    assert time.monotonic() - start < 10.0
    assert "rank 1 failed first, at the start of step 0: DagError" in str(errors[0])


@pytest.mark.parametrize("owner", [0, 2])
def test_a_replica_that_differs_is_found_by_every_holder(owner: int) -> None:
    pipeline = mixed((0, 1, 2, 3), [(0, 1, 2)], owner=owner)
    dag = pipeline.dag()

    def work(fabric: Fabric) -> str:
        executor = pipeline.executor(dag, fabric)
        assert executor.check()
        if fabric.rank == 1:
            with torch.no_grad():
                executor.stages[1].module.get_parameter(tie_name(0, 1))[2, 3] += 0.25
        if fabric.rank == 3:
            return str(executor.check())
        with pytest.raises(ReplicaMismatchError) as caught:
            executor.check()
        return str(caught.value)

    *texts, bystander = run_threads(4, work, timeout=timedelta(seconds=20))
    assert bystander == "True"
    for text in texts:
        assert f"differs from the owner, rank {owner}, by up to 0.25 after step 0 (ranks (0, 1, 2))" in text


def test_ranks_that_planned_different_runs_are_told() -> None:
    def work(fabric: Fabric) -> str:
        config = small(schedule=("gpipe", "1f1b")[fabric.rank], microbatches=4)
        with pytest.raises(ConfigError) as caught:
            RankSession(config, RunKind.OWNER, fabric)
        return str(caught.value)

    texts = run_threads(2, work, timeout=timedelta(seconds=20))
    assert "rank 0 and the ranks [1] have planned different runs" in texts[0]
    assert "rank 1 and the ranks [0] have planned different runs" in texts[1]


# -- lateness, and many steps


@pytest.mark.parametrize("late_rank", [1, 2])
@pytest.mark.parametrize("clip", [None, 1e9])
def test_case_46_a_late_replica(late_rank: int, clip: float | None) -> None:
    late = threading.Event()

    class Late(RankExecutor):
        def _run(
            self, action: Action, inputs: Sequence[tuple[Tensor, ...]], labels: Sequence[Tensor]
        ) -> tuple[Tensor, ...]:
            if isinstance(action, Sync) and self.rank == late_rank and self.step == 1:
                time.sleep(0.2)  # the fault itself
            return super()._run(action, inputs, labels)

    names = [f"s{stage}.weight" for stage in range(3)]
    pipeline = Pipeline(
        build=lambda stage: Term(names[stage], stage, (2.0, 3.0, 4.0)[stage]),
        placement=(0, 1, 2),
        ties=[names],
        microbatches=2,
        loss=sum_loss(2),
        clip=clip,
        kind=Late,
        wrap=lambda fabric: LateFabric(fabric, late_rank, late, 0.2),
    )
    batches = [term_batch(2)] * 3
    assert largest_difference(pipeline, pipeline.run(batches), pipeline.reference(batches)) < 1e-12


def live_tensors() -> int:
    """Tensors that the garbage collector knows."""
    gc.collect()
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


def test_case_45_a_thousand_steps_leave_nothing_behind() -> None:
    names = ("first.weight", "last.weight")
    pipeline = Pipeline(
        build=lambda stage: Term(names[stage], stage, (2.0, 3.0)[stage]),
        placement=(0, 1),
        ties=[names],
        loss=sum_loss(1),
        optimizer=partial(torch.optim.SGD, lr=1e-4),
    )
    dag = pipeline.dag()
    together = threading.Barrier(2, timeout=20.0)

    def count(executor: RankExecutor) -> tuple[int, ...]:
        lines = [*executor.exchange.lines.values(), *executor.mailbox.lines.values()]
        pending = sum(len(line._pending) for line in lines)
        together.wait()
        counts = (0, 0, 0)
        if executor.rank == 0:  # while the other one waits
            counts = (threading.active_count(), len(os.listdir("/proc/self/fd")), live_tensors())
        together.wait()
        return (pending, *counts)

    def work(fabric: Fabric) -> tuple[tuple[int, ...], tuple[int, ...], float]:
        executor = pipeline.executor(dag, fabric)
        inputs, labels = term_batch(1)
        for _ in range(20):
            executor.train_step(inputs, labels)
        before = count(executor)
        for _ in range(980):
            executor.train_step(inputs, labels)
        after = count(executor)
        executor.close()
        value = executor.stages[fabric.rank].module.get_parameter(names[fabric.rank])
        return before, after, float(value.detach())

    ranks = run_threads(2, work, timeout=timedelta(seconds=30))
    for before, after, value in ranks:
        assert after == before
        assert value == pytest.approx(0.5)


# -- memory


class Watching(RankExecutor):
    """Sees that weights are written only when no microbatch is in flight, and where gradients go."""

    def __init__(self, *args: object, **options: object) -> None:
        self.writes = 0
        self.sent_grads: list[weakref.ref[Tensor]] = []
        super().__init__(*args, **options)  # type: ignore[arg-type]

    def _run(
        self, action: Action, inputs: Sequence[tuple[Tensor, ...]], labels: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        before = self._versions()
        if isinstance(action, Sync) and action.kind is SyncKind.SEND_GRAD:
            grad = self.exchange.tied[action.bucket].parameter.grad
            assert grad is not None
            self.sent_grads.append(weakref.ref(grad))
        share = super()._run(action, inputs, labels)
        if self._versions() != before:
            self.writes += 1
            assert all(runner.num_in_flight == 0 for runner in self.stages.values()), action
            assert isinstance(action, BucketStep | Sync)
        return share

    def _versions(self) -> list[int]:
        return [
            parameter._version for runner in self.stages.values() for parameter in runner.module.parameters()
        ]

    def train_step(self, inputs: Sequence[Tensors], labels: Sequence[Tensor]) -> float:
        loss = super().train_step(inputs, labels)
        for runner in self.stages.values():
            assert all(parameter.grad is None for parameter in runner.module.parameters())
        return loss


@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize("placement", [(0, 1, 2), (0, 1, 1, 0), (0, 1, 0, 1)])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_weights_are_never_written_while_a_microbatch_is_in_flight(
    schedule: Schedule, placement: tuple[int, ...], clip: float | None
) -> None:
    ties = [(0, 1), (0, len(placement) - 1)]
    pipeline = mixed(
        placement, ties, microbatches=4, schedule=schedule, clip=clip, kind=Watching, chunk_bytes=1
    )
    for rank in pipeline.run([row_batch(4, seed) for seed in range(2)]):
        assert isinstance(rank.executor, Watching)
        assert rank.executor.writes > 0


def train_watching(fabric: Fabric) -> tuple[int, int, float]:
    """One process: gradients sent and still alive, and the largest difference of losses."""
    pipeline = mixed((0, 1, 2), [(0, 1, 2)], microbatches=4, kind=Watching, chunk_bytes=1)
    batches = [row_batch(4, seed) for seed in range(3)]
    trained = pipeline.train(fabric, pipeline.dag(), batches, check=False)
    executor = trained.executor
    assert isinstance(executor, Watching)
    alive = sum(reference() is not None for reference in executor.sent_grads)
    losses, _ = pipeline.reference(batches)
    worst = max(abs(a - b) for a, b in zip(trained.losses, losses, strict=True)) if fabric.rank == 2 else 0.0
    return len(executor.sent_grads), alive, worst


def test_a_replica_s_gradient_is_freed_with_the_step(rank_pool: RankPool) -> None:
    for rank, (sent, alive, worst) in enumerate(rank_pool.run(3, train_watching)):
        assert sent == (0 if rank == 0 else 3)
        assert alive == 0
        assert worst < 1e-10


class Wide(nn.Module):
    """A tied weight of many rows, 16 wide."""

    def __init__(self, name: str, rows: int) -> None:
        super().__init__()
        path, leaf = name.split(".")
        self.name = name
        self.add_module(path, nn.Module())
        weight = torch.linspace(-1, 1, rows * 16, dtype=torch.float64).view(rows, 16)
        self.get_submodule(path).register_parameter(leaf, nn.Parameter(weight))

    def forward(self, rows: Tensor) -> Tensor:
        weight = self.get_parameter(self.name)
        return rows + (rows @ weight.t()) @ weight / len(weight)


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("optimizer", [ADAM, ADAFACTOR], ids=["adam", "adafactor"])
def test_staging_is_two_chunks_for_each_replica(clip: float | None, optimizer: OptimizerFactory) -> None:
    names = [f"s{stage}.weight" for stage in range(3)]
    pipeline = Pipeline(
        build=lambda stage: Wide(names[stage], 200),
        placement=(0, 1, 2),
        ties=[names],
        clip=clip,
        optimizer=optimizer,
        chunk_bytes=1024,
    )
    batches = [row_batch(1, seed, width=16) for seed in range(3)]
    dag = pipeline.dag()

    def work(fabric: Fabric) -> list[int]:
        executor = pipeline.executor(dag, fabric)
        for inputs, labels in batches:
            executor.train_step(inputs, labels)
        staging = [line.staging_bytes for _, line in sorted(executor.exchange.lines.items())]
        executor.close()
        return staging

    owner, *replicas = run_threads(3, work, timeout=timedelta(seconds=20))
    assert len(owner) == 2
    assert all(0 < size <= 2 * 1024 for size in owner), "a gradient has 25600 bytes"
    assert all(0 < size <= 2 * 1024 for sizes in replicas for size in sizes)
    check_wide = largest_difference(pipeline, pipeline.run(batches), pipeline.reference(batches))
    assert check_wide < 1e-10


def small(**options: object) -> TrainConfig:
    """A GPT of two layers in float64."""
    chosen: dict[str, object] = {
        "stages": 2, "microbatches": 2, "microbatch_size": 2, "sequence_length": 8, "vocab": 300,
        "hidden": 16, "heads": 2, "layers": 2, "dtype": "float64", "steps": 1, "timeout_seconds": 20.0,
        **options,
    }  # fmt: skip
    return TrainConfig(**chosen)  # type: ignore[arg-type]


TABLE = 300 * 16 * 8
# Elements of one layer: two norms, attention (48 + 16) x 16 + 16, MLP 2 x (64 x 16) + 64 + 16.
LAYER, LAYER_TENSORS = 4 * 16 + 64 * 16 + 16 + 2 * 64 * 16 + 64 + 16, 11


@pytest.mark.parametrize("owner", ["first", "last"])
@pytest.mark.parametrize("devices", [1, 2])
def test_the_report_gives_measured_bytes(owner: str, devices: int) -> None:
    config = small(owner=owner, devices=devices, layout="dense")
    stream = TokenStream(np.arange(500) % 300, microbatches=2, microbatch_size=2, sequence_length=8)

    def work(fabric: Fabric) -> tuple[RankReport, RankReport]:
        session = RankSession(config, RunKind.OWNER, fabric)
        before = session.report()
        session.train_step(stream.batch(0))
        session.close()
        session.close()
        return before, session.report()

    reports = run_threads(devices, work, timeout=timedelta(seconds=20))
    for before, _ in reports:
        assert before == RankReport(tied_weights=TABLE)
    # Adam keeps two moments of each element and, of each tensor, a step counter of 4 bytes.
    first = 16 * (LAYER + 8 * 16) + 4 * (LAYER_TENSORS + 1)
    last = 16 * (LAYER + 2 * 16) + 4 * (LAYER_TENSORS + 2)
    table = 2 * TABLE + 4
    plain = [first, last] if devices == 2 else [first + last]
    owning = 1 if (owner, devices) == ("last", 2) else 0
    for rank, (_, after) in enumerate(reports):
        tied = table if rank == owning else 0
        assert after == RankReport(
            tied_weights=TABLE, tied_grads=TABLE, tied_optimizer=tied, optimizer_state=plain[rank] + tied
        )
