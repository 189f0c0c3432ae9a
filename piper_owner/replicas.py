"""Makes every copy of a tie the owner's value before the first step, and proves it between steps."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from piper_owner.errors import ReplicaMismatchError
from piper_owner.sharding import local_of
from piper_owner.tied import TiedParameter, header_of
from piper_owner.transport.messages import Line
from piper_owner.transport.wire import Header, Phase

__all__ = ["Replicas", "largest_difference", "same_bits"]


class Replicas:
    """The copies of one rank's ties; arguments as for `exchange.Exchange`."""

    def __init__(self, rank: int, tied: Mapping[str, TiedParameter], lines: Mapping[int, Line]) -> None:
        self.rank, self.tied, self.lines = rank, tied, lines

    def share_values(self, *, from_owner: bool) -> list[str]:
        """Give every holder the value of the canonical name's holder, or the owner's. Collective.

        A copy that differed is overwritten; how it differed, in words.
        """
        differed = []
        for tie in self.tied.values():
            owner = tie.plan.owner
            source = tie.plan.source if tie.source is None else tie.source
            source = owner if from_owner or _keeps_rows(tie, source) else source
            if source != owner and self.rank == source:
                self._send_value(tie, owner)
            if source != owner and self.rank == owner:
                differed.append(self._take_value(tie, source))
            if self.rank == owner:
                for rank in tie.plan.copies:
                    if rank != source:
                        self._send_value(tie, rank)
            elif self.rank != source and self.rank in tie.plan.copies:
                differed.append(self._take_value(tie, owner))
        for line in self.lines.values():
            line.flush()
        return [message for message in differed if message is not None]

    def _send_value(self, tie: TiedParameter, peer: int) -> None:
        self.lines[peer].send(header_of(tie, Phase.VALUE, 0), local_of(tie.parameter))

    def _take_value(self, tie: TiedParameter, peer: int) -> str | None:
        """Overwrite this rank's copy; how it differed, in words, or None."""
        incoming = self.lines[peer].receive(header_of(tie, Phase.VALUE, 0))
        value = incoming.tensor(tie.parameter.device)
        assert value is not None
        copy = local_of(tie.parameter)
        if same_bits(value, copy):
            return None
        difference = 0.0 if tie.is_empty else largest_difference(value, copy)
        with torch.no_grad():
            copy.copy_(value)
        if tie.is_empty:
            tie.is_empty = False
            return None
        return (
            f"tie {tie.plan.tie.names}: the copy on rank {self.rank} differed from that of rank "
            f"{tie.plan.source} by up to {difference:g} before the first step; rank {tie.plan.source} "
            f"holds {tie.plan.name!r}, the tie's first name, so its value was taken"
        )

    def differences(self, step: int) -> dict[str, float]:
        """By tie, the largest difference of a replica to its owner, known to every holder. Collective."""
        return {name: self._difference(tie, step) for name, tie in self.tied.items()}

    def check(self, step: int) -> bool:
        """Whether every replica holds the owner's value, bit for bit. Collective over the holders.

        Raises ReplicaMismatchError, on every holder, with the largest difference of a tie.
        """
        # All ties before the first raise: the ranks of the next tie may be others.
        for name, difference in self.differences(step).items():
            plan = self.tied[name].plan
            if difference != 0.0:
                raise ReplicaMismatchError(
                    f"tie {plan.tie.names}: a replica differs from the owner, rank {plan.owner}, by up to "
                    f"{difference:g} after step {step} (ranks {plan.ranks}); something other than the "
                    "owner's step has written the weights"
                )
        return True

    def _difference(self, tie: TiedParameter, step: int) -> float:
        """The largest difference of a replica of `tie` to its owner, known to every holder."""
        value = header_of(tie, Phase.CHECK, step)
        verdict = Header(phase=Phase.CHECK, subject=tie.plan.name, step=step, dtype=torch.float64, shape=(1,))
        if self.rank != tie.plan.owner:
            line = self.lines[tie.plan.owner]
            mine = local_of(tie.parameter)
            if tie.rows is not None:
                mine = tie.rows.rows()
                value = header_of(tie, Phase.CHECK, step, num_rows=len(mine))
            theirs = line.receive(value).tensor(mine.device)
            assert theirs is not None
            worst = 0.0
            if not same_bits(theirs, mine):
                worst = largest_difference(theirs, mine)
            line.send(verdict, torch.tensor([worst], dtype=torch.float64, device="cpu"))
            answer = line.receive(verdict).tensor()
            assert answer is not None
            line.flush()
            return float(answer)
        lines = [self.lines[rank] for rank in tie.plan.replicas]
        for rank, line in zip(tie.plan.replicas, lines, strict=True):
            if _keeps_rows(tie, rank):
                rows = tie.parameter.detach().index_select(0, tie.served[rank].to(tie.parameter.device))
                line.send(header_of(tie, Phase.CHECK, step, num_rows=len(rows)), rows)
            else:
                line.send(value, local_of(tie.parameter))
        answers = [line.receive(verdict).tensor() for line in lines]
        worst = max((float(answer) for answer in answers if answer is not None), default=0.0)
        for line in lines:
            line.send(verdict, torch.tensor([worst], dtype=torch.float64, device="cpu"))
            line.flush()
        return worst


def _keeps_rows(tie: TiedParameter, rank: int) -> bool:
    """Whether `rank` has given up its copy of `tie` for rows."""
    return rank in tie.plan.row_replicas and (tie.rows is not None or rank in tie.served)


def same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two tensors of one dtype and shape are equal bit for bit."""
    return torch.equal(
        one.detach().contiguous().reshape(-1).view(torch.uint8),
        two.detach().contiguous().reshape(-1).view(torch.uint8),
    )


def largest_difference(one: torch.Tensor, two: torch.Tensor) -> float:
    """The largest absolute difference of two tensors that differ; infinite where one is not finite."""
    difference = (one.detach().double() - two.detach().double()).abs()
    # Not 0 for values such as 0.0 and -0.0, which differ in their bits alone.
    return float(difference.nan_to_num(nan=float("inf")).max()) or math.ulp(0.0)
