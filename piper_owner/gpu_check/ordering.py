"""Delays on side streams change no bit of the result; a step waits for nothing on the host."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Final

import torch
from torch import Tensor, nn

from piper_owner.assignment import assign_over
from piper_owner.gpu_check.crew import Crew, Rank
from piper_owner.gpu_check.model import TIE
from piper_owner.gpu_check.result import CheckResult, Figure, Status
from piper_owner.optimizer_wrap import OwnerOptimizer
from piper_owner.ownership import LayoutChoice

__all__ = ["check_order", "check_syncs", "step_without_syncs", "train_delayed"]

_LIMIT: Final = 60.0
_STEPS: Final = 4
_LAYOUTS: Final[tuple[LayoutChoice, ...]] = ("dense", "rows")
_ALLOWED: Final = {"dense": (0, 0), "rows": (1, 0)}
"""How often the host may wait, by rank: once where rows are looked up, to see whether one was missing."""


class _Pair:
    """One of two ranks that use a table: rank 0 looks rows of it up, rank 1 takes all of it."""

    def __init__(self, rank: Rank, layout: LayoutChoice) -> None:
        self.rank, self._sizes = rank, rank.sizes
        rows, columns = rank.sizes.order_rows, rank.sizes.owner_columns
        self.module = nn.ModuleDict()
        if rank.rank == 0:
            self.module["embed"] = nn.Embedding(rows, columns)
        else:
            self.module["head"] = nn.Linear(columns, rows, bias=False)
        value = torch.empty(rows, columns).normal_(0, 1, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            self.module.get_parameter(TIE[rank.rank]).copy_(value)
        self.module.to(rank.device)
        self.own = assign_over(rank.fabric, self.module, [TIE], layout=layout)
        self.optimizer = OwnerOptimizer(
            self.module.parameters(), torch.optim.Adam, ownership=self.own, lr=0.1, fused=True
        )

    def prefetch(self, step: int) -> None:
        """Fetch the rows of `step`, if it is rows that this rank keeps."""
        self.optimizer.prefetch(self._ids(step) if self.rank.rank == 0 else None)

    def backward(self, step: int) -> None:
        """Gradients that depend on the weights as they are now. No id comes twice: the bits are fixed."""
        if self.rank.rank == 0:
            rows: Tensor = self.module["embed"](self._ids(step).to(self.rank.device))
            rows.pow(2).sum().backward()
        else:
            (0.1 * (step + 1) * self.module.get_parameter(TIE[1]).pow(2)).sum().backward()

    def _ids(self, step: int) -> Tensor:
        rows = self._sizes.order_rows
        return torch.randperm(rows, generator=torch.Generator().manual_seed(step))[: rows // 2]

    def digest(self) -> str:
        """The weights' bits, where this rank has all of them; proves that copies are equal."""
        assert self.own.check()
        plan = self.own.plan[TIE[0]]
        if self.rank.rank in plan.row_replicas:
            return ""
        weight = self.module.get_parameter(TIE[self.rank.rank]).detach().cpu()
        return hashlib.sha256(weight.numpy().tobytes()).hexdigest()


def train_delayed(rank: Rank, layout: LayoutChoice, is_delayed: bool) -> str:
    """The digest of the weights after a few steps; `is_delayed`: each on another stream, which is held up.

    What a step has freed is overwritten at once, so memory that is given back too early shows.
    """
    pair = _Pair(rank, layout)
    streams = [torch.cuda.Stream(rank.device) for _ in range(2)] if is_delayed else []
    for step in range(_STEPS):
        stream = streams[step % 2] if streams else None
        if stream is not None:
            before = streams[(step + 1) % 2] if step else torch.cuda.default_stream(rank.device)
            stream.wait_stream(before)
        on_stream: AbstractContextManager[object] = (
            nullcontext() if stream is None else torch.cuda.stream(stream)
        )
        with on_stream:
            _hold_up(rank, is_delayed)
            pair.prefetch(step)
            _hold_up(rank, is_delayed)
            pair.backward(step)
            _hold_up(rank, is_delayed)
            pair.optimizer.step()
            pair.optimizer.zero_grad()
            if is_delayed:
                _overwrite(rank)
    if rank.is_cuda:
        torch.cuda.synchronize(rank.device)
    digest = pair.digest()
    pair.own.close()
    return digest


def _hold_up(rank: Rank, is_delayed: bool) -> None:
    if is_delayed:
        torch.cuda._sleep(rank.sizes.delay_cycles)


def _overwrite(rank: Rank) -> None:
    """Write on what the allocator has free for this stream: it does not wait for other streams."""
    shape = (rank.sizes.order_rows, rank.sizes.owner_columns)
    taken = [torch.full(shape, math.nan, device=rank.device) for _ in range(4)]
    del taken


def check_order(crew: Crew) -> Iterator[CheckResult]:
    """The same bits with delays on side streams as without."""
    wrong, figures = [], dict[str, Figure]()
    for layout in _LAYOUTS:
        plain = crew.run(2, train_delayed, layout, False, limit=_LIMIT)
        delayed = crew.run(2, train_delayed, layout, True, limit=_LIMIT)
        figures[f"{layout}_same_bits"] = plain == delayed
        if plain != delayed:
            wrong.append(f"{layout}: delays on side streams have changed the weights")
    yield CheckResult(
        name="stream order",
        status=Status.FAILED if wrong else Status.OK,
        reason="; ".join(wrong),
        shown="the same bits with delayed kernels on side streams, dense and rows",
        figures=figures,
    )


def step_without_syncs(rank: Rank, layout: LayoutChoice) -> int:
    """How often the host waited for the device in `opt.step()`, as torch's own debug mode counts it."""
    pair = _Pair(rank, layout)
    found: list[warnings.WarningMessage] = []
    for step in range(_STEPS):
        pair.prefetch(step)
        pair.backward(step)
        if rank.is_cuda and step == _STEPS - 1:  # by then all buffers are there
            torch.cuda.synchronize(rank.device)
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                # "error" would end a dense step at once; a step with rows is counted first.
                torch.cuda.set_sync_debug_mode("error" if layout == "dense" else "warn")
                try:
                    pair.optimizer.step()
                finally:
                    torch.cuda.set_sync_debug_mode("default")
        else:
            pair.optimizer.step()
        pair.optimizer.zero_grad()
    pair.digest()
    pair.own.close()
    return sum("called a synchronizing" in str(each.message) for each in found)


def check_syncs(crew: Crew) -> Iterator[CheckResult]:
    """No host sync in a step without clipping, but for one look of a rank with rows."""
    counts = {layout: crew.run(2, step_without_syncs, layout, limit=_LIMIT) for layout in _LAYOUTS}
    wrong = [
        f"{layout}: the host waited {ranks} times, by rank, and may {_ALLOWED[layout]}"
        for layout, ranks in counts.items()
        if any(count > most for count, most in zip(ranks, _ALLOWED[layout], strict=True))
    ]
    yield CheckResult(
        name="host syncs",
        status=Status.FAILED if wrong else Status.OK,
        reason="; ".join(wrong),
        shown=f"by rank, in a step without clipping: dense {counts['dense']}, rows {counts['rows']}",
        figures={
            f"{layout}_rank{rank}": count
            for layout, ranks in counts.items()
            for rank, count in enumerate(ranks)
        },
    )
