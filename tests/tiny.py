"""Tiny pipelines for tests: any modules, placement, ties and schedule, run as threads of one process.

`Pipeline.run` trains on the executor under test; `Pipeline.reference` trains the same modules in an
ordinary loop that knows nothing of ranks. Everything is float64 unless a test says otherwise.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Final

import torch
from torch import Tensor, nn

from piper_owner.dag.graph import Bucket, TrainingDAG
from piper_owner.dag.nodes import parse_action
from piper_owner.executor.buckets import OptimizerFactory
from piper_owner.executor.local import run_threads
from piper_owner.executor.rank import RankExecutor
from piper_owner.ownership import OwnerChoice, OwnershipPlan, Tie, plan_ownership
from piper_owner.p2p_nodes import executable
from piper_owner.schedules import Schedule, build_dag
from piper_owner.simulate import simulate
from piper_owner.ties import describe_uses
from piper_owner.transport.base import Channel, Fabric, Group, Work
from piper_owner.transport.messages import BytesSent

Batch = tuple[Sequence[Tensor], Sequence[Tensor]]
"""One step's microbatches: what the first stage reads, and the labels."""

SGD: Final[OptimizerFactory] = partial(torch.optim.SGD, lr=0.1)
ADAM: Final[OptimizerFactory] = partial(torch.optim.Adam, lr=0.1)


class Term(nn.Module):
    """Adds `factor` times its weight to a running sum, so the weight's gradient is `factor`.

    It reads and gives a tensor (sum, mask); bit s of the mask makes stage s leave its weight out.
    `name` is the weight's name in the full model, such as "first.weight".
    """

    def __init__(
        self,
        name: str,
        stage: int,
        factor: float,
        *,
        value: float = 1.0,
        shape: tuple[int, ...] = (1,),
        extra: float | None = None,
        dtype: torch.dtype = torch.float64,
        frozen: bool = False,
    ) -> None:
        super().__init__()
        path, leaf = name.split(".")
        self.stage, self.factor, self.extra = stage, factor, extra
        self.place = (path, leaf)
        self.add_module(path, nn.Module())
        weight = nn.Parameter(torch.full(shape, value, dtype=dtype), requires_grad=not frozen)
        self.get_submodule(path).register_parameter(leaf, weight)
        if extra is not None:
            self.local = nn.Parameter(torch.ones((), dtype=dtype))

    @property
    def weight(self) -> nn.Parameter:
        """The tied weight, as the module has it now."""
        return self.get_submodule(self.place[0]).get_parameter(self.place[1])

    def forward(self, entering: Tensor) -> Tensor:
        total, mask = entering[0], entering[1].detach()
        if not int(mask) >> self.stage & 1:
            total = total + self.factor * self.weight.sum()
        if self.extra is not None:
            total = total + self.extra * self.local
        return torch.stack([total, mask])


class Mix(nn.Module):
    """A stage over rows of width 4: its own weight, then each of its ties, as it is or transposed."""

    def __init__(self, stage: int, ties: Iterable[str], *, width: int = 4) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(stage)
        self.own = f"m{stage}"
        self.add_module(self.own, nn.Module())
        self.get_submodule(self.own).register_parameter("local", nn.Parameter(_draw(generator, width)))
        self.paths = list(ties)
        for name in self.paths:
            path, leaf = name.split(".")
            if not hasattr(self, path):
                self.add_module(path, nn.Module())
            start = _draw(torch.Generator().manual_seed(99 + len(path)), width)
            self.get_submodule(path).register_parameter(leaf, nn.Parameter(start))

    def forward(self, rows: Tensor) -> Tensor:
        rows = rows + torch.tanh(rows @ self.get_parameter(f"{self.own}.local"))
        for index, name in enumerate(self.paths):
            weight = self.get_parameter(name)
            rows = rows + torch.tanh(rows @ (weight.t() if index % 2 else weight))
        return rows


def _draw(generator: torch.Generator, width: int) -> Tensor:
    return torch.empty(width, width, dtype=torch.float64).normal_(0, 0.4, generator=generator)


def sum_loss(num_microbatches: int) -> Callable[[Tensor, Tensor], Tensor]:
    """The running sum of `Term`s, as a share of a mean over microbatches."""
    return lambda output, labels: output[0] / num_microbatches


def squared_loss(output: Tensor, labels: Tensor) -> Tensor:
    """A sum over everything: shares of microbatches add up to the loss of the batch."""
    return ((output - labels) ** 2).sum()


def term_batch(num_microbatches: int, *, mask: int = 0, dtype: torch.dtype = torch.float64) -> Batch:
    """Inputs for `Term` stages."""
    entering = torch.tensor([0.0, float(mask)], dtype=dtype)
    return [entering] * num_microbatches, [entering] * num_microbatches


