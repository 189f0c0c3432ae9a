"""Which rank runs which stage."""

from __future__ import annotations

import enum

from piper_owner.errors import ConfigError

__all__ = ["Placement", "place_stages"]


class Placement(enum.Enum):
    """Round and round the ranks, or down them and up again."""

    LOOP = "loop"
    V = "v"


def place_stages(num_stages: int, num_ranks: int, placement: Placement) -> tuple[int, ...]:
    """The rank of each stage; any number of stages.

    LOOP: 0, 1, .., D-1, 0, 1, ..  V: 0, 1, .., D-1, D-1, .., 1, 0, 0, 1, ..

    Raises ConfigError without at least one stage and one rank.
    """
    if num_stages < 1 or num_ranks < 1:
        raise ConfigError(f"{num_stages} stages on {num_ranks} ranks: at least one of each is needed")
    match placement:
        case Placement.LOOP:
            return tuple(stage % num_ranks for stage in range(num_stages))
        case Placement.V:
            # Each pass over the ranks turns back at its end.
            turns = (divmod(stage, num_ranks) for stage in range(num_stages))
            return tuple(num_ranks - 1 - step if turn % 2 else step for turn, step in turns)
