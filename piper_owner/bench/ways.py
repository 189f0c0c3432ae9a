"""The ways to keep two uses of one table in step, each as one rank of two runs it.

Rank 0 has the embedding, rank 1 the head. The gradients are there already, as behind the last
backward pass, and the weights (or the rows of the next step) are wanted by the next forward.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from piper_owner.assignment import assign_over
from piper_owner.bench.clock import Clock
from piper_owner.bench.config import BenchConfig, Way
from piper_owner.optimizer_wrap import OwnerOptimizer
from piper_owner.ownership import LayoutChoice, Tie
from piper_owner.transport.base import Fabric

__all__ = ["Lap", "WayRunner", "make_way"]

_TIE = Tie(("embed.weight", "head.weight"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Lap:
    """One run of a way: seconds, and the payload of the messages that rank 0 sent and received."""

    total: float
    step: float
    sent: int
    received: int


class WayRunner(Protocol):
    """One way on one rank."""

    is_duplex: bool
    """Whether both directions of the link are busy at once; else one phase follows the other."""

    def prepare(self) -> None:
        """What the model would do before the sync begins; it is not timed. Local."""
        ...

    def run(self, clock: Clock) -> Lap:
        """Sync and step, with what the model does in between taken out. Collective."""
        ...


def make_way(way: Way, config: BenchConfig, fabric: Fabric, ids: Tensor, grad: Tensor) -> WayRunner:
    """`way` on this rank, with tables of its own. `grad` is only read. Collective."""
    if way is Way.ALLREDUCE:
        return _AllReduce(config, fabric, grad)
    layout: LayoutChoice = "rows" if way is Way.ROWS else "dense"
    chunk_bytes = grad.nbytes if way is Way.DENSE_SERIAL else config.chunk_bytes
    module = _stage(config, fabric.rank)
    owner = "last" if way is Way.ROWS else "first"
    own = assign_over(fabric, module, [_TIE], owner=owner, layout=layout, chunk_bytes=chunk_bytes)  # type: ignore[arg-type]
    opt = OwnerOptimizer(module.parameters(), torch.optim.AdamW, ownership=own, lr=1e-3, fused=True)
    if way is Way.ROWS:
        return _Rows(module, opt, ids, grad)
    return _Dense(module, opt, grad, is_duplex=way is Way.DENSE)


def _stage(config: BenchConfig, rank: int) -> nn.Module:
    """The embedding, or the head, with the same values on both ranks."""
    table = _table(config)
    if rank == 0:
        return nn.ModuleDict({"embed": nn.Embedding(config.vocab, config.hidden, _weight=table)})
    head = nn.Linear(config.hidden, config.vocab, bias=False, device="meta")
    head.weight = nn.Parameter(table)
    return nn.ModuleDict({"head": head})


def _table(config: BenchConfig) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.empty(config.vocab, config.hidden).uniform_(-0.04, 0.04, generator=generator)


class _AllReduce:
    """Two copies: the gradient is reduced over both ranks, and stepped on both."""

    is_duplex = True

    def __init__(self, config: BenchConfig, fabric: Fabric, grad: Tensor) -> None:
        self._group = fabric.group((0, 1), "all-reduce")
        self._parameter = nn.Parameter(_table(config))
        self._parameter.grad = grad.clone()
        self._optimizer = torch.optim.AdamW([self._parameter], lr=1e-3, fused=True)

    def prepare(self) -> None:
        assert self._parameter.grad is not None
        self._parameter.grad.mul_(0.5)  # it has become the sum of two equal ones

    def run(self, clock: Clock) -> Lap:
        grad = self._parameter.grad
        assert grad is not None
        start = clock.start()
        self._group.all_reduce(grad)
        sync = clock.since(start)
        start = time.perf_counter()
        self._optimizer.step()
        step = clock.since(start)
        return Lap(total=sync + step, step=step, sent=grad.nbytes, received=grad.nbytes)


class _Dense:
    """One owner, rank 0, and a replica with a working copy."""

    def __init__(self, module: nn.Module, opt: OwnerOptimizer, grad: Tensor, *, is_duplex: bool) -> None:
        self._parameters = list(module.parameters())
        self._opt, self._grad, self.is_duplex = opt, grad, is_duplex

    def prepare(self) -> None:
        for parameter in self._parameters:
            parameter.grad = self._grad

    def run(self, clock: Clock) -> Lap:
        start = clock.start()
        self._opt.step()
        total = clock.since(start)
        return _lap(self._opt, clock, total)


class _Rows:
    """One owner, rank 1, and rank 0, which fetches the rows of a step and sends their gradient."""

    is_duplex = False

    def __init__(self, module: nn.Module, opt: OwnerOptimizer, ids: Tensor, grad: Tensor) -> None:
        self._module, self._opt, self._ids, self._grad = module, opt, ids, grad

    def prepare(self) -> None:
        self._opt.zero_grad()

    def run(self, clock: Clock) -> Lap:
        start = clock.start()
        self._opt.prefetch(self._ids)
        fetched = clock.since(start)
        for name, module in self._module.named_children():
            if name == "embed":
                looked_up = module(self._ids)
                looked_up.backward(torch.full_like(looked_up, 1e-3))
            else:
                for parameter in module.parameters():
                    parameter.grad = self._grad
        start = clock.start()
        self._opt.step()
        return _lap(self._opt, clock, fetched + clock.since(start))


def _lap(opt: OwnerOptimizer, clock: Clock, total: float) -> Lap:
    """The owner alone adds up and steps; the other rank has nothing to do in that time."""
    stats = opt.stats
    step = clock.meet(stats.seconds.ties + stats.seconds.rest)
    return Lap(total=total, step=step, sent=stats.sent.total, received=stats.received.total)
