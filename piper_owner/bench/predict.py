"""What the planner says that a tie costs a training step, from what was measured without one. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from piper_owner.bench.config import BenchConfig, StepWay
from piper_owner.planning.balance import split_layers
from piper_owner.planning.compare import Comparison, compare_methods
from piper_owner.planning.config import Method, Optimizer, PlanConfig, Transfer
from piper_owner.planning.shapes import gpt_architecture, split_architecture

__all__ = ["PREDICTED", "Inputs", "inputs_from_json", "planned_exposed"]

PREDICTED: Final[Mapping[StepWay, tuple[Method, int]]] = {
    StepWay.DENSE: (Method.DENSE, 0),
    StepWay.DENSE_LAST: (Method.DENSE, 1),
    StepWay.ROWS: (Method.ROWS, 1),
}
"""The ways that are predicted: the planner's method, and the rank that owns."""

# AdamW reads weight and gradient, writes the weight, and reads and writes two moments.
_TABLES_MOVED: Final = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What the prediction is made from: medians of the same run, none of them of a run with a tie.

    forward_seconds, backward_seconds: of a microbatch of the untied pipeline, by stage.
    lookup_seconds, rows_lookup_seconds: the part of the first stage's backward that the embedding
        takes, with the whole table, and with a table of the rows in use.
    table_step_seconds: the optimizer's step of a whole table, untied.
    rate_bits_per_s: one large message, as it arrived. latency_seconds: a small one, one way.
    num_rows: different rows that a step looks up.
    """

    forward_seconds: tuple[float, float]
    backward_seconds: tuple[float, float]
    lookup_seconds: float
    rows_lookup_seconds: float
    table_step_seconds: float
    rate_bits_per_s: float
    latency_seconds: float
    num_rows: int


def planned_exposed(config: BenchConfig, inputs: Inputs) -> dict[StepWay, float]:
    """By way, the seconds by which a step with a barrier around it is to take longer than the untied one.

    Less than none where it is to be shorter: one copy is stepped less, or a backward makes no whole gradient.
    """
    whole = _compared(config, inputs, inputs.backward_seconds)
    first, last = inputs.backward_seconds
    saved = inputs.lookup_seconds - inputs.rows_lookup_seconds
    compact = _compared(config, inputs, (max(first - saved, first * 0.01), last))
    untied = whole.plans[Method.NAIVE].timing.step_seconds
    found = {}
    for way, (method, owner) in PREDICTED.items():
        plans = compact if method is Method.ROWS else whole
        found[way] = plans.tried[method, owner].timing.step_seconds - untied
    return found


def _compared(config: BenchConfig, inputs: Inputs, backward: tuple[float, float]) -> Comparison:
    train = config.train_config("dense")
    model = gpt_architecture(
        vocab=train.vocab,
        hidden=train.hidden,
        layers=train.layers,
        heads=train.heads,
        context=train.sequence_length,
    )
    counts = [len(layers) for layers in split_layers(train.layers, train.stages)]
    planned = PlanConfig(
        stages=train.stages,
        microbatches=train.microbatches,
        optimizer=Optimizer.ADAMW,
        dtype="float32",
        master_dtype=None,
        tokens=train.tokens_per_step,
        sequence=train.sequence_length,
        num_rows=inputs.num_rows,
        bandwidth=inputs.rate_bits_per_s / 8,
        latency=inputs.latency_seconds,
        memory_bandwidth=_TABLES_MOVED * 4 * train.vocab * train.hidden / inputs.table_step_seconds,
        stage_seconds=inputs.forward_seconds,
        backward_seconds=backward,
        barrier=True,
        chunk_bytes=train.chunk_bytes,
        transfer=Transfer.STREAMED,
    )
    return compare_methods(split_architecture(model, counts, name="gpt"), planned)


def inputs_from_json(value: Mapping[str, object]) -> Inputs:
    """The inputs that `dataclasses.asdict` gave, behind JSON, which has no tuples."""
    names = {field.name for field in dataclasses.fields(Inputs)}
    return Inputs(**{k: tuple(v) if isinstance(v, list) else v for k, v in value.items() if k in names})  # type: ignore[arg-type]
