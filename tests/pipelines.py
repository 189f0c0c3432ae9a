"""A tied model cut into stages of torch.distributed.pipelining, and its training on real ranks."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from ranks import RankPool
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    _PipelineSchedule,
)

import piper_owner as po
from piper_owner.frontends.torch_pipelining import attach
from piper_owner.ownership import LayoutChoice, OwnerChoice
from piper_owner.rows import RowsParameter
from piper_owner.transport import BytesSent, Fabric, GlooFabric

__all__ = [
    "OPTIMIZERS",
    "SCHEDULES",
    "SINGLE",
    "SIZE",
    "STEPS",
    "TOKENS",
    "VOCAB",
    "V_SHAPED",
    "WIDTH",
    "Case",
    "Model",
    "alone",
    "check_run",
    "largest_difference",
    "loop",
    "mean_loss",
    "num_messages",
    "parameters_of",
    "process_group",
    "train",
    "weights_of",
]

SINGLE: Final = (ScheduleGPipe, Schedule1F1B)
V_SHAPED: Final = (ScheduleZBVZeroBubble, ScheduleDualPipeV)
LOOPED: Final = (ScheduleLoopedBFS, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble)
SCHEDULES: Final[dict[str, type[_PipelineSchedule]]] = {
    schedule.__name__: schedule for schedule in (*SINGLE, *LOOPED, *V_SHAPED)
}
VOCAB, WIDTH, TOKENS, SIZE, STEPS = 11, 4, 3, 2, 5

OPTIMIZERS: Final[dict[str, Callable[..., torch.optim.Optimizer]]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=0.02),
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.own = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        return rows + torch.tanh(self.own(torch.tanh(self.mix(rows))))


class Model(nn.Module):
    """A language model of `num_layers` layers; `mixed` layers share their `mix.weight`."""

    def __init__(self, num_layers: int, mixed: Sequence[int] = (), *, vocab: int = VOCAB) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(num_layers)])
        self.head = nn.Linear(WIDTH, vocab, bias=False)
        self.head.weight = self.embed.weight
        first = self.layers[mixed[0]].mix if mixed else None
        for index in mixed[1:]:
            assert isinstance(first, nn.Linear)
            linear = self.layers[index].mix
            assert isinstance(linear, nn.Linear)
            linear.weight = first.weight
        generator = torch.Generator().manual_seed(7)
        self.double()
        for parameter in self.parameters():
            nn.init.normal_(parameter, 0, 0.5, generator=generator)

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.embed(ids)
        for layer in self.layers:
            rows = layer(rows)
        logits: Tensor = self.head(rows)
        return logits


class Part(nn.Module):
    """One stage, with the names of the whole model, and parameters of its own as on another machine."""

    def __init__(self, model: Model, stage: int, num_stages: int) -> None:
        super().__init__()
        model = copy.deepcopy(model)
        self.layers = nn.ModuleDict({str(stage): model.layers[stage]})
        if stage == 0:
            self.embed = model.embed
        if stage == num_stages - 1:
            self.head = model.head

    def forward(self, rows: Tensor) -> Tensor:
        if hasattr(self, "embed"):
            rows = self.embed(rows)
        for layer in self.layers.values():
            rows = layer(rows)
        return self.head(rows) if hasattr(self, "head") else rows


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training run; `accumulate` is the number of schedule steps per optimizer step."""

    schedule: str
    ranks: int
    optimizer: str = "sgd"
    scale_grads: bool = True
    attached: bool = True
    accumulate: int = 1
    microbatches: int = 8
    owners: tuple[int, ...] = ()
    """Of the tie of embedding and head, and of that of the layers."""
    modules: bool = False
    """Whether assign_owners is given the modules, and not the PipelineStages."""
    shares_layers: bool = True
    """Whether layers share a weight, beside the embedding and the head."""
    defer_pp_recv: bool = False
    layout: LayoutChoice = "dense"
    vocab: int = VOCAB

    def __str__(self) -> str:
        flags = [
            "scale" * self.scale_grads,
            "attach" * self.attached,
            f"x{self.accumulate}" * (self.accumulate > 1),
            "modules" * self.modules,
            self.layout * (self.layout != "dense"),
        ]
        return "-".join(filter(None, [self.schedule, str(self.ranks), self.optimizer, *flags]))

    @property
    def num_stages(self) -> int:
        return self.ranks * (1 if SCHEDULES[self.schedule] in SINGLE else 2)

    def stages_of(self, rank: int) -> list[int]:
        if SCHEDULES[self.schedule] in V_SHAPED:
            return [rank, self.num_stages - 1 - rank]
        return list(range(rank, self.num_stages, self.ranks))

    @property
    def mixed(self) -> tuple[int, ...]:
        """Layers that share a weight: on two ranks and, with two stages a rank, on each of them twice."""
        last = self.num_stages - 1
        if not self.shares_layers:
            return ()
        if SCHEDULES[self.schedule] in SINGLE:
            return (0, last)
        if SCHEDULES[self.schedule] in V_SHAPED:
            return (0, 1, last - 1, last)
        return (0, 1, self.ranks)

    @property
    def model(self) -> Model:
        return Model(self.num_stages, self.mixed, vocab=self.vocab)

    def batch(self, step: int, pass_: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step * 10 + pass_)
        ids, labels = torch.randint(
            self.vocab, (2, self.microbatches * SIZE, TOKENS), generator=generator
        ).unbind()
        return ids, labels

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        loss = mean_loss(logits, labels)
        return loss if self.scale_grads else loss / self.microbatches

    def make_schedule(self, stages: list[PipelineStage]) -> _PipelineSchedule:
        kind = SCHEDULES[self.schedule]
        options: dict[str, Any] = {"loss_fn": self.loss, "scale_grads": self.scale_grads}
        if issubclass(kind, PipelineScheduleSingle):
            return kind(stages[0], self.microbatches, **options)
        assert issubclass(kind, PipelineScheduleMulti)
        options |= {"defer_pp_recv": True} if self.defer_pp_recv else {}
        return kind(stages, self.microbatches, **options)  # type: ignore[arg-type]


