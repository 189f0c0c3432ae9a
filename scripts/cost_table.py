"""Prints what a tie costs in known models, as the table in the README. Needs neither torch nor Ray.

python scripts/cost_table.py --tokens 8192
"""

from __future__ import annotations

import argparse

from piper_owner.cost import TABLES, TieCost, Way, tie_cost

UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


def show(size: int) -> str:
    """`size` in decimal units, with three digits."""
    unit, name = next((each for each in UNITS if size >= each[0]), (1, "B"))
    return f"{size / unit:.3g} {name}"


def rows_of(name: str, shape: tuple[int, int], num_rows: int) -> list[str]:
    """The lines of one model."""
    lines = []
    for way in Way:
        cost: TieCost = tie_cost(way, shape=shape, num_rows=num_rows, itemsize=2, state_itemsize=12)
        cells = (show(cost.wire), show(cost.lookup.total), show(cost.dense.total))
        title = f"{name}, {shape[0]:,} x {shape[1]:,}" if way is Way.ALL_REDUCE else ""
        lines.append(f"| {title} | {way.value} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192, help="tokens per step (default: %(default)s)")
    tokens = parser.parse_args().tokens
    print("| model and table | way | wire, each direction | memory, embedding's rank | memory, head's rank |")
    print("|---|---|---|---|---|")
    for name, shape in TABLES.items():
        print("\n".join(rows_of(name, shape, min(tokens, shape[0]))))


if __name__ == "__main__":
    main()
