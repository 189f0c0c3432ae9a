"""`piper-owner verify`: programs, TrainingDAGs and torch's CSV, right and wrong."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dag_cases import Case, built, cases, edited
from directive_cases import order, place, replicate, split
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch_csv_files import LOOP, MICROBATCHES, RANKS, V

from piper_owner.cli import main
from piper_owner.cli.checking import check, parse_edges, read_schedule
from piper_owner.dag.graph import TrainingDAG
from piper_owner.dag.text import format_dag, parse_dag
from piper_owner.directives import emit_program, format_program
from piper_owner.drawing.timeline import draw
from piper_owner.errors import ConfigError, DagError, DagParseError, InputError
from piper_owner.frontends.torch_csv import parse_torch_csv
from piper_owner.p2p_nodes import executable
from piper_owner.schedules import Schedule

TESTS = Path(__file__).resolve().parent
GOLDEN = TESTS / "golden"
PIPELINE = [place(0, 0), place(1, 1), place(2, 1), place(3, 0), split(4)]


class Result:
    """What a run of the command gave."""

    def __init__(self, status: int, out: str, err: str, folder: Path) -> None:
        self.status, self.out, self.err = status, out, err
        self.folder = folder

    @property
    def verdict(self) -> dict[str, Any]:
        value = json.loads((self.folder / "verdict.json").read_text())
        assert isinstance(value, dict)
        return value

    def drawing(self) -> ET.Element:
        return ET.parse(self.folder / "grid.svg").getroot()


Verify = Callable[..., Result]


@pytest.fixture
def verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Verify:
    """verify(text, *options): the command on a file of that text, with --json and --svg."""

    def run(text: str | bytes | list[object], *options: str) -> Result:
        file = tmp_path / "schedule"
        content = json.dumps(text) if isinstance(text, list) else text
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        outputs = ("--json", str(tmp_path / "verdict.json"), "--svg", str(tmp_path / "grid.svg"))
        status = main(["verify", str(file), *outputs, *options])
        out, err = capsys.readouterr()
        return Result(status, out, err, tmp_path)

    return run


def rectangles(drawing: ET.Element, colour: str | None = None) -> list[str]:
    """The tooltips of the actions drawn; of those outlined in `colour` alone, if it is given."""
    space = "{http://www.w3.org/2000/svg}"
    return [
        str(group.findtext(f"{space}title"))
        for group in drawing.iter(f"{space}g")
        for rectangle in group.iter(f"{space}rect")
        if colour is None or rectangle.get("stroke") == colour
    ]


# Right ones


def test_a_right_program(verify: Verify) -> None:
    result = verify([*PIPELINE, order("3F0 3BI0 0F1")])
    assert (result.status, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0].endswith("schedule: ok, directives, 2 ranks, 4 stages, 4 microbatches")
    assert lines[1].startswith("makespan ")
    assert lines[3].split() == ["time", "rank", "0", "rank", "1"]
    assert ">>" not in result.out
    verdict = result.verdict
    assert verdict["ok"] is True
    assert (verdict["error"], verdict["error_kind"], verdict["wrong"]) == (None, None, [])
    assert verdict["kind"] == "directives"
    sizes = ("num_ranks", "num_stages", "num_microbatches", "num_pipelines")
    assert [verdict[name] for name in sizes] == [2, 4, 4, 1]
    assert verdict["placement"] == [0, 1, 1, 0]
    drawn = rectangles(result.drawing())
    assert len(drawn) == 4 * 4 * 2 + 1
    assert {"0F0", "3I0", "3W0", "1B3"} <= set(drawn)


def test_a_program_of_several_pipelines(verify: Verify) -> None:
    result = verify([place("*", 0), replicate("*", 0, 3)])
    assert result.status == 0
    assert "1 rank, 1 stage, 1 microbatch, 2 equal pipelines" in result.out
    assert result.verdict["num_pipelines"] == 2


def test_edges_of_a_program(verify: Verify) -> None:
    program = [place(0, 0), place(1, 1), place(2, 2), order("2F0 1F0")]
    assert verify(program).status == 2
    assert verify(program, "--edges", "0-1, 0-2").status == 0
    wrong = verify(program, "--edges", "0-1,0-7")
    assert (wrong.status, wrong.err.count("\n")) == (2, 1)
    assert "--edges 0-7: " in wrong.err
    assert "has regions 0 to 2" in wrong.err
    assert "says itself what feeds what" in verify("0F0,0B0\n", "--edges", "0-1").err


@pytest.mark.parametrize("text", ["", "1", "0-", "1-0", "1-1", "0-1,,1-2", "a-b", "0-1,0-1", "0-9999999"])
def test_edges_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--edges"):
        parse_edges(text)


@pytest.mark.parametrize("schedule", Schedule)
def test_an_emitted_schedule_is_right(verify: Verify, schedule: Schedule) -> None:
    dag = built((0, 1, 1, 0), 6, schedule=schedule)
    for text in (format_program(emit_program(dag)), format_dag(dag)):
        result = verify(text)
        assert result.status == 0, result.err


@pytest.mark.parametrize("file", sorted(GOLDEN.glob("*.txt")), ids=lambda file: file.stem)
def test_golden_files_are_right(verify: Verify, file: Path) -> None:
    result = verify(file.read_bytes())
    assert (result.status, result.verdict["kind"]) == (0, "training_dag")


def test_grid_is_cut_as_asked(verify: Verify) -> None:
    result = verify(PIPELINE, "--max-rows", "3", "--max-ranks", "1")
    lines = result.out.splitlines()
    assert lines[1].endswith("(rank 0 3, ...)")
    assert lines[3].split() == ["time", "rank", "0"]
    assert lines[-1].endswith("later rows and 1 of 2 ranks left out)")
    assert len(lines) == 8


# Wrong ones: the first line is the error, the grid has the cell


def test_a_wrong_program_is_quoted(verify: Verify) -> None:
    wrong = order("0B0 0F0")
    result = verify([*PIPELINE, wrong])
    assert result.status == 2
    assert result.err.count("\n") == 1
    assert result.err.startswith("piper-owner: error: ")
    assert f"schedule: directive[5] {json.dumps(wrong)}: it contradicts the data dependencies" in result.err
    verdict = result.verdict
    assert (verdict["ok"], verdict["error_kind"]) == (False, "DirectiveError")
    assert f"piper-owner: error: {verdict['error']}\n" == result.err


@pytest.mark.parametrize(
    ("rows", "error", "cells", "kind"),
    [
        ("0F0,0B0,0F1,0B1|1F0,1B0,1F1", "rank 1, 1B1: the program lacks it", ["1B1"], "RuleViolationError"),
        ("0B0,0F0|1F0,1B0", "rank 0, 0B0: it stands at 0, before 0F0 at 1", ["0B0"], "RuleViolationError"),
        ("0F0,0B0|1F0,1B0,1B0", "rank 1, 1B0", ["1B0", "1B0"], "RuleViolationError"),
        ("0F0,0W0,0I0|1F0,1B0", "rank 0, 0W0: it stands at 1, before 0I0", ["0W0"], "RuleViolationError"),
        ("0F0,2F0,0F1,2B0,0B0,2F1,2B1,0B1|1F1,1F0,1B0,1B1", "deadlock", None, "DeadlockError"),
        (
            "0F0,0RECV_B0,0SEND_F0,0B0|1RECV_F0,1F0,1B0,1SEND_B0",
            "deadlock: rank 0 waits at 0RECV_B0<-1@1",
            ["0RECV_B0<-1@1", "1RECV_F0<-0@0"],
            "DeadlockError",
        ),
        (
            "0F0,0SEND_F0,0RECV_B0,0B0|1RECV_F0,1F0,1B0",
            "rank 1, 1SEND_B0->0@0: the program lacks it",
            ["1SEND_B0->0@0"],
            "RuleViolationError",
        ),
        (
            "0F0,0F1,0SEND_F1,0SEND_F0,0RECV_B0,0B0,0RECV_B1,0B1|"
            "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1",
            "it is message 0 that rank 1 awaits from rank 0, which sends the activation F1",
            ["0RECV_B0<-1@1", "1RECV_F0<-0@0"],
            "RuleViolationError",
        ),
    ],
)
def test_wrong_schedules_have_their_cells_marked(
    verify: Verify,
    rows: str,
    error: str,
    cells: list[str] | None,
    kind: str,
) -> None:
    result = verify(rows.replace("|", "\n") + "\n")
    assert result.status == 2
    first = result.err.splitlines()[0]
    assert first.startswith("piper-owner: error: ")
    assert error in first
    verdict = result.verdict
    assert (verdict["ok"], verdict["kind"], verdict["error_kind"]) == (False, "torch_csv", kind)
    marked = [cell["action"] for cell in verdict["wrong"]]
    assert marked
    assert cells is None or marked == cells
    for text in marked:
        assert f">>{text}<<" in result.out
    assert sorted(rectangles(result.drawing(), "#d00000")) == sorted(marked)


def test_a_wrong_dag_says_more_of_what_is_wrong(verify: Verify) -> None:
    dag = edited(parse_dag((GOLDEN / "1f1b_v_4x3.txt").read_text()), 1, lambda program: program.clear())
    result = verify(format_dag(dag))
    assert result.status == 2
    assert "rank 1, 1F0: the program lacks it" in result.err.splitlines()[0]
    assert len(result.err.splitlines()) == 9
    assert result.err.splitlines()[-1].endswith(" more")
    assert len(result.verdict["more"]) == 8


def test_transfers_are_checked_where_steps_are_missing(verify: Verify) -> None:
    text = (GOLDEN / "1f1b_2x3.txt").read_text().replace("STEP[stage0]", "")
    assert verify(text).status == 0
    assert "lacks it" in verify(text.replace("0SEND_F1->1@1 ", "")).err


# Files that are no schedule


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "it is empty; give a schedule program"),
        (b" \n ", "it is empty"),
        (b"hello\nworld", "it starts with 'hello'"),
        (b"\xff\xfe\x00\x01", "byte 0 is no UTF-8 text"),
        (b"0F0\0", "this is a binary file"),
        (b"{}", "a program is a JSON array of directives"),
        (b"[{]", "line 1, column 3, near directive[0]: this is no JSON"),
        (b"[]", "none of its 0 directives places PP 0"),
        (b"training_dag\n", "line 1, 'training_dag'"),
        (b"training_dag ranks=1 microbatches=99999999\nplacement 0\nedges\nrank 0\n", "more than 1048576"),
        (
            b"training_dag ranks=99999999 microbatches=1\nplacement 0\nedges\nrank 0\n",
            "1 programs for",
        ),
        (b"0F0,0X0\n", "rank 0, cell 1: '0X0' is no action; actions look like 0F0"),
        (b"0F0,(0F1;1B0\n", "rank 0, cell 1: '(0F1;1B0' is no action"),
        (b"0F0,0B0\n0F1,0B1\n", "rank 1, cell 0: 0F1 computes stage 0, which rank 0 computes too"),
        (b"0F0,0B0,2F0,2B0\n", "no rank computes stage 1, but rank 0 computes stage 2"),
        (b"0F0,0B0,0SEND_F0\n", "rank 0, cell 2: 0SEND_F0 goes to or comes from stage 1, but the stages"),
        (b"0F0,0F999999999\n", "it names microbatch 999999999, but has 2 computes"),
        (b"0UNSHARD\n", "it computes nothing"),
        (b'0F0,"0B0\n', "this is no CSV"),
    ],
)
def test_files_that_are_no_schedule_are_one_line(verify: Verify, content: bytes, words: str) -> None:
    result = verify(content)
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith("piper-owner: error: ")
    assert result.err.count("\n") == 1
    assert words in result.err
    verdict = result.verdict
    assert verdict["ok"] is False
    assert sorted(verdict) == sorted(verify("0F0,0B0\n").verdict)
    assert verdict["num_ranks"] is None
    (result.folder / "grid.svg").unlink()
    verify(content)
    assert not (result.folder / "grid.svg").exists()


def test_files_that_cannot_be_read_or_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.csv"
    assert main(["verify", str(file)]) == 2
    assert (
        capsys.readouterr().err == f"piper-owner: error: {file}: cannot read it: No such file or directory\n"
    )
    assert main(["verify", str(tmp_path)]) == 2
    assert "Is a directory" in capsys.readouterr().err
    file.write_text("0F0,0B0\n")
    for option in ("--json", "--svg"):
        assert main(["verify", str(file), option, str(tmp_path / "missing" / "out")]) == 2
        assert f"{option} {tmp_path / 'missing' / 'out'}: the folder" in capsys.readouterr().err


def test_a_huge_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "huge"
    with file.open("wb") as stream:
        stream.truncate(2**33)
    assert main(["verify", str(file)]) == 2
    assert "larger than 64 MiB" in capsys.readouterr().err


# torch's own schedules


@pytest.fixture(scope="module")
def torch_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("torch")
    script = [sys.executable, str(TESTS / "torch_csv_files.py"), str(folder)]
    subprocess.run(script, check=True, timeout=120, capture_output=True)
    return folder


@pytest.mark.parametrize("name", [*LOOP, *V])
def test_schedules_of_torch_are_right(torch_files: Path, name: str) -> None:
    for form in ("compute_only", "compute_comms"):
        text = (torch_files / f"{name}.{form}.csv").read_text()
        _, dag, _ = read_schedule(text, source=name, edges=None)
        assert (dag.num_ranks, dag.num_stages, dag.num_microbatches) == (RANKS, 2 * RANKS, MICROBATCHES)
        verdict = check(dag)
        assert (verdict.error, verdict.more, verdict.wrong) == (None, (), frozenset())


@pytest.mark.parametrize("name", V)
def test_receives_that_torch_defers_are_out_of_order(torch_files: Path, name: str) -> None:
    # Guards our assumption that `defer_pp_recv` swaps messages of a pair under these schedules.
    verdict = check(parse_torch_csv((torch_files / f"{name}.deferred.csv").read_text()))
    assert "first in, first out" in str(verdict.error)
    assert verdict.wrong


def test_overlapped_actions_run_one_after_the_other() -> None:
    dag = parse_torch_csv("0F0,,0F1,(0B0;0F2)OVERLAP_F_B,0UNSHARD,0B1,0B2,0REDUCE_GRAD\n\n")
    assert [repr(action) for action in dag.programs[0]] == ["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"]
    assert dag.num_ranks == 1


# The real command


def test_the_command_itself(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    for directives, status in ((PIPELINE, 0), ([*PIPELINE, place(0, 0)], 2)):
        file.write_text(json.dumps(directives))
        command = [sys.executable, "-m", "piper_owner", "verify", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == status
        assert (": ok, " in done.stdout) == (status == 0)
        assert ("PP 0 is placed already" in done.stderr) == (status == 2)


def test_a_reader_that_has_seen_enough_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    file.write_text(json.dumps([*PIPELINE[:4], split(3_000)]))
    command = [sys.executable, "-m", "piper_owner", "verify", str(file), "--max-rows", "100000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        running.stdout.readline()
        running.stdout.close()
        assert running.stderr is not None
        assert running.stderr.read() == b""
        assert running.wait(60) == 0


def test_it_needs_no_torch(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    file.write_text(json.dumps(PIPELINE))
    code = (
        "import sys; from piper_owner.cli import main; status = main(sys.argv[1:]);"
        "sys.exit(status or 9 * bool({'torch', 'ray', 'numpy'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, "verify", str(file), "--svg", str(tmp_path / "g.svg")]
    assert subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0


# Anything at all


def broken(dag: TrainingDAG, seed: int) -> TrainingDAG:
    """`dag` with one action moved, dropped, doubled, or given to another rank."""
    chance = random.Random(seed)
    programs = [list(program) for program in dag.programs]
    rank = chance.choice([r for r, program in enumerate(programs) if program])
    at = chance.randrange(len(programs[rank]))
    action = programs[rank].pop(at)
    match chance.randrange(4):
        case 0:
            programs[rank].insert(chance.randrange(len(programs[rank]) + 1), action)
        case 1:
            programs[rank][at:at] = [action, action]
        case 2:
            programs[chance.randrange(len(programs))].append(action)
    return replace(dag, programs=tuple(map(tuple, programs)))


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(cases(max_ranks=4, max_stages=6, max_microbatches=4), st.integers(0, 2**30), st.booleans())
def test_every_verdict_can_be_shown(case: Case, seed: int, lowered: bool) -> None:
    dag = executable(case.build(), case.plan) if lowered else case.build()
    right = check(dag)
    assert right.error is None
    wrong_dag = broken(dag, seed)
    wrong = check(wrong_dag)
    if wrong.error is not None:
        assert wrong.wrong
        assert ">>" in wrong.timeline.format_grid(wrong=wrong.wrong, max_rows=10_000, max_ranks=99)
    for verdict in (right, wrong):
        drawing = draw(
            verdict.timeline, title="a <b> & c", num_microbatches=dag.num_microbatches, wrong=verdict.wrong
        )
        assert (len(rectangles(ET.fromstring(drawing), "#d00000")) > 0) == bool(verdict.wrong)


@given(st.sampled_from(["dag", "csv", "json"]), st.data())
def test_any_text_is_checked_or_refused(kind: str, data: st.DataObject) -> None:
    text = {
        "dag": (GOLDEN / "1f1b_loop_4x3_clip.txt").read_text(),
        "csv": "0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n,1F0,1B0,1F1,1I1,1W1,1F2,1B2\n",
        "json": json.dumps([*PIPELINE, order("0F0 0F1")]),
    }[kind]
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text)))
        length = data.draw(st.integers(0, 6))
        text = (
            text[:at]
            + data.draw(st.text(alphabet='0123BFIWS,;()[]{}":= -><@\nx', max_size=3))
            + text[at + length :]
        )
    try:
        _, dag, _ = read_schedule(text, source="x", edges=None)
    except (InputError, DagError, DagParseError) as error:
        message = str(error)
    else:
        check(dag)
        return
    assert message
