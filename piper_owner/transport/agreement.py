"""Small texts that every rank of a group shows the others, and errors that all of them raise."""

from __future__ import annotations

import json
from collections.abc import Callable

import torch

from piper_owner import errors
from piper_owner.errors import PiperOwnerError
from piper_owner.transport.base import Group

__all__ = ["gather_texts", "together"]


def gather_texts(group: Group | None, rank: int, text: str) -> list[str]:
    """The text of every rank of `group`, in the order of its ranks. Collective.

    A group of None is this rank alone.
    """
    if group is None:
        return [text]
    mine = group.ranks.index(rank)
    data = text.encode()
    lengths = torch.zeros(len(group.ranks), dtype=torch.int64)
    lengths[mine] = len(data)
    group.all_reduce(lengths)
    # A sum in which each rank fills its own part and the others leave zeros.
    stops = lengths.cumsum(0)
    everything = torch.zeros(int(stops[-1]), dtype=torch.uint8)
    if data:
        everything[int(stops[mine]) - len(data) : int(stops[mine])] = torch.frombuffer(
            bytearray(data), dtype=torch.uint8
        )
    if everything.numel():
        group.all_reduce(everything)
    parts = torch.split(everything, lengths.tolist())
    return [part.numpy().tobytes().decode() for part in parts]


def together(group: Group | None, rank: int, work: Callable[[], str]) -> list[str]:
    """Call `work` and show its text to every rank; `gather_texts` of what they answer. Collective.

    If it raises on any rank, every rank raises: the failing one its own error, the others one of
    the same class of the package, or an InputError, that says which rank failed. Nobody is left
    waiting.
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
            raise kind(f"rank {failed} failed: {other['text']}")
    return [other["text"] for other in answers]
