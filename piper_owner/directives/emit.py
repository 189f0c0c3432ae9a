"""From a TrainingDAG to the directives that give it back, and from directives to JSON."""

from __future__ import annotations

import json
from typing import Final, assert_never

from piper_owner.dag.graph import TrainingDAG
from piper_owner.dag.nodes import Compute, ComputeKind
from piper_owner.directives.model import (
    MICROBATCH_TAG,
    Directive,
    Filter,
    Order,
    Pass,
    Place,
    Program,
    Replicate,
    Split,
    directive_json,
)

__all__ = ["emit_program", "format_program"]

_STREAM: Final = "pp_stream"
_REDUCE_STREAM: Final = "dp_stream"


def emit_program(dag: TrainingDAG, *, num_pipelines: int | None = None, tag: str = "PP") -> Program:
    """The directives that `lower_program` turns into the computes of `dag`, rank by rank.

    A `place` for each stage, annotated `tag` and its number; `replicate` for each where there are
    several pipelines; one `split`; and for each rank one `order` that lists its computes one by one.
    Device `p * num_ranks + r` is rank r of pipeline p; `num_pipelines` None means those of `dag`. A
    rank that computes nothing is not named, and so missing after lowering. Other actions than
    computes are left out. Pure and local.
    """
    count = dag.num_pipelines if num_pipelines is None else num_pipelines
    directives: list[Directive] = []
    stages = [Filter(tags=((tag, stage),)) for stage in range(dag.num_stages)]
    groups = [tuple(rank + p * dag.num_ranks for p in range(count)) for rank in range(dag.num_ranks)]
    for stage, rank in zip(stages, dag.placement, strict=True):
        directives.append(Place(filter=stage, devices=groups[rank], stream=_STREAM))
    if count > 1:
        for stage, rank in zip(stages, dag.placement, strict=True):
            directives.append(Replicate(filter=stage, devices=groups[rank], reduce_stream=_REDUCE_STREAM))
    directives.append(Split(filter=Filter(), num_microbatches=dag.num_microbatches))
    for program in dag.programs:
        computes = [action for action in program if isinstance(action, Compute)]
        if computes:
            directives.append(Order(groups=tuple((_filter(action, tag),) for action in computes)))
    return Program(directives=tuple(directives))


def _filter(action: Compute, tag: str) -> Filter:
    tags = sorted([(tag, action.stage), (MICROBATCH_TAG, action.microbatch)])
    return Filter(tags=tuple(tags), part=_part(action.kind))


def _part(kind: ComputeKind) -> Pass:
    match kind:
        case ComputeKind.FORWARD:
            return Pass.FORWARD
        case ComputeKind.BACKWARD:
            return Pass.BACKWARD
        case ComputeKind.BACKWARD_INPUT:
            return Pass.BACKWARD_INPUT
        case ComputeKind.BACKWARD_WEIGHT:
            return Pass.BACKWARD_WEIGHT
        case _:
            assert_never(kind)


def format_program(program: Program) -> str:
    """The program as JSON that parses back, ending in a newline: one directive a line.

    The groups of an order stand each on a line of their own.
    """
    lines = []
    for directive in program.directives:
        value = directive_json(directive)
        if isinstance(directive, Order):
            groups = ",\n".join(f"    {json.dumps(group)}" for group in value["filters"])
            lines.append(f'  {{"op": "order", "filters": [\n{groups}\n  ]}}')
        else:
            lines.append(f"  {json.dumps(value)}")
    return "[\n" + ",\n".join(lines) + "\n]\n" if lines else "[]\n"
