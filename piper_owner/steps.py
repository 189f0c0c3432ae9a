"""The step in which each rank of a sum is, so that ranks that have drifted apart raise and do not go on.

Every member of a sum has a place of its own behind what is summed, in which the others have zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from piper_owner.errors import MessageMismatchError

__all__ = ["DIGITS", "check_digits", "check_steps", "digits_of"]

DIGITS: Final = 4
"""How many numbers a step takes where a sum is too narrow for it."""
_BASE: Final = 256  # bfloat16 has all integers up to this one


def check_steps(steps: Sequence[float], ranks: Sequence[int], who: str = "rank") -> None:
    """Raise MessageMismatchError unless all of `steps`, those of `ranks`, are the same one.

    `who` names what `ranks` are. All ranks see the same steps, so all of them raise.
    """
    if len(set(steps)) > 1:
        where = ", ".join(f"{who} {rank} in {int(step)}" for rank, step in zip(ranks, steps, strict=True))
        raise MessageMismatchError(
            f"the {who}s are in different steps: {where}. All of them take or skip a step together: "
            "decide by what is equal on each, such as the norm that clip_grad_norm_ returns"
        )


def digits_of(step: int, place: int, size: int) -> list[int]:
    """`step` at `place` of `size`, in numbers that every floating point type has; the rest are zeros."""
    everyone = [0] * (size * DIGITS)
    everyone[place * DIGITS : (place + 1) * DIGITS] = [step // _BASE**i % _BASE for i in range(DIGITS)]
    return everyone


def check_digits(sums: Sequence[float], ranks: Sequence[int], who: str = "rank") -> None:
    """`check_steps` of the sum of what `digits_of` gave on each of `ranks`."""
    parts = [sums[place * DIGITS : (place + 1) * DIGITS] for place in range(len(ranks))]
    check_steps([sum(digit * _BASE**i for i, digit in enumerate(part)) for part in parts], ranks, who)
