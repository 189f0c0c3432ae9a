"""Trace an annotated model, and cut it into one segment for each of its regions."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from piper_owner.executor.ports import StagePorts, stage_edges
from piper_owner.frontends.piper.analysis import analyse
from piper_owner.frontends.piper.capture import ONE_AT_A_TIME, capture
from piper_owner.frontends.piper.naming import name_parameters
from piper_owner.frontends.piper.regions import split_regions
from piper_owner.frontends.piper.segment import Segment, build_segment
from piper_owner.frontends.piper.wiring import wire
from piper_owner.ownership import Tie

__all__ = ["TracedModel", "trace"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedModel:
    """An annotated model as pipeline stages: stage i is the i-th region in trace order."""

    segments: tuple[Segment, ...]
    ports: tuple[StagePorts, ...]
    """By stage, what its forward takes and gives."""
    ties: tuple[Tie, ...]
    """Parameters with more than one name; the names in each stage are different, also for one layer that
    several stages share: `layer.weight`, `layer@PP1.weight`."""
    tags: tuple[dict[str, int], ...]
    """By stage, the numbers of its regions: {"PP": 0}, with other tags that hold for all of it."""
    lines: tuple[str, ...]
    """By stage, where its region begins: `file:line: code`."""
    dense: frozenset[str]
    """Weights that an nn.Embedding holds and whose rows are not known from the model's inputs alone."""

    outputs: tuple[tuple[int, ...], ...]
    """The shapes of the model's outputs."""

    @property
    def stage_edges(self) -> tuple[tuple[int, int], ...]:
        """The (earlier, later) pairs of stages between which values go."""
        return stage_edges(self.ports)


def trace(model: nn.Module, *inputs: Tensor, tag: str = "PP") -> TracedModel:
    """Cut `model` into its `tag` regions, as `model(*inputs)` runs through them. Local.

    Nothing is computed: meta tensors will do, and the model is as it was. The segments hold the model's
    own parameters and buffers, and are for inputs of these shapes, dtypes and device, in the mode
    (training or not) that the model is in.

    Raises TraceError, which names the line of the source, for a forward that is no fixed graph, and for
    regions that do not split it; and TieError for parameters that share memory without being one.
    """
    with ONE_AT_A_TIME:
        captured = capture(model, inputs, tag)
        facts = analyse(captured)
    split = split_regions(captured, facts, tag)
    wirings, ports = wire(captured, facts, split)
    names = name_parameters(model, captured, [wiring.uses for wiring in wirings], tag)
    built = [build_segment(model, captured, split, wiring, names) for wiring in wirings]
    return TracedModel(
        segments=tuple(segment for segment, _ in built),
        ports=ports,
        ties=names.ties,
        tags=tuple(dict(tags) for tags in split.tags),
        lines=tuple(entry.line for entry in split.regions),
        outputs=tuple(tuple(facts.values[node].shape) for node in captured.outputs),
        dense=frozenset(name for _, dense in built for name in dense),
    )
