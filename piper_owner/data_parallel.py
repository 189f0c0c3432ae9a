"""One tie in several equal pipelines that train on other data: averages, and one owner for all.

The pipelines stand side by side; the same rank of each makes up a data parallel group, whose ranks
are the pipelines' numbers, and the one with the number 0 is in the lead pipeline. A gradient's mean
over the pipelines counts a share that is None as zeros, unless all of them are None, as
DistributedDataParallel does with `find_unused_parameters`.

- `Scope.PIPELINE`: in each pipeline the owner combines the gradient, then the owners average it,
  chunk by chunk as it comes in, and every owner takes the same step.
- `Scope.GLOBAL`: the holders of each rank average their share to the lead pipeline; the exchange
  and the step happen there alone; each of its holders hands the weights to the other pipelines.

Cannot deadlock. Sends between two ranks of a pipeline do not wait. Globally, a rank first reduces all
its ties in plan order: those of one data parallel group hold the same ties, so they do so in one
order, and none of them waits for anything else before. Then comes the exchange of the lead pipeline,
which needs nothing of the others. Last come the broadcasts, in plan order, by ranks that wait for
nothing any more. With an owner per pipeline, the owners of one group reach the mean of a tie, in plan order,
when all ranks have sent their gradients, so that what each waits for in between is on its way.

gloo checks no sizes, so every tensor is covered by a header that all members show one another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

import torch

from piper_owner.errors import ExchangeError, MessageMismatchError
from piper_owner.ownership import Scope
from piper_owner.replicas import largest_difference, same_bits
from piper_owner.tied import TiedParameter, header_of, rows_of, take_grad, wide_dtype
from piper_owner.transport import BytesSent, Fabric, Header, Phase
from piper_owner.transport.wire import HEADER_BYTES, rows_per_chunk

__all__ = ["DataParallel", "SideGroup"]

_LEAD: Final = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SideGroup:
    """A rank's data parallel group: a fabric whose ranks are pipelines, and their ranks in the job."""

    fabric: Fabric
    ranks: tuple[int, ...] | None = None


