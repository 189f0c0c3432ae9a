#!/usr/bin/env python3
"""Time parsing and lowering of schedule programs of many directives. Needs neither torch nor Ray.

    scripts/bench_directives.py                    1,000, 10,000 and 40,000 directives
    scripts/bench_directives.py --sizes 10000 --limit-s 10

A program has 64 regions on 16 devices and one `order` directive for each two neighbouring
microbatches of a region and pass, so that directives and computes grow together. `growth` is the
exponent between a size and the one before: 1 is linear. With --limit-s it fails (1) if a size takes
longer than that.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time

from piper_owner.directives import lower_program, parse_program

REGIONS = 64
DEVICES = 16


def main() -> int:
    """Run the benchmark and print its table."""
    options = parse_options()
    print(f"{'directives':>10} {'computes':>9} {'parse s':>8} {'lower s':>8} {'sum s':>7} {'growth':>7}")
    before: tuple[int, float] | None = None
    slowest = 0.0
    for size in options.sizes:
        count, computes, parse, lower = measure(size, options.rounds)
        total = parse + lower
        growth = "" if before is None else f"{math.log(total / before[1]) / math.log(count / before[0]):.2f}"
        print(f"{count:>10,} {computes:>9,} {parse:>8.2f} {lower:>8.2f} {total:>7.2f} {growth:>7}")
        before, slowest = (count, total), max(slowest, total)
    if options.limit_s is not None and slowest > options.limit_s:
        print(f"the slowest size takes {slowest:.1f} s, more than {options.limit_s:g}", file=sys.stderr)
        return 1
    return 0


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000, 10_000, 40_000])
    parser.add_argument("--rounds", type=int, default=3, help="the best of so many rounds counts")
    parser.add_argument("--limit-s", type=float, help="fail if a size takes longer")
    return parser.parse_args()


def program(size: int) -> tuple[str, int]:
    """The JSON of a program of about `size` directives, and its microbatches."""
    microbatches = max(2, round((size - REGIONS) / (2 * REGIONS)) + 1)
    directives: list[object] = [
        {"op": "place", "filter": {"PP": region}, "devices": [region % DEVICES]} for region in range(REGIONS)
    ]
    directives.append({"op": "split", "filter": {}, "num_microbatches": microbatches})
    for part in ("F", "B"):
        for region in range(REGIONS):
            for microbatch in range(microbatches - 1):
                pair = [[{"PP": region, "MB": index, "PASS": part}] for index in (microbatch, microbatch + 1)]
                directives.append({"op": "order", "filters": pair})
    return json.dumps(directives), microbatches


def measure(size: int, rounds: int) -> tuple[int, int, float, float]:
    """Directives, computes, and the best seconds to parse and to lower them."""
    text, microbatches = program(size)
    parse = lower = math.inf
    count = 0
    for _ in range(rounds):
        start = time.perf_counter()
        parsed = parse_program(text)
        middle = time.perf_counter()
        lower_program(
            parsed,
            tags=[{"PP": region} for region in range(REGIONS)],
            stage_edges=[(region, region + 1) for region in range(REGIONS - 1)],
            buckets=(),
        )
        end = time.perf_counter()
        parse, lower = min(parse, middle - start), min(lower, end - middle)
        count = len(parsed.directives)
    return count, 2 * REGIONS * microbatches, parse, lower


if __name__ == "__main__":
    sys.exit(main())
