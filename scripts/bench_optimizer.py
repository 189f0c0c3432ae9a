#!/usr/bin/env python3
"""Time a step of OwnerOptimizer on a rank without ties against the bare optimizer.

A model of many small parameters, where the optimizer's own work is least. Both step the same shapes
in turn, round after round; the figures are medians of the rounds, each the mean of its steps.

    scripts/bench_optimizer.py                     fused AdamW over 1, 100 and 400 parameters
    scripts/bench_optimizer.py --parameters 1000 --rounds 101 --limit-us 20

With --limit-us it fails (1) if OwnerOptimizer costs more than that over the bare one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn

from piper_owner.assignment import assign_over
from piper_owner.executor.local import run_threads
from piper_owner.optimizer_wrap import OwnerOptimizer
from piper_owner.transport import Fabric

TIES = (("embed.weight", "head.weight"),)
TIMEOUT = timedelta(seconds=60)


def main() -> int:
    """Run the benchmark and print its table."""
    options = parse_options()
    torch.set_num_threads(1)
    rows = []
    print(f"{'parameters':>10} {'bare us':>9} {'owner us':>9} {'more us':>8} {'ratio':>6}")
    for number in options.parameters:
        bare, owner = measure(number, options)
        row = {"parameters": number, "bare_us": bare, "owner_us": owner, "more_us": owner - bare}
        rows.append(row)
        print(f"{number:>10} {bare:>9.1f} {owner:>9.1f} {owner - bare:>8.1f} {owner / bare:>6.3f}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    too_slow = [row for row in rows if options.limit_us is not None and row["more_us"] > options.limit_us]
    if too_slow:
        print(f"OwnerOptimizer costs more than {options.limit_us:g} us over the bare one", file=sys.stderr)
    return 1 if too_slow else 0


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--parameters", type=int, nargs="+", default=[1, 100, 400], help="how many, per run (%(default)s)"
    )
    parser.add_argument("--optimizer", default="AdamW", help="a class of torch.optim (%(default)s)")
    parser.add_argument("--foreach", action="store_true", help="its foreach form, not the fused one")
    parser.add_argument("--rounds", type=int, default=301, help="rounds of each, in turn (%(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="steps per round (%(default)s)")
    parser.add_argument("--limit-us", type=float, help="fail if it costs more than this")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    if min(*options.parameters, options.rounds, options.steps) < 1:
        parser.error("--parameters, --rounds and --steps are at least 1")
    return options


def measure(number: int, options: argparse.Namespace) -> tuple[float, float]:
    """Median microseconds of a step: bare, and in an OwnerOptimizer on the rank between two holders."""
    kind = getattr(torch.optim, options.optimizer)
    form: dict[str, Any] = {"foreach": True} if options.foreach else {"fused": True}

    def work(fabric: Fabric) -> tuple[float, float]:
        module = stage(fabric.rank, number)
        own = assign_over(fabric, module, TIES)
        opt = OwnerOptimizer(module.parameters(), kind, ownership=own, lr=1e-3, **form)
        if fabric.rank != 1:
            return 0.0, 0.0  # the holders are there to make the plan; this rank has no part in their step
        bare = kind(stage(fabric.rank, number).parameters(), lr=1e-3, **form)
        for optimizer in (bare, opt):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.ones_like(parameter)
        return alternate(bare.step, opt.step, options)

    return run_threads(3, work, timeout=TIMEOUT)[1]


def stage(rank: int, number: int) -> nn.Module:
    """The embedding, `number` parameters of 8 elements, or the head."""
    if rank == 0:
        return nn.ModuleDict({"embed": nn.Embedding(2, 2, _weight=torch.zeros(2, 2))})
    if rank == 2:
        head = nn.Linear(2, 2, bias=False)
        nn.init.zeros_(head.weight)
        return nn.ModuleDict({"head": head})
    return nn.ParameterList([torch.zeros(8) for _ in range(number)])


def alternate(
    bare: Callable[[], object], owner: Callable[[], object], options: argparse.Namespace
) -> tuple[float, float]:
    """Median microseconds per call of each, measured in turn; which comes first changes every round."""
    seconds: dict[Callable[[], object], list[float]] = {bare: [], owner: []}
    for step in (bare, owner):
        timed(step, options.steps)
    for index in range(options.rounds):
        for step in (bare, owner) if index % 2 else (owner, bare):
            seconds[step].append(timed(step, options.steps))
    return statistics.median(seconds[bare]) * 1e6, statistics.median(seconds[owner]) * 1e6


def timed(step: Callable[[], object], steps: int) -> float:
    """Mean seconds of a step."""
    started = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - started) / steps


if __name__ == "__main__":
    sys.exit(main())
