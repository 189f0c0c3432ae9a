"""Which values enter and leave each stage of a pipeline: the wiring between its modules. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from piper_owner.errors import ConfigError

__all__ = ["StagePorts", "ValueSource", "chain_ports", "crossing_values", "stage_edges"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueSource:
    """Where a value that enters a stage comes from: output `index` of `stage`.

    With `stage` None it is input `index` of the model, which every rank has without a message.
    """

    index: int
    stage: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePorts:
    """What the module of one stage takes and gives.

    `inputs` are the positional arguments of its forward, in order, at least one. With one output
    the forward returns a tensor, with more a tuple of tensors. `ids` are the inputs of the model, by
    index, by which the stage looks rows up: integers that are known before the step.
    """

    inputs: tuple[ValueSource, ...]
    num_outputs: int = 1
    ids: tuple[int, ...] = ()


def chain_ports(num_stages: int) -> tuple[StagePorts, ...]:
    """The ports of an ordinary pipeline: each stage takes the one output of the stage before it.

    The first takes the model's only input, by which it looks rows up.
    """
    first = StagePorts(inputs=(ValueSource(index=0),), ids=(0,))
    later = (StagePorts(inputs=(ValueSource(index=0, stage=stage - 1),)) for stage in range(1, num_stages))
    return (first, *later)


def crossing_values(ports: Sequence[StagePorts]) -> dict[tuple[int, int], tuple[int, ...]]:
    """For each (earlier stage, later stage), ascending: which outputs of the one enter the other.

    Raises ConfigError for a value that its stage does not make, or that comes from the same stage
    or a later one.
    """
    crossing: dict[tuple[int, int], set[int]] = {}
    for late, port in enumerate(ports):
        if not port.inputs:
            raise ConfigError(f"stage {late} takes no value; a stage reads another one, or the model's input")
        for value in port.inputs:
            early = value.stage
            if early is None:
                continue
            if not 0 <= early < late or not 0 <= value.index < ports[early].num_outputs:
                raise ConfigError(
                    f"stage {late} takes output {value.index} of stage {early}, which is not made before it; "
                    "a value goes from a stage to one with a higher number"
                )
            crossing.setdefault((early, late), set()).add(value.index)
    return {edge: tuple(sorted(crossing[edge])) for edge in sorted(crossing)}


def stage_edges(ports: Sequence[StagePorts]) -> tuple[tuple[int, int], ...]:
    """The (earlier stage, later stage) pairs between which values go, ascending; see `crossing_values`."""
    return tuple(crossing_values(ports))
