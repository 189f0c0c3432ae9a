"""Predicts the peak of a rank's memory: its program of a step, played on tensors that have no values.

The stages, the loss and the optimizers are the run's own, on fake tensors, so that their activations and
temporaries are those of the operators; messages take what their ends hold. Nothing is sent, and no other
rank is needed. What it reads are shapes, dtypes and the plan.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from piper_owner.cost import rows_per_chunk
from piper_owner.dag.nodes import (
    Across,
    Action,
    BucketStep,
    Collective,
    CollectiveKind,
    Compute,
    ComputeKind,
    Sync,
    SyncKind,
    Transfer,
)
from piper_owner.executor.buckets import LocalBucket, local_buckets
from piper_owner.executor.config import RunKind
from piper_owner.executor.optimizers import optimizer_factory
from piper_owner.executor.pipeline import Mailbox
from piper_owner.executor.plan import RunPlan
from piper_owner.executor.ports import StagePorts
from piper_owner.executor.source import SplitModel
from piper_owner.executor.stage import StageRunner
from piper_owner.memory import TensorTracker
from piper_owner.models.gpt import lm_loss
from piper_owner.ownership import Layout, TiePlan
from piper_owner.stages import named_places
from piper_owner.stepping import ELEMENT_WISE, Masters
from piper_owner.transport.wire import Phase

__all__ = ["rehearse_peak"]


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a value between stages is."""

    shape: torch.Size
    dtype: torch.dtype


def rehearse_peak(
    plan: RunPlan,
    split: SplitModel,
    rank: int,
    *,
    num_rows: int = 0,
    table_rows: int = 0,
    master_dtype: torch.dtype | None = None,
) -> int:
    """The most bytes of all tensors at one time on `rank` in a step that is not the first. Pure.

    split: the model on the meta device, which stays as it is. num_rows: different rows that a step looks
    up; table_rows: rows of the compact tables of a replica without a copy. master_dtype: as in
    OwnerOptimizer, in place of the optimizers of the run.
    """
    kinds = _value_kinds(plan, split)
    modules = {stage: copy.deepcopy(split.stages[stage]) for stage in plan.dag.stages_of(rank)}
    tracker = TensorTracker()
    values = _Values()  # type: ignore[no-untyped-call]
    with FakeTensorMode(allow_non_fake_inputs=True), values, tracker:
        sizes = {"num_rows": num_rows, "table_rows": table_rows}
        rehearsal = _Rehearsal(plan, modules, rank, kinds, **sizes, masters=Masters(master_dtype))
        rehearsal.step()  # makes the state of the optimizers
        tracker.reset_peak()
        rehearsal.step()
    return tracker.peak


