"""Small texts that every rank of a group shows the others, and errors that all of them raise."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from piper_owner import errors
from piper_owner.errors import ExchangeError, PiperOwnerError
from piper_owner.steps import check_steps
from piper_owner.transport.base import Fabric, Group

__all__ = ["Agreement", "combine", "gather_texts", "in_call", "together"]


@contextmanager
def in_call(call: str) -> Iterator[None]:
    """Let an error of the exchange inside say that `call` is what waited. Local."""
    try:
        yield
    except ExchangeError as error:
        error.args = (f"{call}: {error}",)
        raise


def gather_texts(group: Group | None, rank: int, text: str) -> list[str]:
    """The text of every rank of `group`, in the order of its ranks. Collective.

    A group of None is this rank alone.
    """
    if group is None:
        return [text]
    mine = group.ranks.index(rank)
    data = text.encode()
    lengths = torch.zeros(len(group.ranks), dtype=torch.int64, device="cpu")
    lengths[mine] = len(data)
    group.all_reduce(lengths)
    # A sum in which each rank fills its own part and the others leave zeros.
    stops = lengths.cumsum(0)
    everything = torch.zeros(int(stops[-1]), dtype=torch.uint8, device="cpu")
    if data:
        everything[int(stops[mine]) - len(data) : int(stops[mine])] = torch.frombuffer(
            bytearray(data), dtype=torch.uint8
        )
    if everything.numel():
        group.all_reduce(everything)
    parts = torch.split(everything, lengths.tolist())
    return [part.numpy().tobytes().decode() for part in parts]


def together(group: Group | None, rank: int, work: Callable[[], str], *, who: str = "rank") -> list[str]:
    """Call `work` and show its text to every rank; `gather_texts` of what they answer. Collective.

    If it raises on any rank, every rank raises: the failing one its own error, the others one of
    the same class of the package, or an InputError, that says which rank failed (`who`
    names what the ranks of the group are). Nobody is left waiting.
    """
    failure: Exception | None = None
    try:
        answer = {"text": work()}
    except Exception as error:  # raised again below, once the others know
        failure = error
        is_ours = isinstance(error, PiperOwnerError)
        answer = {
            "error": type(error).__name__ if is_ours else "InputError",
            "text": str(error) if is_ours else f"{type(error).__name__}: {error}",
        }
    answers = [json.loads(text) for text in gather_texts(group, rank, json.dumps(answer))]
    if failure is not None:
        raise failure
    for index, other in enumerate(answers):
        if "error" in other:
            kind: type[PiperOwnerError] = getattr(errors, other["error"])
            failed = rank if group is None else group.ranks[index]
            raise kind(f"{who} {failed} failed: {other['text']}")
    return [other["text"] for other in answers]


def combine(
    group: Group | None, rank: int, value: float, step: int, *, largest: bool, who: str = "rank"
) -> float:
    """The sum, or the largest, of the `value` of every rank of `group`, added in ascending rank. Collective.

    Raises MessageMismatchError on every rank unless all of them are in the same `step`.
    """
    if group is None:
        return value
    mine = group.ranks.index(rank)
    everyone = torch.zeros(2, len(group.ranks), dtype=torch.float64, device="cpu")
    everyone[0, mine] = value
    everyone[1, mine] = step
    group.all_reduce(everyone)
    values: list[float] = everyone[0].tolist()
    steps: list[float] = everyone[1].tolist()
    check_steps(steps, group.ranks, who)
    if largest:
        return max(values) if not any(map(math.isnan, values)) else math.nan
    return sum(values)


class Agreement:
    """What the ranks of a pipeline agree on, and the pipelines beside it with them.

    `group` is the pipeline, None for one rank. `side` is None, or this rank's group across the
    pipelines; its ranks are the pipelines' numbers. All of a grid call the same methods in one order.
    """

    def __init__(self, group: Group | None, rank: int) -> None:
        self.group, self.rank = group, rank
        self.side: Group | None = None
        self.index = 0
        """This rank's pipeline."""
        self.background: threading.Thread | None = None
        """What these ranks do meanwhile, over another agreement (`again`)."""
        self._fabric: Fabric | None = None
        self._side_fabric: Fabric | None = None
        self._second: Agreement | None = None

    @classmethod
    def over(cls, fabric: Fabric, purpose: str = "agreement") -> Agreement:
        """That of all ranks of `fabric`, which is one pipeline. Collective."""
        ranks = tuple(range(fabric.world_size))
        made = cls(fabric.group(ranks, purpose) if len(ranks) > 1 else None, fabric.rank)
        made._fabric = fabric
        return made

    def widen(self, side: Group, fabric: Fabric) -> None:
        """From now on agree with the other pipelines too, over `side`, a group of all of `fabric`."""
        self.side, self.index, self._side_fabric = side, fabric.rank, fabric

    def again(self, purpose: str) -> Agreement:
        """A second one of the same ranks, over groups of its own, for another thread; always the same one.

        Collective where it is made: at the first call.
        """
        if self._second is None:
            made = (
                Agreement(None, self.rank) if self._fabric is None else Agreement.over(self._fabric, purpose)
            )
            side = self._side_fabric
            if side is not None:
                made.widen(side.group(tuple(range(side.world_size)), purpose), side)
            self._second = made
        return self._second

    def everyone(self, work: Callable[[], str]) -> list[list[str]]:
        """`work()` of every rank, by pipeline and rank; an error on one is raised on all. Collective."""
        if self.side is None:
            return [together(self.group, self.rank, work)]
        # First inside each pipeline, then between the same ranks of all: so everybody knows everything.
        texts = together(
            self.side,
            self.index,
            lambda: json.dumps(together(self.group, self.rank, work)),
            who="pipeline",
        )
        return [json.loads(text) for text in texts]

    def combine(self, value: float, step: int, *, largest: bool = False) -> float:
        """`combine` over the pipeline."""
        return combine(self.group, self.rank, value, step, largest=largest)

    def combine_pipelines(self, value: float, step: int, *, largest: bool = False) -> float:
        """`combine` of the same rank's values in all pipelines."""
        return combine(self.side, self.index, value, step, largest=largest, who="pipeline")

    def close(self) -> None:
        """Give the groups up. Twice is fine."""
        for group in (self.group, self.side):
            if group is not None:
                group.close()
        if self._second is not None:
            self._second.close()
