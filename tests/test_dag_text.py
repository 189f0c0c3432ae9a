"""The text form of a TrainingDAG: golden files, and exact round trips."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from dag_cases import Case, built, cases, planned
from hypothesis import given, settings
from hypothesis import strategies as st

from piper_owner.dag.graph import Bucket, TrainingDAG
from piper_owner.dag.text import format_dag, parse_dag
from piper_owner.errors import DagError, DagParseError
from piper_owner.p2p_nodes import executable
from piper_owner.schedules import Schedule

GOLDEN = Path(__file__).parent / "golden"


def _golden() -> dict[str, TrainingDAG]:
    chain, loop, v = (0, 1), (0, 1, 0, 1), (0, 1, 1, 0)
    return {
        "gpipe_2x2": executable(built(chain, 2, schedule=Schedule.GPIPE), planned(chain, [(0, 1)])),
        "1f1b_2x3": executable(built(chain, 3), planned(chain, [(0, 1)])),
        "1f1b_loop_4x3_clip": executable(built(loop, 3), planned(loop, [(0, 3)]), clip=True),
        "1f1b_v_4x3": executable(built(v, 3), planned(v, [(0, 3)])),
        "interleaved_4x4": executable(
            built(loop, 4, schedule=Schedule.INTERLEAVED), planned(loop, [(0, 3)], lookups=(0,))
        ),
        "zbv_4x4_clip": executable(
            built(v, 4, schedule=Schedule.ZBV), planned(v, [(0, 3), (1, 3)]), clip=True
        ),
        "dualpipev_4x4": executable(
            built(v, 4, schedule=Schedule.DUALPIPEV), planned(v, [(0, 1, 2, 3)], owner="last")
        ),
    }


@pytest.mark.parametrize("name", list(_golden()))
def test_golden(name: str) -> None:
    expected = (GOLDEN / f"{name}.txt").read_text(encoding="ascii")
    assert format_dag(_golden()[name]) == expected
    assert parse_dag(expected) == _golden()[name]


@settings(max_examples=60, deadline=None)
@given(cases(max_ranks=5, max_stages=8, max_microbatches=5), st.booleans())
def test_the_text_parses_back_to_an_equal_dag(case: Case, clip: bool) -> None:
    for dag in (case.build(), executable(case.build(), case.plan, clip=clip)):
        text = format_dag(dag)
        assert parse_dag(text) == dag
        assert format_dag(parse_dag(text)) == text


@given(st.text(min_size=1, max_size=20))
def test_any_bucket_name_survives(name: str) -> None:
    dag = dataclasses.replace(built((0, 1), 1), buckets=(Bucket(name=name, stages=(0, 1), owner=1),))
    assert format_dag(dag).isascii()
    assert parse_dag(format_dag(dag)) == dag


def test_how_lines_wrap_has_no_meaning() -> None:
    dag = executable(built((0, 1), 3), planned((0, 1), [(0, 1)]))
    lines = []
    for line in format_dag(dag).splitlines():
        lines.extend([f"  {word}" for word in line.split()] if line.startswith("  ") else [line])
    assert parse_dag("\n".join(lines) + "\n\n") == dag


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("ranks=2", "ranks=two", "line 1, .*write it as"),
        ("placement 0 1", "placement 0 x", "line 2"),
        ("edges 0->1", "edges 0-1", "line 3.*no stage edge"),
        ("stages=0", "stage=0", "line 4.*write it as 'bucket"),
        ("rank 1", "rank 2", "rank 1 comes next"),
        ("0B0", "0Q0", "line 7.*'0Q0' is no action"),
        ("edges", "arrows", "starts with none of"),
        ("training_dag ranks=2 microbatches=1\n", "", "has a 'training_dag"),
        ("placement 0 1\n", "", "a 'placement"),
    ],
)
def test_a_line_that_does_not_parse_is_quoted(old: str, new: str, message: str) -> None:
    text = format_dag(built((0, 1), 1))
    assert old in text
    with pytest.raises(DagParseError, match=message):
        parse_dag(text.replace(old, new, 1))


def test_parts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(DagError, match="stage 1 is placed on rank 5"):
        parse_dag(format_dag(built((0, 1), 1)).replace("placement 0 1", "placement 0 5"))
