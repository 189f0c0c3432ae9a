"""docs/scale.md stands as scripts/scale_table.py makes it."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
scale = import_module("scale_table")
sys.path.pop(0)

SAMPLE = [(scale.NODE, 50_257, 4), (scale.FABRIC, 128_256, 8), (scale.ETHERNET, 256_000, 4)]


def line(cluster: object, vocab: int, depth: int) -> str:
    """A row of the table, as Markdown."""
    return f"| {' | '.join(scale.row(scale.case(cluster, vocab, depth)))} |\n"


@pytest.mark.parametrize(("cluster", "vocab", "depth"), SAMPLE)
def test_page_has_the_planned_figures(cluster: object, vocab: int, depth: int) -> None:
    assert line(cluster, vocab, depth) in scale.PAGE.read_text(encoding="utf-8")


@pytest.mark.slow
def test_page_is_what_the_script_writes() -> None:
    page = scale.PAGE.read_text(encoding="utf-8")
    assert scale.rewritten(page) == page


def test_an_owner_costs_less_than_an_all_reduce_at_every_link() -> None:
    for cluster, vocab, depth in SAMPLE:
        found = scale.case(cluster, vocab, depth)
        seconds = {method: plan.timing.step_seconds for method, plan in found.early.plans.items()}
        methods = type(found.early.advice)
        assert seconds[methods.ROWS] < seconds[methods.ALL_REDUCE]
        assert seconds[methods.DENSE] < seconds[methods.ALL_REDUCE]


def test_page_without_a_mark_is_refused() -> None:
    with pytest.raises(SystemExit, match="tables: end"):
        scale.rewritten(f"before\n{scale.BEGIN}after\n")