class _Values(TorchDispatchMode):
    """Puts in what a run has and shapes have not: a number where an optimizer reads one (`item`), and the
    device of the constants in a graph that was traced on the meta device."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever `func` returns
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 1
        options = dict(kwargs or {})
        if options.get("device") == torch.device("meta"):
            options["device"] = torch.device("cpu")
        return func(*args, **options)


def _value_kinds(plan: RunPlan, split: SplitModel) -> list[tuple[_Kind, ...]]:
    """By stage, what its outputs are, of a microbatch."""
    config = plan.config
    made: list[tuple[Tensor, ...]] = []
    with torch.device("meta"), torch.no_grad():
        ids = torch.zeros(config.microbatch_size, config.sequence_length, dtype=torch.int64)
        for stage, port in enumerate(plan.ports):
            given = [
                ids if source.stage is None else made[source.stage][source.index] for source in port.inputs
            ]
            outputs = split.stages[stage](*given)
            made.append((outputs,) if isinstance(outputs, Tensor) else tuple(outputs))
    return [tuple(_Kind(value.shape, value.dtype) for value in values) for values in made]


class _Rehearsal:
    """One rank of a run on fake tensors; made and stepped inside the mode."""

    def __init__(
        self,
        plan: RunPlan,
        modules: Mapping[int, nn.Module],
        rank: int,
        kinds: Sequence[tuple[_Kind, ...]],
        *,
        num_rows: int,
        table_rows: int,
        masters: Masters,
    ) -> None:
        self._plan, self._config, self._rank, self._num_rows = plan, plan.config, rank, num_rows
        self._ties = {tie.name: tie for tie in (plan.ownership.held_by(rank) if self._is_owned else ())}
        last = plan.dag.num_stages - 1
        self._tied = _give_memory(modules, self._ties, rank, table_rows)
        self._stages = {
            stage: StageRunner(module, plan.ports[stage], self._loss if stage == last else None)
            for stage, module in modules.items()
        }
        factory = optimizer_factory(self._config.optimizer, self._config.learning_rate)
        self._buckets = local_buckets(plan.dag, plan.ownership, rank, modules, factory)
        self._masters = masters
        optimizers = [each.optimizer for each in self._buckets.values() if each.optimizer is not None]
        plain = [each for name, each in self._buckets.items() if name not in self._ties]
        for each in optimizers:
            masters.make(each.param_groups)
        # An OwnerOptimizer steps all of them at once.
        parameters = [parameter for each in plain for parameter in each.parameters]
        self._inner = factory(parameters) if masters and parameters else None
        self._mailbox = _Mailbox(plan.ports, kinds)
        self._lines: dict[str, Tensor] = {}
        self._on_the_way: dict[tuple[str, SyncKind], list[Tensor]] = {}
        self._asked: list[Tensor] = []

    @property
    def _is_owned(self) -> bool:
        return self._plan.run is RunKind.OWNER

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return lm_loss(logits, labels, num_tokens=self._config.tokens_per_step)

    def step(self) -> None:
        """Play the rank's program once."""
        config = self._config
        shape = (config.microbatches, config.microbatch_size, config.sequence_length)
        ids = torch.zeros(shape, dtype=torch.int64).unbind(0)
        labels = torch.zeros(shape, dtype=torch.int64).unbind(0)
        for action in self._plan.dag.programs[self._rank]:
            self._run(action, ids, labels)
        self._mailbox.sent.clear()

    def _run(self, action: Action, ids: Sequence[Tensor], labels: Sequence[Tensor]) -> None:
        match action:
            case Compute():
                self._compute(action, ids, labels)
            case Transfer():
                self._mailbox.run(action, 0)
            case BucketStep(bucket=name):
                self._step(self._inner, self._buckets[name])
            case Collective(kind=CollectiveKind.ALL_REDUCE, bucket=str(name)):
                self._all_reduce(self._plan.ownership[name])
            case Sync():
                self._sync(action, self._ties[action.bucket])
            case Collective() | Across():
                pass

    def _compute(self, action: Compute, ids: Sequence[Tensor], labels: Sequence[Tensor]) -> None:
        stage, microbatch, runner = action.stage, action.microbatch, self._stages[action.stage]
        match action.kind:
            case ComputeKind.FORWARD:
                entering = self._mailbox.take_inputs(stage, microbatch, (ids[microbatch],))
                outputs = runner.forward(microbatch, entering, labels[microbatch] if runner.loss else None)
                if runner.loss is None:
                    self._mailbox.put_outputs(stage, microbatch, outputs)
            case ComputeKind.BACKWARD_WEIGHT:
                runner.backward_weight(microbatch)
            case ComputeKind.BACKWARD | ComputeKind.BACKWARD_INPUT:
                grads = self._mailbox.take_output_grads(stage, microbatch)
                is_whole = action.kind is ComputeKind.BACKWARD
                back = runner.backward if is_whole else runner.backward_input
                self._mailbox.put_input_grads(stage, microbatch, back(microbatch, grads))

    def _all_reduce(self, tie: TiePlan) -> None:
        names = [name for name in tie.tie.names if name in self._buckets]
        copies = [parameter for name in names for parameter in self._buckets[name].parameters]
        flat = torch.zeros(copies[0].numel() + 1, dtype=copies[0].dtype)
        for each in copies:
            each.grad = flat[:-1].view_as(each).clone()

    # -- the tied sync

    def _sync(self, node: Sync, tie: TiePlan) -> None:
        parameter = self._tied[tie.name]
        has_rows = tie.holder(self._rank).layout is Layout.ROWS
        match node.kind:
            case SyncKind.SEND_GRAD:
                grad, parameter.grad = parameter.grad, None
                if has_rows and grad is not None:
                    grad = grad.new_zeros(self._num_rows, *tie.shape[1:])
                self._on_the_way[tie.name, node.kind] = [] if grad is None else [grad]
            case SyncKind.OWNER_STEP:
                self._owner_step(tie, parameter)
            case SyncKind.RECV_WEIGHT:
                self._line("tied", tie, parameter.dtype, tie.shape[0])
                self._on_the_way.pop((tie.name, SyncKind.SEND_GRAD), None)
            case SyncKind.SEND_IDS:
                self._asked = [torch.empty(self._num_rows, dtype=torch.int64) for _ in range(2)]
            case SyncKind.RECV_ROWS:
                self._line("rows", tie, parameter.dtype, self._num_rows)
                self._on_the_way.pop((tie.name, SyncKind.SEND_GRAD), None)
            case SyncKind.RECV_IDS:
                self._on_the_way.pop((tie.name, SyncKind.SEND_ROWS), None)
                self._asked = [torch.empty(self._num_rows, dtype=torch.int64)]
            case SyncKind.SEND_ROWS:
                rows = parameter.detach().new_empty(self._num_rows, *tie.shape[1:])
                self._on_the_way[tie.name, node.kind] = [rows]
            case SyncKind.RECV_GRAD | SyncKind.SEND_WEIGHT:
                pass

    def _owner_step(self, tie: TiePlan, parameter: nn.Parameter) -> None:
        """Add up and step chunk by chunk, or the whole where the optimizer is not element-wise."""
        if tie.copies:
            self._line("tied", tie, parameter.dtype, tie.shape[0])
        taken = []
        if tie.row_replicas:
            self._line("tied", tie, parameter.dtype, self._num_rows)
            taken.append(parameter.detach().new_empty(self._num_rows, *tie.shape[1:]))
        bucket = self._buckets.get(tie.name)
        if bucket is None or parameter.grad is None:
            return
        if tie.replicas:
            wide = torch.promote_types(torch.float32, parameter.dtype)
            master = self._masters.get(parameter)
            stepped = parameter.dtype if master is None else master.dtype
            rows = self._chunk_rows(tie, parameter.dtype, tie.shape[0])
            taken.append(torch.empty(rows, *tie.shape[1:], dtype=wide))
            is_wide = stepped.itemsize >= torch.float32.itemsize
            if not (isinstance(bucket.optimizer, ELEMENT_WISE) and is_wide):
                # Chunks of the sum go into a whole one, and are gone before the step.
                parameter.grad = torch.empty_like(parameter)
                taken.clear()
        self._step(bucket.optimizer, bucket)

    def _step(self, optimizer: torch.optim.Optimizer | None, bucket: LocalBucket) -> None:
        """Step the parameters of `optimizer` over their masters, or else those of the bucket."""
        if optimizer is not None and self._masters:
            self._masters.step(optimizer, {})
            optimizer.zero_grad(set_to_none=True)
        else:
            bucket.step()

    def _line(self, name: str, tie: TiePlan, dtype: torch.dtype, num_rows: int) -> None:
        """The staging of a line: two chunks of its largest message, which stay."""
        size = 2 * self._chunk_rows(tie, dtype, num_rows) * math.prod(tie.shape[1:])
        if name not in self._lines or self._lines[name].numel() < size:
            self._lines[name] = torch.empty(size, dtype=dtype)

    def _chunk_rows(self, tie: TiePlan, dtype: torch.dtype, num_rows: int) -> int:
        return min(rows_per_chunk(tie.shape, dtype.itemsize, self._config.chunk_bytes), num_rows)


