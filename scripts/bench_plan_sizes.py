"""Times planning at sizes that no test waits for: a million parameter names, and thousands of ranks.

python scripts/bench_plan_sizes.py --names 1000000 --ranks 4096
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import TypeVar

from piper_owner.ownership import ParameterUse, Use, plan_ownership
from piper_owner.planning.balance import split_layers
from piper_owner.planning.compare import compare_methods
from piper_owner.planning.config import PlanConfig
from piper_owner.planning.shapes import ModelShapes, gpt_architecture, split_architecture

T = TypeVar("T")


def timed(what: str, work: Callable[[], T]) -> T:
    """`work()`, with its seconds printed."""
    began = time.perf_counter()
    result = work()
    print(f"{time.perf_counter() - began:8.2f} s  {what}")
    return result


def ownership(names: int) -> None:
    """Plan who owns, of a model whose every parameter name is listed."""
    uses = [
        ParameterUse(name=f"layers.{i}.weight", rank=i % 8, stage=i % 8, shape=(8,), dtype="float32")
        for i in range(names - 2)
    ]
    for name, rank, use in (("embed.weight", 0, Use.LOOKUP), ("head.weight", 7, Use.DENSE)):
        uses.append(ParameterUse(name=name, rank=rank, stage=rank, shape=(8, 8), dtype="float32", use=use))
    timed(
        f"plan_ownership of {names:,} parameter names on 8 ranks",
        lambda: plan_ownership([("embed.weight", "head.weight")], uses, world_size=8, layout="auto"),
    )


def shapes(layers: int, stages: int) -> ModelShapes:
    """A GPT of many layers in many stages."""
    model = gpt_architecture(vocab=256_000, hidden=64, layers=layers, heads=4, context=128)
    return split_architecture(model, [len(held) for held in split_layers(layers, stages)], name="gpt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--names", type=int, default=1_000_000, help="parameter names (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=4096, help="ranks of a pipeline (default: %(default)s)")
    parser.add_argument("--microbatches", type=int, default=4, help="of a step (default: %(default)s)")
    options = parser.parse_args()
    ownership(options.names)
    layers = max(options.names // 11, 8)  # a layer of the GPT has eleven tensors
    model = shapes(layers, 8)
    config = PlanConfig(stages=8, microbatches=options.microbatches, tokens=1024, num_rows=500)
    timed(
        f"all methods for {layers:,} layers, {layers * 11:,} names, on 8 ranks",
        lambda: compare_methods(model, config),
    )
    wide = shapes(options.ranks, options.ranks)
    config = PlanConfig(stages=options.ranks, microbatches=options.microbatches, tokens=1024, num_rows=500)
    timed(
        f"all methods for {options.ranks:,} ranks, {options.microbatches} microbatches",
        lambda: compare_methods(wide, config),
    )


if __name__ == "__main__":
    main()
