"""Runs one rank's program of a TrainingDAG, action by action."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import assert_never

import torch
from torch import Tensor, nn

from piper_owner.dag.graph import TrainingDAG
from piper_owner.dag.nodes import (
    Across,
    AcrossKind,
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
from piper_owner.data_parallel import DataParallel, SideGroup
from piper_owner.errors import DagError, ExchangeError
from piper_owner.exchange import Exchange
from piper_owner.executor.averaging import average_grads, share_values
from piper_owner.executor.buckets import LocalBucket, OptimizerFactory, local_buckets
from piper_owner.executor.checks import (
    check_planned,
    check_ports,
    check_row_stages,
    check_side,
    check_stages,
    check_syncs,
)
from piper_owner.executor.pipeline import Mailbox
from piper_owner.executor.ports import StagePorts, chain_ports
from piper_owner.executor.recording import StepObserver
from piper_owner.executor.stage import LossFunction, StageRunner, Tensors
from piper_owner.fetching import keep_rows
from piper_owner.ownership import OwnershipPlan, Scope, TiePlan, Use
from piper_owner.rows import checked_ids
from piper_owner.stages import named_places
from piper_owner.stepping import ParameterStepper
from piper_owner.steps import check_digits, check_steps, digits_of
from piper_owner.tied import TiedParameter
from piper_owner.ties import unite
from piper_owner.transport.base import Fabric, Group
from piper_owner.transport.messages import BytesSent, Line

__all__ = ["DEFAULT_CHUNK_BYTES", "RankExecutor"]

DEFAULT_CHUNK_BYTES = 4 * 2**20


class RankExecutor:
    """One rank of a pipeline. Construction and every method but the properties are collective.

    `dag` has passed the rules of Level.EXECUTABLE and the dry run; `stages` maps the stage numbers
    that `dag.placement` gives this rank to their modules, with full-model parameter names. `ports` are
    those of all stages (None: a chain), and have the edges of `dag`. The names of a tie of `plan` become
    one Parameter on this rank and take the value of the first name's holder; under `copies` (a DAG of
    `executable_copies`) every copy stays its own.

    With several pipelines in `dag`, `fabric` has the ranks of this one, and `side` this same rank of all of
    them, by number. Each of them is given other batches, and their gradients are averaged; all start from
    the values of the first one. Under `scope="global"` of the plan, the first one owns for all.
    `device` is where the stages are and the batch goes (None: the CPU).

    `observer`, None at first, may be set between steps: each action then runs in its `around`.

    A failure on any rank is written to `fabric.board` with the rank and the action, this rank's
    lines are closed so that its peers fail at once, and the error is raised.
    """

    def __init__(
        self,
        dag: TrainingDAG,
        plan: OwnershipPlan,
        *,
        rank: int,
        stages: Mapping[int, nn.Module],
        optimizer: OptimizerFactory,
        loss: LossFunction,
        fabric: Fabric,
        side: Fabric | None = None,
        ports: Sequence[StagePorts] | None = None,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        clip: float | None = None,
        copies: bool = False,
        device: torch.device | None = None,
    ) -> None:
        self.dag, self.plan, self.rank, self.clip = dag, plan, rank, clip
        self._device = torch.device("cpu") if device is None else device
        self.step = 0
        self.observer: StepObserver | None = None
        self._fabric = fabric
        self.peak_grad_bytes: Counter[str] = Counter()
        self._tied_sent = BytesSent()
        self._groups: dict[tuple[int, ...], Group] = {}
        self._beside: Group | None = None
        self._pipeline = 0 if side is None else side.rank
        self._follows = side is not None and plan.scope is Scope.GLOBAL and side.rank > 0
        self.ports = chain_ports(dag.num_stages) if ports is None else tuple(ports)
        with self._reporting("start-up"):
            check_stages(dag, rank, stages)
            check_ports(dag, self.ports)
            check_side(dag, side)
            check_syncs(dag, plan, rank, clips=clip is not None, copies=copies)
            ties = () if copies else plan.held_by(rank)
            check_row_stages(ties, rank, stages, self.ports)
            united = {tie.name: unite(stages, tie.tie) for tie in ties}
            for tie in ties:
                check_planned(tie, rank, united[tie.name])
            last = dag.num_stages - 1
            self.stages = {
                stage: StageRunner(module, self.ports[stage], loss if stage == last else None)
                for stage, module in stages.items()
            }
            across = self._open_side(side, chunk_bytes)
            self.buckets = local_buckets(dag, plan, rank, stages, optimizer, steps_ties=not self._follows)
            tied_pairs, row_pairs = ((), ()) if copies else (plan.pairs, plan.row_pairs)
            lines = _open_lines(dag, tied_pairs, row_pairs, fabric, chunk_bytes)
            self.mailbox = Mailbox(lines["pipeline"], self.ports, self._device)
            tied = {tie.name: self._part_of(tie, united[tie.name], stages) for tie in ties}
            self.exchange = Exchange(rank, tied, lines["tied"], side=across, row_lines=lines["rows"])
            self._open_groups()
            if self._beside is not None:
                for bucket in self._plain_buckets():
                    share_values(bucket.parameters, self._beside)
            self.exchange.share_values()
            keep_rows(stages, tied, rank)
            self._follow_tables()
            self.exchange.take_bytes_sent()

    def _part_of(
        self, tie: TiePlan, parameter: nn.Parameter, stages: Mapping[int, nn.Module]
    ) -> TiedParameter:
        """This rank's part in `tie`; its owner steps it."""
        bucket = self.buckets.get(tie.name)  # None when the tie is frozen
        steps = bucket.optimizer if bucket is not None else None
        stepper = None if steps is None else ParameterStepper(steps, parameter)
        return TiedParameter(plan=tie, parameter=parameter, places=_places(stages, tie), stepper=stepper)

    def _open_side(self, side: Fabric | None, chunk_bytes: int) -> DataParallel | None:
        """Open what leads to the other pipelines, if there are any."""
        if side is None:
            return None
        self._beside = side.group(tuple(range(side.world_size)), "gradients")
        return DataParallel(SideGroup(fabric=side), self.rank, self.plan.scope, chunk_bytes=chunk_bytes)

    def _plain_buckets(self) -> list[LocalBucket]:
        return [self.buckets[b.name] for b in self.dag.buckets if b.owner is None and b.name in self.buckets]

    # -- a step

    def train_step(self, inputs: Sequence[Tensors], labels: Sequence[Tensor]) -> float:
        """One optimizer step over `len(inputs)` microbatches; this rank's share of the loss.

        Every rank gets the same batch, on the CPU: of each microbatch the input of the model, or the tuple of
        its inputs, which the stages read as the ports say, and the labels, which the last one reads. The
        shares of all ranks add up to the loss of the batch. When it returns, every replica on this rank
        has its new weights.
        """
        batch = [(each,) if isinstance(each, Tensor) else tuple(each) for each in inputs]
        with self._reporting(f"the start of step {self.step}"):
            self._check_batch(batch, labels)
            self.exchange.fetching.want(self._ids(batch, self.stages))
            if self.plan.scope is Scope.PIPELINE:  # else when a DP_REDUCE comes
                self.exchange.reduce_grads(tuple(self.exchange.tied), self.step)
        losses: list[Tensor] = []
        run = self._run if self.observer is None else partial(self._observed, self.observer)
        for action in self.dag.programs[self.rank]:
            with self._reporting(f"{action!r} of step {self.step}"):
                losses.extend(run(action, batch, labels))
        with self._reporting(f"the end of step {self.step}"):
            self.mailbox.flush()
            self.exchange.fetching.end_step((), self.step)
        self._tied_sent += self.exchange.take_bytes_sent()
        self.step += 1
        loss = 0.0
        for share in losses:  # read only now: on a GPU, that waits for all that was started there
            loss += float(share)
        return loss

    def _check_batch(self, inputs: Sequence[tuple[Tensor, ...]], labels: Sequence[Tensor]) -> None:
        wanted = self.dag.num_microbatches
        if len(inputs) != wanted or len(labels) != wanted:
            raise DagError(
                f"rank {self.rank} runs {wanted} microbatches, and the batch has {len(inputs)} of inputs and "
                f"{len(labels)} of labels; give one of each per microbatch of the TrainingDAG"
            )
        read = {source.index for port in self.ports for source in port.inputs if source.stage is None}
        for microbatch, given in enumerate(inputs):
            if len(given) <= max(read, default=-1):
                raise DagError(
                    f"microbatch {microbatch} has {len(given)} inputs, and the stages read those at "
                    f"{sorted(read)}; give every input of the model"
                )
        for tie in self.plan.ties:
            stages = [s for holder in tie.holders if holder.use is Use.LOOKUP for s in holder.stages]
            if stages:
                checked_ids(self._ids(inputs, stages), tie.shape[0], f"tie {tie.tie.names}, step {self.step}")

    def _ids(self, inputs: Sequence[tuple[Tensor, ...]], stages: Iterable[int]) -> list[Tensor]:
        """The ids by which `stages` look rows up in this step."""
        read = sorted({index for stage in stages for index in self.ports[stage].ids})
        return [given[index] for given in inputs for index in read]

    def _run(
        self, action: Action, inputs: Sequence[tuple[Tensor, ...]], labels: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Run `action`; the loss that it has computed, if it has."""
        match action:
            case Compute(kind=ComputeKind.FORWARD, stage=stage, microbatch=microbatch):
                return self._forward(stage, microbatch, inputs[microbatch], labels[microbatch])
            case Compute():
                self._backward(action)
            case Transfer():
                self.mailbox.run(action, self.step)
            case BucketStep(bucket=name):
                self._note_grads(name)
                self.buckets[name].step()
            case Sync() if self._follows:
                pass  # the lead pipeline does it
            case Sync():
                self._note_grads(action.bucket)
                self.exchange.run(action, self.step)
                if action.kind is SyncKind.RECV_ROWS:
                    self._follow_tables()
            case Collective():
                self._collective(action)
            case Across():
                self._note_grads(action.bucket)
                self._across(action)
            case _:
                assert_never(action)
        return ()

    def _observed(
        self,
        observer: StepObserver,
        action: Action,
        inputs: Sequence[tuple[Tensor, ...]],
        labels: Sequence[Tensor],
    ) -> tuple[Tensor, ...]:
        with observer.around(action, self.step):
            return self._run(action, inputs, labels)

    def _follow_tables(self) -> None:
        """Let the buckets of ties that keep rows hold the compact table, which another may replace."""
        for name, tie in self.exchange.tied.items():
            if tie.rows is not None and name in self.buckets:
                self.buckets[name] = replace(self.buckets[name], parameters=(tie.parameter,))

    def _note_grads(self, bucket: str) -> None:
        self.peak_grad_bytes[bucket] = max(self.peak_grad_bytes[bucket], self.buckets[bucket].grad_bytes)

    def _forward(
        self, stage: int, microbatch: int, given: tuple[Tensor, ...], labels: Tensor
    ) -> tuple[Tensor, ...]:
        is_last = stage == self.dag.num_stages - 1
        entering = [value.to(self._device) for value in self.mailbox.take_inputs(stage, microbatch, given)]
        wanted = labels.to(self._device) if is_last else None
        outputs = self.stages[stage].forward(microbatch, entering, wanted)
        if is_last:
            return outputs
        self.mailbox.put_outputs(stage, microbatch, outputs)
        return ()

    def _backward(self, action: Compute) -> None:
        stage, microbatch = action.stage, action.microbatch
        runner = self.stages[stage]
        if action.kind is ComputeKind.BACKWARD_WEIGHT:
            runner.backward_weight(microbatch)
            return
        grads = self.mailbox.take_output_grads(stage, microbatch)
        whole = action.kind is ComputeKind.BACKWARD
        results = runner.backward(microbatch, grads) if whole else runner.backward_input(microbatch, grads)
        self.mailbox.put_input_grads(stage, microbatch, results)

    # -- collectives

    def _across(self, action: Across) -> None:
        match action.kind:
            case AcrossKind.ALL_REDUCE_GRAD:
                assert self._beside is not None
                average_grads(self.buckets[action.bucket].parameters, self._beside, self._pipeline, self.step)
            case AcrossKind.REDUCE_GRAD:
                self.exchange.reduce_grads((action.bucket,), self.step)
            case AcrossKind.BROADCAST_WEIGHT:
                self.exchange.spread_weights((action.bucket,), self.step)
            case _:
                assert_never(action.kind)

    def _collective(self, action: Collective) -> None:
        match action.kind:
            case CollectiveKind.ALL_REDUCE:
                assert action.bucket is not None
                self._all_reduce(action.bucket, action.ranks)
            case CollectiveKind.CLIP:
                self._clip(action.ranks)
            case _:
                assert_never(action.kind)

    def _all_reduce(self, name: str, ranks: tuple[int, ...]) -> None:
        """The baseline: every copy's gradient becomes the sum of all copies', None where all are None."""
        tie = self.plan[name].tie
        copies = [
            p for bucket in tie.names if bucket in self.buckets for p in self.buckets[bucket].parameters
        ]
        like = copies[0].detach()
        # Behind the gradient: how many ranks have one at all, and in which step each of them is.
        more = [int(any(copy.grad is not None for copy in copies))]
        more += digits_of(self.step, ranks.index(self.rank), len(ranks))
        flat = torch.zeros(like.numel() + len(more), dtype=like.dtype, device=like.device)
        total, behind = flat[: like.numel()].view_as(like), flat[like.numel() :]
        behind.copy_(torch.tensor(more, device="cpu"))
        for copy in copies:
            if copy.grad is not None:
                total += copy.grad
        if len(ranks) > 1:
            host = flat.to("cpu")
            self._groups[ranks].all_reduce(host)
            behind = host[like.numel() :]
            total = host[: like.numel()].view_as(like).to(like.device)
            # What a ring sends of it on each of its ranks.
            grads = 2 * (len(ranks) - 1) * total.nbytes // len(ranks)
            self._tied_sent += BytesSent(grads=grads, other=behind.nbytes)
            check_digits(behind[1:].tolist(), ranks)
        is_present = bool(behind[0])
        for copy in copies:
            copy.grad = total.clone() if is_present else None

    def _clip(self, ranks: tuple[int, ...]) -> None:
        """Scale all gradients so that their global L2 norm is at most `clip`; a tie counts once."""
        assert self.clip is not None
        self.exchange.finalize_grads(self.step)
        # Of plain buckets, and of ties: these may be in the lead pipeline alone.
        squares = torch.zeros(2, dtype=torch.float64, device="cpu")
        for parameter, is_tied in self._counted():
            if parameter.grad is not None:
                norm = torch.linalg.vector_norm(parameter.grad, dtype=torch.float64)
                squares[int(is_tied)] += norm.to("cpu") ** 2
        is_global = self._beside is not None and self.plan.scope is Scope.GLOBAL
        squares = squares if is_global else squares.sum(0, keepdim=True)
        if len(ranks) > 1:
            self._add_up(squares, self._groups[ranks], self.rank)
        if self._beside is not None and is_global:
            self._add_up(squares[1:], self._beside, self._pipeline, "pipeline")
        # The same small constant as torch.nn.utils.clip_grad_norm_.
        scale = self.clip / (math.sqrt(float(squares.sum())) + 1e-6)
        if scale < 1.0 or math.isnan(scale):
            for bucket in self.buckets.values():
                for parameter in bucket.parameters:
                    if parameter.grad is not None:
                        parameter.grad.mul_(scale)

    def _add_up(self, squares: Tensor, group: Group, rank: int, who: str = "rank") -> None:
        """Sum `squares` over `group`, in which this is `rank`, if all of it are in the same step."""
        steps = torch.zeros(len(group.ranks), dtype=squares.dtype, device="cpu")
        steps[group.ranks.index(rank)] = self.step
        everything = torch.cat([squares, steps])
        group.all_reduce(everything)
        self._tied_sent += BytesSent(other=everything.nbytes)
        check_steps(everything[len(squares) :].tolist(), group.ranks, who)
        squares.copy_(everything[: len(squares)])

    def _counted(self) -> Iterator[tuple[nn.Parameter, bool]]:
        """Parameters whose gradient this rank counts into the global norm, and whether they are a tie."""
        reduced = {
            action.bucket
            for action in self.dag.programs[self.rank]
            if isinstance(action, Collective) and action.bucket is not None
        }
        uncounted = {name for tie in reduced for name in self.plan[tie].tie.names[1:]}
        uncounted |= {name for name, tie in self.exchange.tied.items() if tie.plan.owner != self.rank}
        for name, bucket in self.buckets.items():
            if name not in uncounted:
                yield from ((parameter, name in self.exchange.tied) for parameter in bucket.parameters)

    # -- between steps

    def check(self) -> bool:
        """Whether every replica is bit for bit the owner's value; see `Exchange.check`."""
        with self._reporting("the check of replicas"):
            return self.exchange.check(self.step)

    def take_tied_bytes_sent(self) -> BytesSent:
        """Bytes of the tied sync that this rank has sent since the last call."""
        sent, self._tied_sent = self._tied_sent, BytesSent()
        return sent

    def moved_bytes(self) -> tuple[int, int]:
        """Bytes of all messages, headers included, that this rank has sent and received in this step."""
        sent, received = self.exchange.moved_bytes()
        lines = self.mailbox.lines.values()
        sent += self._tied_sent.total + sum(line.sent.total for line in lines)
        return sent, received + sum(line.received.total for line in lines)

    def resume(self, step: int) -> None:
        """Go on from `step`: the owners have loaded their values, and every copy becomes that. Collective."""
        with self._reporting("the load of a checkpoint"):
            self.exchange.flush()
            self.exchange.share_values(warn=False, from_owner=True)
            self.exchange.fetching.forget()
            self.exchange.take_bytes_sent()
            self.step = step

    def flush(self) -> None:
        """Wait until the peers have all that was sent."""
        self.exchange.flush()
        self.mailbox.flush()

    def close(self) -> None:
        """Wait until the peers have all that was sent, then close every line. Twice is fine."""
        try:
            self.flush()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close every line, whatever is on its way. Local; twice is fine."""
        for part in ("exchange", "mailbox"):
            if part in self.__dict__:
                self.__dict__[part].close()
        for group in self._groups.values():
            group.close()
        if self._beside is not None:
            self._beside.close()

    @contextmanager
    def _reporting(self, where: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._fabric.board.report_error(self._fabric.job_rank, where, error)
            self.abandon()
            if isinstance(error, ExchangeError):
                error.args = (f"{where}: {error.args[0]}",)
            else:
                error.add_note(f"on rank {self._fabric.job_rank}, at {where}")
            raise

    def _open_groups(self) -> None:
        wanted = {
            action.ranks: None
            for program in self.dag.programs
            for action in program
            if isinstance(action, Collective) and len(action.ranks) > 1
        }
        for ranks in sorted(wanted):
            if self.rank in ranks:
                self._groups[ranks] = self._fabric.group(ranks, "collective")


def _places(stages: Mapping[int, nn.Module], tie: TiePlan) -> tuple[tuple[nn.Module, str], ...]:
    found = (place for module in stages.values() for place in named_places(module))
    return tuple((module, leaf) for name, module, leaf in found if name in tie.tie.names)


def _open_lines(
    dag: TrainingDAG,
    tied_pairs: Sequence[tuple[int, int]],
    row_pairs: Sequence[tuple[int, int]],
    fabric: Fabric,
    chunk_bytes: int,
) -> dict[str, dict[int, Line]]:
    """Every line of this rank, by purpose and peer.

    All ranks open theirs in one order, that of (lower rank, higher rank, purpose), so that two
    ranks never wait for each other's second line.
    """
    wanted = {(*pair, "tied") for pair in tied_pairs} | {(*pair, "rows") for pair in row_pairs}
    for rank, program in enumerate(dag.programs):
        for action in program:
            if isinstance(action, Transfer):
                wanted.add((min(rank, action.peer), max(rank, action.peer), "pipeline"))
    lines: dict[str, dict[int, Line]] = {"pipeline": {}, "tied": {}, "rows": {}}
    for low, high, purpose in sorted(wanted):
        if fabric.rank in (low, high):
            peer = high if fabric.rank == low else low
            lines[purpose][peer] = Line(fabric.channel(peer, purpose), chunk_bytes=chunk_bytes)
    return lines
