"""Trains the two stages on two ranks, in each of the ways to treat their tie, and the whole on one."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from piper_owner.assignment import Ownership, assign_over
from piper_owner.gpu_check.crew import Rank
from piper_owner.gpu_check.model import TIE, Model, batch, build_model, build_stage, loss_of
from piper_owner.gpu_check.sizes import Sizes
from piper_owner.optimizer_wrap import OwnerOptimizer
from piper_owner.rows import RowsParameter
from piper_owner.transport.base import Work

__all__ = ["Outcome", "Way", "train_alone", "train_way"]

_LR = 1e-3


class Way(enum.Enum):
    """How the two uses of the table are treated."""

    NAIVE = "naive"
    ALL_REDUCE = "all-reduce"
    DENSE = "dense"
    ROWS = "rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one rank saw: its share of the loss of each step, and bytes that the allocator had for it.

    `peak` is the most from the second step on, `held` what was left when the last one had ended; 0 on
    the CPU. `gap` and `moved` are squared norms: of the difference to the weights of one process, and of
    how far those have moved from where they began; 0 without a reference. `state` is bytes of optimizer
    state of the tie.
    """

    losses: list[float]
    peak: int = 0
    held: int = 0
    gap: float = 0.0
    moved: float = 0.0
    state: int = 0


def train_alone(rank: Rank, name: str, file: str) -> Outcome:
    """The whole model in one process, with masters in float32 where `name` is "bfloat16".

    Its weights go to `file` of the shared folder.
    """
    sizes, dtype = rank.sizes, getattr(torch, name)
    model = build_model(sizes).to(rank.device, dtype)
    parameters = list(model.parameters())
    masters = [nn.Parameter(parameter.detach().float()) for parameter in parameters]
    optimizer = torch.optim.AdamW(masters, lr=_LR, fused=True)
    losses = []
    for step in range(sizes.steps):
        ids, labels = (each.to(rank.device) for each in batch(sizes, step))
        shares = []
        for index in range(sizes.microbatches):
            share = loss_of(model(ids[index]), labels[index], sizes)
            share.backward()
            shares.append(share.detach())
        losses.append(sum(map(float, shares)))
        with torch.no_grad():
            for parameter, master in zip(parameters, masters, strict=True):
                master.grad = None if parameter.grad is None else parameter.grad.float()
                parameter.grad = None
            optimizer.step()
            for parameter, master in zip(parameters, masters, strict=True):
                parameter.copy_(master)
    named = model.named_parameters(remove_duplicate=False)
    torch.save({key: value.detach().cpu() for key, value in named}, rank.folder / file)
    return Outcome(losses=losses)


def train_way(rank: Rank, way: Way, name: str, file: str | None) -> Outcome:
    """One rank of two that train the two stages in `way`. `file` has the weights of one process."""
    sizes, dtype = rank.sizes, getattr(torch, name)
    before = torch.cuda.memory_allocated() if rank.is_cuda else 0
    stage = build_stage(sizes, rank.rank).to(rank.device, dtype)
    pipe = _Pipe(rank, stage, dtype)
    own, optimizer, sync = _optimizer(rank, stage, way, dtype)
    losses = []
    for step in range(sizes.steps):
        ids, labels = batch(sizes, step)
        if isinstance(optimizer, OwnerOptimizer):
            optimizer.prefetch(ids if rank.rank == 0 else None)
        losses.append(pipe.run(ids, labels))
        sync()
        optimizer.step()
        optimizer.zero_grad()
        pipe.finish()
        if rank.is_cuda and step == 0:  # the state is there now
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
    peak, held = 0, 0
    if rank.is_cuda:
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        held = torch.cuda.memory_allocated() - before
    if own is not None:
        own.check()
    gap, moved = (0.0, 0.0) if file is None else _distance(stage, build_stage(sizes, rank.rank), rank, file)
    state = _state_bytes(stage, optimizer)
    if own is not None:
        own.close()
    return Outcome(losses=losses, peak=peak, held=held, gap=gap, moved=moved, state=state)