@contextmanager
def process_group(fabric: Fabric) -> Iterator[None]:
    """The default process group over the ranks of a pool's call, as torchrun would have made it."""
    assert isinstance(fabric, GlooFabric)
    store = PrefixStore("default_group", fabric._store)
    dist.init_process_group("gloo", store=store, rank=fabric.rank, world_size=fabric.world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@dataclass
class Trained:
    """What one rank saw."""

    weights: dict[str, Tensor]
    messages: list[int]
    sent: list[BytesSent]
    expected_messages: int
    expected_bytes: list[int]
    left_out: list[str]
    sent_in_schedule: list[int]


def num_messages(own: po.Ownership) -> int:
    return sum(line.messages for line in own.exchange.lines.values())


def parameters_of(modules: Sequence[nn.Module]) -> list[nn.Parameter]:
    return list(dict.fromkeys(parameter for module in modules for parameter in module.parameters()))


def weights_of(modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    """All weights but those of which the rank keeps only rows."""
    return {
        name: value.detach().clone()
        for module in modules
        for name, value in module.named_parameters(remove_duplicate=False)
        if not isinstance(value, RowsParameter)
    }


def build(case: Case, rank: int) -> tuple[list[PipelineStage], list[nn.Module]]:
    modules: list[nn.Module] = [Part(case.model, stage, case.num_stages) for stage in case.stages_of(rank)]
    device = torch.device("cpu")
    stages = [
        PipelineStage(module, stage, case.num_stages, device)
        for module, stage in zip(modules, case.stages_of(rank), strict=True)
    ]
    return stages, modules


def train(fabric: Fabric, case: Case) -> Trained:
    """One rank of a training run."""
    with process_group(fabric):
        stages, modules = build(case, fabric.rank)
        schedule = case.make_schedule(stages)
        ties = po.find_ties(case.model)
        owners: dict[str, OwnerChoice] = dict(zip([tie.name for tie in ties], case.owners, strict=False))
        own = po.assign_owners(modules if case.modules else stages, ties, owner=owners, layout=case.layout)
        rank = fabric.rank
        replicas = [tie for tie in own.plan.ties if rank in tie.replicas]
        in_rows = [tie for tie in replicas if rank in tie.row_replicas]
        opt = po.OwnerOptimizer(parameters_of(modules), OPTIMIZERS[case.optimizer], ownership=own)
        if case.attached:
            attach(schedule, opt)
        messages, sent, in_schedule, num_bytes = [], [], [], []
        for step in range(STEPS):
            before = num_messages(own)
            for pass_ in range(case.accumulate):
                ids, labels = case.batch(step, pass_)
                opt.prefetch(ids if stages[0].is_first else None)
                with ExitStack() as stack:
                    if pass_ < case.accumulate - 1:
                        stack.enter_context(opt.no_sync())
                    schedule.step(*[ids] * stages[0].is_first, target=labels, return_outputs=False)
                    if pass_ < case.accumulate - 1:
                        assert num_messages(own) == before
            in_schedule.append(num_messages(own) - before)
            opt.step()
            sent.append(opt.stats.sent)
            messages.append(num_messages(own) - before)
            opt.zero_grad()
            assert own.check()
            looked_up = torch.cat([case.batch(step, pass_)[0] for pass_ in range(case.accumulate)])
            rows = {tie.name: len(looked_up.unique()) for tie in in_rows}
            num_bytes.append(
                sum(rows.get(tie.name, tie.shape[0]) * math.prod(tie.shape[1:]) * 8 for tie in replicas)
            )
        pairs = len(replicas) + sum(len(tie.copies) for tie in own.plan.ties if tie.owner == rank)
        return Trained(
            weights=weights_of(modules),
            left_out=[tie.name for tie in in_rows],
            messages=messages,
            sent=sent,
            expected_messages=pairs,
            expected_bytes=num_bytes,
            sent_in_schedule=in_schedule,
        )


def alone(case: Case) -> dict[str, Tensor]:
    """The weights after the same steps of the whole model in one process."""
    model = case.model
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    for step in range(STEPS):
        for pass_ in range(case.accumulate):
            ids, labels = case.batch(step, pass_)
            mean_loss(model(ids), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights_of([model])


def largest_difference(ranks: Sequence[Trained], reference: dict[str, Tensor]) -> float:
    seen = {name for rank in ranks for name in (*rank.weights, *rank.left_out)}
    assert seen == set(reference)
    return max(
        float((value - reference[name]).abs().max()) for rank in ranks for name, value in rank.weights.items()
    )


def check_run(pool: RankPool, case: Case) -> list[Trained]:
    ranks = pool.run(case.ranks, train, case)
    assert largest_difference(ranks, alone(case)) < 1e-10
    for rank in ranks:
        assert rank.messages == [rank.expected_messages] * STEPS
        assert [sent.grads for sent in rank.sent] == rank.expected_bytes
        early = rank.expected_bytes[0] > 0 and case.attached
        assert all((count > 0) == early for count in rank.sent_in_schedule)
    return ranks


@dataclass
class Loop:
    """One rank's objects, for tests that do unusual things with them."""

    case: Case
    stages: list[PipelineStage]
    modules: list[nn.Module]
    schedule: _PipelineSchedule
    own: po.Ownership
    opt: po.OwnerOptimizer

    def run(self, step: int = 0, pass_: int = 0) -> None:
        """One schedule step."""
        ids, labels = self.case.batch(step, pass_)
        self.schedule.step(*[ids] * self.stages[0].is_first, target=labels, return_outputs=False)


@contextmanager
def loop(fabric: Fabric, case: Case) -> Iterator[Loop]:
    """What `train` makes, attached if the case says so."""
    with process_group(fabric):
        stages, modules = build(case, fabric.rank)
        schedule = case.make_schedule(stages)
        ties = po.find_ties(case.model)
        own = po.assign_owners(
            modules if case.modules else stages, ties, layout=case.layout, timeout=timedelta(seconds=20)
        )
        opt = po.OwnerOptimizer(parameters_of(modules), OPTIMIZERS[case.optimizer], ownership=own)
        if case.attached:
            attach(schedule, opt)
        yield Loop(case, stages, modules, schedule, own, opt)
        own.close()
