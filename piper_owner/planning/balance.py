"""How many consecutive layers each stage of a pipeline gets."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache

from piper_owner.errors import ConfigError

__all__ = ["layer_counts", "split_layers"]


def layer_counts(
    costs: Sequence[int], num_stages: int, *, head: int, chosen: Sequence[int] | None = None
) -> tuple[int, ...]:
    """How many layers each stage gets, in order: `chosen` if it can be, else balanced.

    costs: of each layer, in any unit; `head` is what the last stage costs beside its layers.
    Balanced means that the costliest stage costs least and, among such divisions, that the sum
    of squares is least. Only the first and the last stage may have no layer.

    Raises ConfigError for too few or too many stages, or a `chosen` that does not fit.
    """
    total = len(costs)
    if not 1 <= num_stages <= total + 2:
        raise ConfigError(
            f"num_stages is {num_stages}; a model of {total} layers makes 1 to {total + 2} stages (the first "
            "may hold only the embedding, the last only norm and head)"
        )
    if chosen is None:
        return _balance(costs, head, num_stages)
    counts = tuple(chosen)
    if len(counts) != num_stages or sum(counts) != total or min(counts) < 0 or 0 in counts[1:-1]:
        raise ConfigError(
            f"layers_per_stage={list(counts)} does not give {total} layers to {num_stages} stages; only the "
            "first and the last may have none"
        )
    return counts


def _balance(costs: Sequence[int], head: int, num_stages: int) -> tuple[int, ...]:
    before = [0, *itertools.accumulate(costs)]

    @cache
    def best(stage: int, start: int) -> tuple[int, int, tuple[int, ...]] | None:
        """(largest cost, sum of squares, counts) of the stages from `stage` on, from layer `start`."""
        if stage == num_stages - 1:
            cost = before[-1] - before[start] + head
            return cost, cost * cost, (len(costs) - start,)
        found = []
        for stop in range(start if stage == 0 else start + 1, len(costs) + 1):
            rest = best(stage + 1, stop)
            if rest is not None:
                cost = before[stop] - before[start]
                found.append((max(cost, rest[0]), cost * cost + rest[1], (stop - start, *rest[2])))
        return min(found, default=None)

    chosen = best(0, 0)
    assert chosen is not None, "up to two stages more than layers, some division fits"
    return chosen[2]


def split_layers(num_layers: int, num_stages: int) -> tuple[range, ...]:
    """Which layers each stage holds: contiguous, in order, as even as can be.

    Layers that are left over go to the stages between the first and the last, which have no
    embedding or head to compute, then to the first, whose lookup is cheap, then to the last. So
    only the first and last stage may be without a layer.

    Raises ConfigError when a stage between them would be.
    """
    if num_stages < 1:
        raise ConfigError(f"num_stages={num_stages}: a pipeline has at least 1 stage")
    if num_layers < max(num_stages - 2, 0):
        raise ConfigError(
            f"{num_layers} layers over {num_stages} stages: every stage between the embedding's and the "
            f"head's needs a layer; give at least {num_stages - 2} layers, or fewer stages"
        )
    each, left_over = divmod(num_layers, num_stages)
    takers = [*range(1, num_stages - 1), 0, num_stages - 1][:left_over]
    ranges = []
    start = 0
    for stage in range(num_stages):
        end = start + each + (stage in takers)
        ranges.append(range(start, end))
        start = end
    return tuple(ranges)