def _optimizer(
    rank: Rank, stage: Model, way: Way, dtype: torch.dtype
) -> tuple[Ownership | None, torch.optim.Optimizer, Callable[[], None]]:
    """The ownership, if there is one, the optimizer of this rank, and what comes before its step."""
    if way in (Way.DENSE, Way.ROWS):
        own = assign_over(rank.fabric, stage, [TIE], layout="rows" if way is Way.ROWS else "dense")
        masters = torch.float32 if dtype is torch.bfloat16 else None
        made = OwnerOptimizer(
            stage.parameters(), torch.optim.AdamW, ownership=own, master_dtype=masters, lr=_LR, fused=True
        )
        return own, made, lambda: None
    plain = torch.optim.AdamW(stage.parameters(), lr=_LR, fused=True)
    if way is Way.NAIVE:
        return None, plain, lambda: None
    group = rank.fabric.group((0, 1), "all-reduce")

    def add() -> None:
        grad = stage.get_parameter(TIE[rank.rank]).grad
        assert grad is not None
        host = grad.to("cpu")
        group.all_reduce(host)
        grad.copy_(host)

    return None, plain, add


def _state_bytes(stage: Model, optimizer: torch.optim.Optimizer) -> int:
    tied = [parameter for name, parameter in stage.named_parameters() if name in TIE]
    states = [optimizer.state.get(parameter, {}) for parameter in tied]
    values = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    return sum(value.nbytes for value in values if value.dim())


def _distance(stage: Model, start: Model, rank: Rank, file: str) -> tuple[float, float]:
    """Squared norms: of `stage` against the weights in `file`, and of those against `start`."""
    expected = torch.load(rank.folder / file, weights_only=True)
    before = dict(start.named_parameters())
    gap = moved = 0.0
    for name, value in stage.named_parameters():
        if not isinstance(value, RowsParameter):
            right = expected[name].double()
            gap += float((value.detach().cpu().double() - right).square().sum())
            moved += float((before[name].detach().to(value.dtype).double() - right).square().sum())
    return gap, moved


class _Pipe:
    """The pipeline by hand: activations and their gradients go through host memory."""

    def __init__(self, rank: Rank, stage: Model, dtype: torch.dtype) -> None:
        self._rank, self._stage, self._sizes = rank, stage, rank.sizes
        self._channel = rank.fabric.channel(1 - rank.rank, "activations")
        sizes = rank.sizes
        self._shape, self._dtype = (sizes.microbatch_size, sizes.sequence, sizes.hidden), dtype
        self._sent: list[tuple[Work, Tensor]] = []

    def run(self, ids: Tensor, labels: Tensor) -> float:
        """All microbatches of a step, forward and backward; this rank's share of the loss."""
        return self._first(ids) if self._rank.rank == 0 else self._last(labels, self._sizes)

    def _first(self, ids: Tensor) -> float:
        made = []
        for index in range(len(ids)):
            made.append(self._stage(ids[index].to(self._rank.device)))
            self._send(made[-1].detach())
        for output in made:
            output.backward(self._receive())
        return 0.0

    def _last(self, labels: Tensor, sizes: Sizes) -> float:
        shares = []
        for index in range(len(labels)):
            entering = self._receive().requires_grad_()
            share = loss_of(self._stage(entering), labels[index].to(self._rank.device), sizes)
            share.backward()
            assert entering.grad is not None
            self._send(entering.grad)
            shares.append(share.detach())
        return sum(map(float, shares))

    def _send(self, tensor: Tensor) -> None:
        host = tensor.to("cpu", copy=True).contiguous()
        self._sent.append((self._channel.post_send(host), host))

    def _receive(self) -> Tensor:
        host = torch.empty(self._shape, dtype=self._dtype)
        self._channel.post_recv(host).wait()
        return host.to(self._rank.device)

    def finish(self) -> None:
        """Wait until the other rank has all of this step."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()