def _give_memory(
    modules: Mapping[int, nn.Module], ties: Mapping[str, TiePlan], rank: int, table_rows: int
) -> dict[str, nn.Parameter]:
    """Put parameters and buffers of the mode into `modules`; the tied parameters of `rank` by name."""
    tie_of = {name: tie for tie in ties.values() for name in tie.tie.names}
    made: dict[object, nn.Parameter] = {}
    for stage, module in modules.items():
        for name, holder, leaf in named_places(module):
            before = holder._parameters[leaf]
            assert before is not None
            tie = tie_of.get(name)
            key: object = tie.name if tie is not None else (stage, id(before))
            if key not in made:
                shape = before.shape
                if tie is not None and tie.holder(rank).layout is Layout.ROWS:
                    shape = torch.Size((table_rows, *shape[1:]))
                memory = torch.empty(shape, dtype=before.dtype, device="cpu")
                made[key] = nn.Parameter(memory, requires_grad=before.requires_grad)
            holder._parameters[leaf] = made[key]
            if len(made[key]) != len(before) and isinstance(holder, nn.Embedding):
                holder.padding_idx = None  # its row is in the table
                holder.register_forward_pre_hook(_places)
        for holder in module.modules():
            for leaf, buffer in holder._buffers.items():
                if buffer is not None:
                    holder._buffers[leaf] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
    return {name: made[name] for name in ties if name in made}


def _places(module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The row of the compact table for each id: what the lookup keeps for its backward."""
    return (arguments[0].clone(), *arguments[1:])


class _Mailbox(Mailbox):
    """A Mailbox without lines: what is sent stays until the end of the step, what is received is new."""

    def __init__(self, ports: Sequence[StagePorts], kinds: Sequence[tuple[_Kind, ...]]) -> None:
        super().__init__({}, ports)
        self._kinds = kinds
        self.sent: list[Tensor] = []

    def _send(self, phase: Phase, node: Transfer, bundle: Sequence[Tensor | None], step: int) -> None:
        self.sent += [tensor.contiguous() for tensor in bundle if tensor is not None]

    def _receive(self, phase: Phase, node: Transfer, count: int, step: int) -> list[Tensor | None]:
        made, taken = (
            (node.peer_stage, node.stage) if phase is Phase.ACTIVATION else (node.stage, node.peer_stage)
        )
        kinds = [self._kinds[made][index] for index in self._crossing[made, taken]]
        return [
            torch.empty(kind.shape, dtype=kind.dtype)
            if phase is Phase.ACTIVATION or kind.dtype.is_floating_point
            else None
            for kind in kinds
        ]
