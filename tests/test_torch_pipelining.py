"""Ties under every schedule of torch.distributed.pipelining: equal to one process, over real gloo groups."""

from __future__ import annotations

import copy
import itertools
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.pipelining import (
    Pipe,
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    SplitPoint,
    pipeline,
)
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    _PipelineSchedule,
)

import piper_owner as po
from piper_owner.frontends.torch_pipelining import attach, ties_of
from piper_owner.ownership import OwnerChoice
from piper_owner.transport import BytesSent, Fabric, GlooFabric

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

    def __init__(self, num_layers: int, mixed: Sequence[int] = ()) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(num_layers)])
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
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

    def __str__(self) -> str:
        flags = [
            "scale" * self.scale_grads,
            "attach" * self.attached,
            f"x{self.accumulate}" * (self.accumulate > 1),
            "modules" * self.modules,
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
        return Model(self.num_stages, self.mixed)

    def batch(self, step: int, pass_: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step * 10 + pass_)
        ids, labels = torch.randint(
            VOCAB, (2, self.microbatches * SIZE, TOKENS), generator=generator
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
    expected_bytes: int
    sent_in_schedule: list[int]


def num_messages(own: po.Ownership) -> int:
    return sum(line.messages for line in own.exchange.lines.values())


def parameters_of(modules: Sequence[nn.Module]) -> list[nn.Parameter]:
    return list(dict.fromkeys(parameter for module in modules for parameter in module.parameters()))


def weights_of(modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    return {
        name: value.detach().clone()
        for module in modules
        for name, value in module.named_parameters(remove_duplicate=False)
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
        own = po.assign_owners(modules if case.modules else stages, ties, owner=owners)
        opt = po.OwnerOptimizer(parameters_of(modules), OPTIMIZERS[case.optimizer], ownership=own)
        if case.attached:
            attach(schedule, opt)
        messages, sent, in_schedule = [], [], []
        for step in range(STEPS):
            before = num_messages(own)
            for pass_ in range(case.accumulate):
                ids, labels = case.batch(step, pass_)
                with ExitStack() as stack:
                    if pass_ < case.accumulate - 1:
                        stack.enter_context(opt.no_sync())
                    schedule.step(*[ids] * stages[0].is_first, target=labels, return_outputs=False)
                    if pass_ < case.accumulate - 1:
                        assert num_messages(own) == before
            in_schedule.append(num_messages(own) - before)
            opt.step()
            sent.append(opt.sent)
            messages.append(num_messages(own) - before)
            opt.zero_grad()
            assert own.check()
        rank = fabric.rank
        replicas = [tie for tie in own.plan.ties if rank in tie.replicas]
        pairs = len(replicas) + sum(len(tie.replicas) for tie in own.plan.ties if tie.owner == rank)
        return Trained(
            weights=weights_of(modules),
            messages=messages,
            sent=sent,
            expected_messages=pairs,
            expected_bytes=sum(own.exchange.tied[tie.name].parameter.nbytes for tie in replicas),
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
    seen = {name for rank in ranks for name in rank.weights}
    assert seen == set(reference)
    return max(
        float((value - reference[name]).abs().max()) for rank in ranks for name, value in rank.weights.items()
    )


def check_run(pool: RankPool, case: Case) -> list[Trained]:
    ranks = pool.run(case.ranks, train, case)
    assert largest_difference(ranks, alone(case)) < 1e-10
    for rank in ranks:
        assert rank.messages == [rank.expected_messages] * STEPS
        assert [sent.grads for sent in rank.sent] == [rank.expected_bytes] * STEPS
        early = rank.expected_bytes > 0 and case.attached
        assert all((count > 0) == early for count in rank.sent_in_schedule)
    return ranks


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
        own = po.assign_owners(modules if case.modules else stages, ties, timeout=timedelta(seconds=20))
        opt = po.OwnerOptimizer(parameters_of(modules), OPTIMIZERS[case.optimizer], ownership=own)
        if case.attached:
            attach(schedule, opt)
        yield Loop(case, stages, modules, schedule, own, opt)
        own.close()


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


def test_modules_are_fine_where_nothing_scales(rank_pool: RankPool) -> None:
    case = Case(schedule="ScheduleZBVZeroBubble", ranks=2, attached=False, modules=True, scale_grads=False)
    check_run(rank_pool, case)


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
            found.append((num_messages(here.own) - before, here.opt.sent))
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


def frozen(fabric: Fabric, case: Case) -> tuple[int, int, bool]:
    with loop(fabric, case) as here:
        start = weights_of(here.modules)
        counts = []
        for step, live in enumerate((False, True)):
            for tie in here.own.exchange.tied.values():
                tie.parameter.requires_grad_(live)
            before = num_messages(here.own)
            here.run(step)
            here.opt.step()
            here.opt.zero_grad()
            counts.append(num_messages(here.own) - before)
            name = "embed.weight" if fabric.rank == 0 else "head.weight"
            moved = not torch.equal(weights_of(here.modules)[name], start[name])
            assert moved == live
        return counts[0], counts[1], here.own.check()


def test_a_tie_that_thaws_is_sent_from_then_on(rank_pool: RankPool) -> None:
    case = Case(schedule="Schedule1F1B", ranks=2)
    assert rank_pool.run(2, frozen, case) == [(0, 2, True)] * 2


def test_attach_takes_a_schedule_and_an_owner_optimizer() -> None:
    model = Model(2)
    own = po.assign_owners(model, po.find_ties(model))
    opt = po.OwnerOptimizer(model.parameters(), torch.optim.SGD, ownership=own, lr=0.1)
    wrong: Any = model
    with pytest.raises(po.ConfigError, match="Model is no schedule of torch"):
        attach(wrong, opt)
    with pytest.raises(po.ConfigError, match="opt is a SGD, not an OwnerOptimizer"):
        attach(wrong, torch.optim.SGD(model.parameters(), lr=0.1))  # type: ignore[arg-type]


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