def row_batch(num_microbatches: int, seed: int, *, rows: int = 3, width: int = 4) -> Batch:
    """Inputs and labels for `Mix` stages."""
    generator = torch.Generator().manual_seed(seed)
    inputs, labels = (
        [
            torch.empty(rows, width, dtype=torch.float64).normal_(generator=generator)
            for _ in range(num_microbatches)
        ]
        for _ in range(2)
    )
    return inputs, labels


@dataclass(slots=True)
class Trained:
    """What one rank saw; index 0 of `weights` is before the first step."""

    rank: int
    executor: RankExecutor
    losses: list[float] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)
    sent: list[BytesSent] = field(default_factory=list)
    messages: list[int] = field(default_factory=list)

    def keep_weights(self) -> None:
        """Note this rank's parameters, by name."""
        self.weights.append(
            {
                name: parameter.detach().clone()
                for runner in self.executor.stages.values()
                for name, parameter in runner.module.named_parameters(remove_duplicate=False)
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Everything that makes a run. `build(stage)` gives a new module, the same each time."""

    build: Callable[[int], nn.Module]
    placement: tuple[int, ...]
    ties: Sequence[Sequence[str]]
    microbatches: int = 1
    schedule: Schedule = Schedule.ONE_F_ONE_B
    programs: Sequence[str] = ()
    """Computes of each rank as text, for schedules made by hand."""
    optimizer: OptimizerFactory = SGD
    loss: Callable[[Tensor, Tensor], Tensor] = squared_loss
    owner: OwnerChoice | Mapping[str, OwnerChoice] = "auto"
    clip: float | None = None
    chunk_bytes: int = 4 * 2**20
    timeout: float = 20.0
    num_ranks: int = 0
    wrap: Callable[[Fabric], Fabric] = lambda fabric: fabric
    kind: type[RankExecutor] = RankExecutor

    @property
    def world_size(self) -> int:
        """How many ranks take part."""
        return self.num_ranks or max(self.placement) + 1

    def plan(self) -> OwnershipPlan:
        """Who owns what."""
        uses = [
            use
            for stage, rank in enumerate(self.placement)
            for use in describe_uses({stage: self.build(stage)}, rank=rank)
        ]
        return plan_ownership(self.ties, uses, world_size=self.world_size, owner=self.owner)

    def dag(self) -> TrainingDAG:
        """Every rank's program, through all rules and the dry run."""
        buckets = tuple(Bucket(name=f"stage{stage}", stages=(stage,)) for stage in range(len(self.placement)))
        built = build_dag(
            self.schedule,
            placement=self.placement,
            num_ranks=self.world_size,
            num_microbatches=self.microbatches,
            buckets=buckets,
        )
        if self.programs:
            programs = tuple(tuple(map(parse_action, text.split())) for text in self.programs)
            built = dataclasses.replace(built, programs=programs)
        dag = executable(built, self.plan(), clip=self.clip is not None)
        simulate(dag)
        return dag

    def executor(
        self, dag: TrainingDAG, fabric: Fabric, modules: Mapping[int, nn.Module] | None = None
    ) -> RankExecutor:
        """This rank's executor; collective."""
        fabric = self.wrap(fabric)
        stages = modules or {stage: self.build(stage) for stage in dag.stages_of(fabric.rank)}
        return self.kind(
            dag,
            self.plan(),
            rank=fabric.rank,
            stages=stages,
            optimizer=self.optimizer,
            loss=self.loss,
            fabric=fabric,
            chunk_bytes=self.chunk_bytes,
            clip=self.clip,
        )

    def train(self, fabric: Fabric, dag: TrainingDAG, batches: Sequence[Batch], *, check: bool) -> Trained:
        """One rank's part of `run`."""
        executor = self.executor(dag, fabric)
        trained = Trained(fabric.rank, executor)
        trained.keep_weights()
        if check:
            assert executor.check()
        before = count_messages(executor)
        executor.take_tied_bytes_sent()
        executor.exchange.take_bytes_sent()
        for inputs, labels in batches:
            trained.losses.append(executor.train_step(inputs, labels))
            trained.sent.append(executor.take_tied_bytes_sent())
            trained.messages.append(count_messages(executor) - before)
            trained.keep_weights()
            if check:
                assert executor.check()
                executor.exchange.take_bytes_sent()
            before = count_messages(executor)
        executor.close()
        return trained

    def run(self, batches: Sequence[Batch], *, check: bool = True) -> list[Trained]:
        """Train on all ranks; `check` compares the replicas after every step."""
        dag = self.dag()
        work = partial(self.train, dag=dag, batches=batches, check=check)
        return run_threads(self.world_size, work, timeout=timedelta(seconds=self.timeout))

    def errors(self, batches: Sequence[Batch]) -> list[BaseException]:
        """Train on all ranks, which must all fail; the error of each."""
        dag = self.dag()

        def work(fabric: Fabric) -> BaseException:
            try:
                self.train(fabric, dag, batches, check=False)
            except BaseException as error:
                return error
            raise AssertionError(f"rank {fabric.rank} trained on as if nothing had happened")

        return run_threads(self.world_size, work, timeout=timedelta(seconds=self.timeout))

    def reference(self, batches: Sequence[Batch]) -> tuple[list[float], list[dict[str, Tensor]]]:
        """Losses and weights of the same training in one process, without any of the code under test."""
        stages = [copy.deepcopy(self.build(stage)) for stage in range(len(self.placement))]
        for tie in self.ties:
            tie_by_hand(stages, tie)
        parameters = list({id(p): p for stage in stages for p in stage.parameters()}.values())
        optimizer = self.optimizer(parameters)
        losses: list[float] = []
        weights = [_named(stages)]
        for inputs, labels in batches:
            loss = 0.0
            for entering, label in zip(inputs, labels, strict=True):
                share = self.loss(nn.Sequential(*stages)(entering), label)
                if share.requires_grad:
                    share.backward()
                loss += float(share.detach())
            if self.clip is not None:
                torch.nn.utils.clip_grad_norm_(parameters, self.clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss)
            weights.append(_named(stages))
        return losses, weights


def _named(stages: Sequence[nn.Module]) -> dict[str, Tensor]:
    return {
        f"{index}:{name}": parameter.detach().clone()
        for index, stage in enumerate(stages)
        for name, parameter in stage.named_parameters(remove_duplicate=False)
    }


def tie_by_hand(stages: Sequence[nn.Module], names: Sequence[str]) -> None:
    """One Parameter under all `names`, the first one's."""
    kept: nn.Parameter | None = None
    for name in Tie(tuple(names)).names:
        for stage in stages:
            path, _, leaf = name.rpartition(".")
            try:
                module = stage.get_submodule(path)
            except AttributeError:
                continue
            if leaf in module._parameters:
                kept = module.get_parameter(leaf) if kept is None else kept
                module.register_parameter(leaf, kept)
    assert kept is not None


def count_messages(executor: RankExecutor) -> int:
    """Headers that this rank has sent for ties."""
    return sum(line.messages for line in executor.exchange.lines.values())


def batch_losses(ranks: Sequence[Trained]) -> list[float]:
    """The loss of each step: every rank's share, added."""
    return [sum(shares) for shares in zip(*(rank.losses for rank in ranks), strict=True)]


def largest_difference(
    pipeline: Pipeline, ranks: Sequence[Trained], reference: tuple[list[float], list[dict[str, Tensor]]]
) -> float:
    """Of losses, and of every rank's weights after every step."""
    losses, weights = reference
    worst = max((abs(a - b) for a, b in zip(batch_losses(ranks), losses, strict=True)), default=0.0)
    for step, expected in enumerate(weights):
        for index, rank in enumerate(pipeline.placement):
            for key, value in expected.items():
                stage, name = key.split(":")
                if int(stage) == index and value.numel():
                    found = ranks[rank].weights[step][name]
                    worst = max(worst, float((found - value).abs().max()))
    return worst


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Ranks are threads here: threads of torch's own below them only get in one another's way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class LateChannel(Channel):
    """A channel whose receives take longer while `late` is set."""

    def __init__(self, inner: Channel, late: threading.Event, seconds: float) -> None:
        self.rank, self.peer, self.timeout = inner.rank, inner.peer, inner.timeout
        self._inner, self._late, self._seconds = inner, late, seconds

    def post_send(self, tensor: Tensor) -> Work:
        """As it is."""
        return self._inner.post_send(tensor)

    def post_recv(self, tensor: Tensor) -> Work:
        """A receive that may be late."""
        return _LateWork(self._inner.post_recv(tensor), self._late, self._seconds)

    def close(self) -> None:
        """As it is."""
        self._inner.close()


class _LateWork:
    def __init__(self, inner: Work, late: threading.Event, seconds: float) -> None:
        self._inner, self._late, self._seconds = inner, late, seconds

    def wait(self) -> None:
        """Wait, then wait on; only the first of the receives is late."""
        self._inner.wait()
        if self._late.is_set():
            self._late.clear()
            time.sleep(self._seconds)  # the fault itself


class LateFabric(Fabric):
    """A fabric whose tied lines into `rank` are late once whenever `late` is set."""

    def __init__(self, inner: Fabric, rank: int, late: threading.Event, seconds: float) -> None:
        self.rank, self.world_size, self.timeout = inner.rank, inner.world_size, inner.timeout
        self.board = inner.board
        self._inner, self._slow, self._late, self._seconds = inner, rank, late, seconds

    def channel(self, peer: int, purpose: str) -> Channel:
        """This rank's end, which may be slow."""
        channel = self._inner.channel(peer, purpose)
        if purpose == "tied" and self.rank == self._slow:
            return LateChannel(channel, self._late, self._seconds)
        return channel

    def group(self, ranks: tuple[int, ...], purpose: str) -> Group:
        """As it is."""
        return self._inner.group(ranks, purpose)