class DataParallel:
    """This rank's side of the ties in other pipelines.

    rank: this rank in its pipeline, which is the same in all pipelines of `side`.
    The methods are collective over `side`, with the same ties in the same order.
    """

    def __init__(self, side: SideGroup, rank: int, scope: Scope, *, chunk_bytes: int) -> None:
        fabric = side.fabric
        self.rank, self.scope, self.ranks = rank, scope, side.ranks
        self.index, self.size = fabric.rank, fabric.world_size
        self.sent = BytesSent()
        """What this rank sent since it was last set, in chains, rings and trees as gloo does."""
        self.received = BytesSent()
        """What its peers sent it in the same way."""
        self._chunk_bytes = chunk_bytes
        self._group = fabric.group(tuple(range(self.size)), "tied")

    @property
    def is_lead(self) -> bool:
        """Whether this rank is in the lead pipeline."""
        return self.index == _LEAD

    @property
    def is_global(self) -> bool:
        """Whether the lead pipeline steps for all."""
        return self.scope is Scope.GLOBAL

    @property
    def is_follower(self) -> bool:
        """Whether no rank of this pipeline owns a tie."""
        return self.is_global and not self.is_lead

    # -- a step

    def reduce_grad(self, tie: TiedParameter, step: int) -> None:
        """Average this rank's share over the pipelines, into `wide_grad` in the lead pipeline.

        `.grad` is None afterwards. Where DistributedDataParallel has averaged it, it stays in the lead.
        """
        grad, tie.parameter.grad = take_grad(tie), None
        header = self._header(tie, Phase.GRAD, step, present=grad is not None)
        if not any(self._announce(header)):
            return
        if tie.is_averaged:
            tie.parameter.grad = grad if self.is_lead else None
            return
        whole = None
        if self.is_lead:
            whole = torch.empty_like(
                tie.parameter, dtype=header.dtype, memory_format=torch.contiguous_format, requires_grad=False
            )
        for start, stop in replace(header, present=True).ranges():
            chunk = self._staged(tie, grad, start, stop, header.dtype)
            with self._naming(header):
                self._group.reduce(chunk, _LEAD)
            if self.index + 1 < self.size:
                self.received += BytesSent(grads=chunk.nbytes)
            if whole is None:
                self.sent += BytesSent(grads=chunk.nbytes)
            else:
                rows = rows_of(whole)[start:stop]
                rows.copy_(chunk.div_(self.size).view_as(rows))
        tie.wide_grad = whole

    def agree_on_change(self, tie: TiedParameter, step: int) -> None:
        """Make sure that the tie is frozen, or thawed, in every pipeline before the same step."""
        self._announce(self._header(tie, Phase.FREEZE, step, present=tie.is_live))

    def agree(self, tie: TiedParameter, step: int, *, present: bool) -> bool:
        """Whether any pipeline has a gradient of `tie`; then `average` of each chunk follows."""
        return any(self._announce(self._header(tie, Phase.GRAD, step, present=present)))

    def average(self, tie: TiedParameter, step: int, rows: torch.Tensor) -> torch.Tensor:
        """The mean of `rows` over the pipelines, the same bits on each; `rows` stays as it is."""
        mean = rows.detach().to("cpu", wide_dtype(tie), copy=True).contiguous()
        with self._naming(self._header(tie, Phase.GRAD, step)):
            self._group.all_reduce(mean)
        self.sent += BytesSent(grads=2 * mean.nbytes * (self.size - 1) // self.size)
        self.received += BytesSent(grads=2 * mean.nbytes * (self.size - 1) // self.size)
        return mean.div_(self.size).to(rows.device)

    def spread_weight(self, tie: TiedParameter, step: int) -> None:
        """Give the new weights of the lead pipeline, if it has stepped, to this rank in the others."""
        updated = tie.is_updated and self.is_lead
        header = self._header(tie, Phase.WEIGHT, step, present=updated)
        if not self._announce(header)[_LEAD]:
            return
        rows = rows_of(tie.parameter)
        for start, stop, chunk in self._values(tie, header):
            if not self.is_lead:
                rows[start:stop].copy_(chunk)
                self.received += BytesSent(weights=chunk.nbytes)
            self.sent += BytesSent(weights=chunk.nbytes * self._num_children())

    # -- between steps

    def share_values(self, tied: Mapping[str, TiedParameter]) -> dict[str, str]:
        """Give every copy the lead pipeline's value; by tie, how this rank's differed, in words."""
        differed = {}
        for name, tie in self._copies(tied):
            worst = 0.0
            rows = rows_of(tie.parameter)
            for start, stop, chunk in self._checked_values(tie, Phase.VALUE, 0):
                if not same_bits(chunk, rows[start:stop]):
                    worst = max(worst, largest_difference(chunk, rows[start:stop]))
                    rows[start:stop].copy_(chunk)
            is_empty, tie.is_empty = tie.is_empty, False
            if worst and not is_empty:
                differed[name] = (
                    f"tie {tie.plan.tie.names}: the copy of rank {self.rank} of pipeline {self.index} "
                    f"differed from that of pipeline {_LEAD} by up to {worst:g} before the first step; the "
                    f"value of pipeline {_LEAD} was taken"
                )
        return differed

    def differences(self, tied: Mapping[str, TiedParameter], step: int) -> dict[str, float]:
        """By tie, the largest difference of this rank's copy to the lead pipeline's."""
        found = {}
        for name, tie in self._copies(tied):
            rows, worst = rows_of(tie.parameter), 0.0
            for start, stop, chunk in self._checked_values(tie, Phase.CHECK, step):
                if not same_bits(chunk, rows[start:stop]):
                    worst = max(worst, largest_difference(chunk, rows[start:stop]))
            found[name] = worst
        return found

    def close(self) -> None:
        """Give the group up. Twice is fine."""
        self._group.close()

    # -- inside

    def _copies(self, tied: Mapping[str, TiedParameter]) -> list[tuple[str, TiedParameter]]:
        """The ties of which this rank keeps the whole, or is to keep it: rows differ among pipelines."""
        return [(name, tie) for name, tie in tied.items() if self.rank not in tie.plan.row_replicas]

    def _checked_values(
        self, tie: TiedParameter, phase: Phase, step: int
    ) -> Iterator[tuple[int, int, torch.Tensor]]:
        header = self._header(tie, phase, step)
        self._announce(header)
        yield from self._values(tie, header)

    @torch.no_grad()
    def _values(self, tie: TiedParameter, header: Header) -> Iterator[tuple[int, int, torch.Tensor]]:
        """(start, stop, the lead's rows on this rank's device) of each chunk."""
        rows = rows_of(tie.parameter)
        for start, stop in replace(header, present=True).ranges():
            mine = rows[start:stop]
            if self.is_lead:
                chunk = mine.to("cpu", copy=True).contiguous()
            else:
                chunk = torch.empty(mine.shape, dtype=header.dtype, device="cpu")
            with self._naming(header):
                self._group.broadcast(chunk.view(-1).view(torch.uint8), _LEAD)  # gloo lacks some dtypes
            yield start, stop, chunk.to(mine.device)

    def _num_children(self) -> int:
        """To how many members this one passes a broadcast on, in a binomial tree below the lead."""
        lowest_bit = self.index & -self.index if self.index else 1 << self.size.bit_length()
        reach = (self.index + (1 << bit) for bit in range(lowest_bit.bit_length() - 1))
        return sum(child < self.size for child in reach)

    def _staged(
        self, tie: TiedParameter, grad: torch.Tensor | None, start: int, stop: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """A copy of rows of `grad`, or zeros: nothing is added up in the gradient's own memory."""
        if grad is None:
            return torch.zeros(rows_of(tie.parameter)[start:stop].shape, dtype=dtype, device="cpu")
        return rows_of(grad)[start:stop].to("cpu", dtype, copy=True).contiguous()

    def _header(self, tie: TiedParameter, phase: Phase, step: int, *, present: bool = True) -> Header:
        header = header_of(tie, phase, step)
        dtype = wide_dtype(tie) if phase is Phase.GRAD else header.dtype
        rows = rows_per_chunk(header.shape, dtype.itemsize, self._chunk_bytes)
        return replace(header, dtype=dtype, chunk_rows=rows, present=present)

    def _announce(self, header: Header) -> list[bool]:
        """Show `header` to all members, and check theirs; which of them have a payload."""
        everyone = torch.zeros(self.size, HEADER_BYTES, dtype=torch.uint8, device="cpu")
        everyone[self.index] = header.encode()
        with self._naming(header):
            self._group.all_reduce(everyone)
        self.sent += BytesSent(other=2 * everyone.nbytes * (self.size - 1) // self.size)
        self.received += BytesSent(other=2 * everyone.nbytes * (self.size - 1) // self.size)
        found = []
        try:
            for other, raw in enumerate(everyone):
                where = f"{self._where(header)}, from pipeline {other}"
                theirs = Header.decode(raw, where)
                theirs.check(header, where)
                if theirs.chunk_rows != header.chunk_rows:
                    raise MessageMismatchError(
                        f"{where}: chunks of {theirs.chunk_rows} rows, expected {header.chunk_rows}; every "
                        "pipeline runs the same version with the same chunk_bytes"
                    )
                found.append(theirs.present)
        except MessageMismatchError:
            self.close()
            raise
        return found

    def _where(self, header: Header) -> str:
        return (
            f"{header.phase.value} of {header.subject!r} between rank {self.rank} of the pipelines 0 to "
            f"{self.size - 1}, step {header.step}"
        )

    @contextmanager
    def _naming(self, header: Header) -> Iterator[None]:
        """Say which message an exchange error broke, and what its ranks are."""
        try:
            yield
        except ExchangeError as error:
            error.args = (
                f"{self._where(header)} (here a rank is a pipeline, this one is {self.index}): {error}. "
                "Every pipeline takes the same steps with the same ties",
            )
            raise
