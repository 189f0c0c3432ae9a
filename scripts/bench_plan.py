#!/usr/bin/env python3
"""Time planning: a schedule of 64 stages, its passes, its rules and its dry run, on one core.

    scripts/bench_plan.py
    scripts/bench_plan.py --schedule zbv --profile
    scripts/bench_plan.py --limit 10

Seconds are those of the processor. Three sizes, 64, 256 and 1,024 microbatches: the last column says how much
longer four times the microbatches take, 4 being linear. GPipe and 1F1B have one stage on each of 64 ranks;
interleaved has two on each of 32, placed round and round, and the zero-bubble V and DualPipeV two on each of
32, placed as a V. The first and the last stage share a parameter. With --limit it fails (1) if a plan takes
longer than that.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import sys
import time
from collections.abc import Callable
from typing import Final, TypeVar

from piper_owner.dag.graph import Bucket, TrainingDAG
from piper_owner.dag.rules import Level, check_rules
from piper_owner.ownership import OwnershipPlan, ParameterUse, Use, plan_ownership
from piper_owner.p2p_nodes import executable
from piper_owner.schedules import Placement, Schedule, build_dag, place_stages
from piper_owner.simulate import simulate

T = TypeVar("T")

STAGES: Final = 64
MICROBATCHES: Final = (64, 256, 1024)
STAGES_PER_RANK: Final = {Schedule.GPIPE: 1, Schedule.ONE_F_ONE_B: 1}
V_SHAPED: Final = (Schedule.ZBV, Schedule.DUALPIPEV)
STEPS: Final = ("build", "lower", "rules", "dry run")


def plan(placement: tuple[int, ...], ranks: int) -> OwnershipPlan:
    """The first stage looks rows up in the table that the last one multiplies with."""
    ends = {"embed.weight": (0, Use.LOOKUP), "head.weight": (STAGES - 1, Use.DENSE)}
    uses = [
        ParameterUse(
            name=name, rank=placement[stage], stage=stage, shape=(32_000, 4096), dtype="bfloat16", use=use
        )
        for name, (stage, use) in ends.items()
    ]
    return plan_ownership([list(ends)], uses, world_size=ranks, layout="auto")


def run(schedule: Schedule, microbatches: int) -> tuple[dict[str, float], int]:
    """Seconds by step, and the number of actions of all ranks."""
    ranks = STAGES // STAGES_PER_RANK.get(schedule, 2)
    shape = Placement.V if schedule in V_SHAPED else Placement.LOOP
    placement = place_stages(STAGES, ranks, shape)
    buckets = [Bucket(name=f"stage{stage}", stages=(stage,)) for stage in range(STAGES)]
    seconds: dict[str, float] = {}

    def timed(step: str, work: Callable[[], T]) -> T:
        start = time.process_time()
        done = work()
        seconds[step] = time.process_time() - start
        return done

    def build() -> TrainingDAG:
        return build_dag(
            schedule, placement=placement, num_ranks=ranks, num_microbatches=microbatches, buckets=buckets
        )

    built = timed("build", build)
    dag = timed("lower", lambda: executable(built, plan(placement, ranks), clip=True))
    timed("rules", lambda: check_rules(dag, Level.EXECUTABLE))
    timed("dry run", lambda: simulate(dag))
    return seconds, sum(map(len, dag.programs))


def report(schedules: list[Schedule], sizes: list[int]) -> float:
    """Print a line for each schedule and size; the longest time."""
    longest = 0.0
    steps = " ".join(f"{step:>8}" for step in STEPS)
    print(f"{'schedule':<12} {'microbatches':>12} {'actions':>9} {steps} {'seconds':>8} {'growth':>7}")
    for schedule in schedules:
        totals: list[float] = []
        for size in sizes:
            gc.collect()
            seconds, actions = run(schedule, size)
            totals.append(sum(seconds.values()))
            growth = f"{totals[-1] / totals[-2]:.2f}" if len(totals) > 1 else ""
            longest = max(longest, totals[-1])
            parts = " ".join(f"{seconds[step]:8.2f}" for step in STEPS)
            line = f"{schedule.value:<12} {size:>12,} {actions:>9,} {parts} {totals[-1]:8.2f} {growth:>7}"
            print(line.rstrip(), flush=True)
    return longest


def main() -> int:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [schedule.value for schedule in Schedule]
    parser.add_argument("--schedule", choices=names, help="only this one (default: all)")
    parser.add_argument("--microbatches", type=int, help="only this size (default: 64, 256 and 1,024)")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="fail if a plan takes longer")
    parser.add_argument("--profile", action="store_true", help="also print where the time goes")
    options = parser.parse_args()
    schedules = [schedule for schedule in Schedule if options.schedule in (None, schedule.value)]
    sizes = [options.microbatches] if options.microbatches else list(MICROBATCHES)
    profile = cProfile.Profile()
    if options.profile:
        profile.enable()
    longest = report(schedules, sizes)
    if options.profile:
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    if options.limit is not None and longest > options.limit:
        print(f"a plan takes {longest:.1f} s, more than {options.limit:g} s", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
