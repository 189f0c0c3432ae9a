"""What each segment computes, what enters and leaves it, and which parameters it uses, and how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx, nn

from piper_owner.errors import TraceError
from piper_owner.executor.ports import StagePorts, ValueSource
from piper_owner.frontends.piper.analysis import Facts
from piper_owner.frontends.piper.capture import Captured
from piper_owner.frontends.piper.naming import ParameterUse, Uses, lookup_of, sources_of_ids
from piper_owner.frontends.piper.regions import Split
from piper_owner.frontends.piper.source_lines import line_of

__all__ = ["Wiring", "wire"]


@dataclass(slots=True, kw_only=True)
class Wiring:
    """One segment, still as nodes of the whole graph."""

    number: int
    nodes: list[fx.Node] = field(default_factory=list)
    """Its operations in the order of the trace, with copies of the free ones that it needs."""
    inputs: list[fx.Node] = field(default_factory=list)
    """Placeholders of the model's inputs first, then values of earlier segments."""
    outputs: list[fx.Node] = field(default_factory=list)
    uses: list[ParameterUse] = field(default_factory=list)
    others: list[fx.Node] = field(default_factory=list)
    """Placeholders of buffers and other tensors that it uses."""


def wire(captured: Captured, facts: Facts, split: Split) -> tuple[tuple[Wiring, ...], tuple[StagePorts, ...]]:
    """The wiring of all segments, and their ports. Local.

    The last segment gives the outputs of the model, and hands on those that an earlier one makes.
    Raises TraceError for a region whose values nobody uses, and for complex values that cross.
    """
    segments = tuple(Wiring(number=number) for number in range(len(split.regions)))
    order = {node: index for index, node in enumerate(captured.graph.nodes)}
    for segment in segments:
        wanted = list(captured.outputs) if segment is segments[-1] else []
        _collect(segment, wanted, captured, split, order)
    _connect(segments, captured, split, order)
    _check_dtypes(segments, facts, split)
    for segment in segments:
        segment.uses.extend(_uses_of(segment, captured, facts))
        if not segment.outputs:
            raise TraceError(
                f"{split.regions[segment.number].line}: no later region and no output of the model uses what "
                f"{split.tag} region {segment.number} computes; take it away, or use its result"
            )
    _check_tensors(captured, facts)
    return segments, tuple(_ports_of(segment, segments, captured, split) for segment in segments)


def _collect(
    segment: Wiring,
    wanted: Sequence[fx.Node],
    captured: Captured,
    split: Split,
    order: Mapping[fx.Node, int],
) -> None:
    """Find the operations of `segment`, and everything that they take from outside."""
    own = [node for node, region in split.region_of.items() if region == segment.number]
    nodes, outside = set(own), set()
    pending = [*wanted, *(source for node in own for source in node.all_input_nodes)]
    while pending:
        node = pending.pop()
        if node in nodes or node in outside:
            continue
        if node.op != "placeholder" and split.region_of[node] is None:
            nodes.add(node)
            pending.extend(node.all_input_nodes)
        elif node.op == "placeholder" or split.region_of[node] != segment.number:
            outside.add(node)
    segment.nodes = sorted(nodes, key=order.__getitem__)
    given = sorted(outside, key=lambda node: (captured.inputs.get(node, len(captured.inputs)), order[node]))
    for node in given:
        if node.op != "placeholder" or node in captured.inputs:
            segment.inputs.append(node)
        elif not isinstance(captured.tensors[node], nn.Parameter):
            segment.others.append(node)
    if segment.number == len(split.regions) - 1:
        segment.outputs = list(captured.outputs)


def _connect(
    segments: Sequence[Wiring], captured: Captured, split: Split, order: Mapping[fx.Node, int]
) -> None:
    """Let every segment give what later ones take; one that takes nothing gets an input of the model."""
    for segment in segments:
        for node in segment.inputs:
            region = split.region_of.get(node)
            if region is not None and node not in segments[region].outputs:
                segments[region].outputs.append(node)
        if not segment.inputs:
            segment.inputs.extend(sorted(captured.inputs, key=captured.inputs.__getitem__)[:1])
    for segment in segments[:-1]:
        segment.outputs.sort(key=order.__getitem__)


def _check_dtypes(segments: Sequence[Wiring], facts: Facts, split: Split) -> None:
    """Complex numbers stay inside a stage: a message has no word for them, nor do they get a gradient."""
    for segment in segments:
        for node in segment.inputs:
            region, value = split.region_of.get(node), facts.values[node]
            if region is not None and isinstance(value, torch.Tensor) and value.is_complex():
                dtype = str(value.dtype).removeprefix("torch.")
                raise TraceError(
                    f"{line_of(node)}: {split.tag} region {segment.number} takes a {dtype} tensor that "
                    f"region {region} makes; between stages go real numbers: hand on torch.view_as_real "
                    "of it, and take torch.view_as_complex of that"
                )


def _check_tensors(captured: Captured, facts: Facts) -> None:
    for node in captured.outputs:
        if node.op != "placeholder" and not isinstance(facts.values[node], torch.Tensor):
            raise TraceError("an output of the model is no tensor")


def _uses_of(segment: Wiring, captured: Captured, facts: Facts) -> list[ParameterUse]:
    found = []
    for node in segment.nodes:
        lookup = lookup_of(node)
        for source in node.all_input_nodes:
            if not isinstance(captured.tensors.get(source), nn.Parameter):
                continue
            if lookup is None or lookup.weight is not source or lookup.ids is source:
                found.append(ParameterUse(parameter=source, node=node, uses=Uses.WHOLE))
                continue
            known = sources_of_ids(lookup.ids, captured, facts)
            found.append(
                ParameterUse(
                    parameter=source,
                    node=node,
                    uses=Uses.ROWS if known is None else Uses.KNOWN_ROWS,
                    lookup=lookup,
                    inputs=known or frozenset(),
                )
            )
    for node in segment.outputs:
        if isinstance(captured.tensors.get(node), nn.Parameter):
            found.append(ParameterUse(parameter=node, node=None, uses=Uses.WHOLE))
    return found


def _ports_of(segment: Wiring, segments: Sequence[Wiring], captured: Captured, split: Split) -> StagePorts:
    sources = []
    for node in segment.inputs:
        region = split.region_of.get(node)
        if region is None:
            sources.append(ValueSource(index=captured.inputs[node]))
        else:
            sources.append(ValueSource(index=segments[region].outputs.index(node), stage=region))
    ids = {index for use in segment.uses for index in use.inputs}
    return StagePorts(inputs=tuple(sources), num_outputs=len(segment.outputs), ids=tuple(sorted(ids)))
