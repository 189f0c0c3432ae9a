"""scripts/gpu_check: it runs whole on the CPU with torch alone, and each of its checks can fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from piper_owner.gpu_check import command
from piper_owner.gpu_check.bandwidth import check_owner_step, check_rows
from piper_owner.gpu_check.crew import Crew, CrewError, Rank
from piper_owner.gpu_check.ordering import check_order, check_syncs, step_without_syncs, train_delayed
from piper_owner.gpu_check.result import CheckResult, Report, Status, format_table
from piper_owner.gpu_check.sizes import FULL, TINY
from piper_owner.gpu_check.training import check_memory, check_training
from piper_owner.gpu_check.ways import Outcome, Way, train_way

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "gpu_check"
# What the checks do without, though it may be installed here.
ABSENT = ("ray", "rich", "tokenizers", "pytest")


def run_script(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The script as on a machine that has torch and numpy, no GPU, and another current folder."""
    hidden = folder / "absent"
    hidden.mkdir()
    for name in ABSENT:
        (hidden / f"{name}.py").write_text(f"raise ImportError('{name} is not here')\n")
    variables = {**os.environ, "PYTHONPATH": str(hidden), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=variables,
        cwd=folder,
    )


def test_it_runs_whole_on_the_cpu_with_torch_alone(tmp_path: Path) -> None:
    done = run_script(tmp_path, "--device", "cpu", "--json", "out.json")
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["ok"] is True
    found = {check["name"]: check["status"] for check in written["checks"]}
    trained = [f"train {dtype} {way}" for dtype in ("float32", "bfloat16") for way in ("dense", "rows")]
    assert found == {
        **dict.fromkeys((*trained, "owner step", "rows"), "ok"),
        **dict.fromkeys(("memory", "stream order", "host syncs"), "skipped"),
    }
    assert all(check["reason"] for check in written["checks"] if check["status"] == "skipped")
    lines = done.stdout.splitlines()
    assert len(lines) == 1 + len(found), "the table is all of it"
    assert lines[0].startswith("device CPU, torch ")
    assert [name for name in found if not any(line.startswith(name) for line in lines)] == []
    assert max(map(len, lines)) <= 120


def test_without_a_gpu_it_says_so_in_a_line(tmp_path: Path) -> None:
    done = run_script(tmp_path, "--json", "out.json")
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "finds no GPU on this machine; --device cpu runs the checks" in line
    assert not (tmp_path / "out.json").exists()


def test_a_file_that_cannot_be_written_is_found_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--device", "cpu", "--json", "no/such/folder/out.json"]) == 2
    assert "the folder no/such/folder does not exist" in capsys.readouterr().err


# -- what each check makes of what its ranks say


class Told(Crew):
    """A crew without processes, whose ranks give the answers that it was made with, in turn."""

    def __init__(self, *answers: list[Any]) -> None:
        self._answers = iter(answers)

    def run(self, num: int, function: object, *args: object, limit: float) -> list[Any]:
        answer = next(self._answers)
        assert len(answer) == num
        return answer


def outcome(*losses: float, **changes: Any) -> Outcome:  # noqa: ANN401
    return Outcome(losses=list(losses), **{"moved": 1.0, **changes})


ALONE = [outcome(8.0, 7.0)]
RIGHT = [outcome(0.0, 0.0), outcome(8.0, 7.0, state=1)]


@pytest.mark.parametrize(
    ("ranks", "reason"),
    [
        (RIGHT, ""),
        ([RIGHT[0], outcome(8.0, 7.001, state=1)], "a loss differs by 1.4e-04 of it"),
        ([outcome(0.0, 0.0, gap=1e-5), RIGHT[1]], "the updates differ by 2.2e-03 of them"),
        ([outcome(0.0, 0.0, state=1), RIGHT[1]], "the ranks [0, 1] have optimizer state"),
        ([RIGHT[0], outcome(float("nan"), 7.0, state=1)], "a loss differs by nan"),
    ],
)
def test_training_is_compared(ranks: list[Outcome], reason: str) -> None:
    dense, rows = check_training(Told(ALONE, ranks, RIGHT), "float32")
    assert (dense.name, rows.name) == ("train float32 dense", "train float32 rows")
    assert rows.status is Status.OK
    assert dense.status is (Status.FAILED if reason else Status.OK)
    assert reason in dense.reason


def test_memory_that_is_not_saved_is_a_failure() -> None:
    table = TINY.table_bytes
    held = {Way.NAIVE: 3.0, Way.ALL_REDUCE: 3.0, Way.DENSE: 2.0, Way.ROWS: 1.6}
    right = [[outcome(held=int(part * table), peak=1)] * 2 for part in held.values()]
    (result,) = check_memory(Told(*right), TINY)
    assert result.status is Status.OK
    assert result.figures["dense_tables_saved"] == pytest.approx(2, abs=0.01)
    (result,) = check_memory(Told(*right[:3], right[0]), TINY)
    assert result.status is Status.FAILED
    assert "rows holds 0.00 tables less than naive, and 2.7 are to be saved" in result.reason


STEP = {"same_bits": True, "of_bound": 0.9, "chunk_cost": 0.01, "best_chunk_mib": 64.0}


@pytest.mark.parametrize(
    ("changes", "status", "reason"),
    [
        ({}, Status.OK, ""),
        ({"of_bound": 0.79}, Status.FAILED, "79% of what copying allows"),
        ({"chunk_cost": 0.04}, Status.FAILED, "chunks cost 4.0% at best"),
        ({"same_bits": False}, Status.FAILED, "other bits"),
        (
            {"needed_bytes": 10**10, "short_of_bytes": 10**9},
            Status.SKIPPED,
            "1,000,000,000 more than are free",
        ),
    ],
)
def test_the_owners_step_is_judged(changes: dict[str, Any], status: Status, reason: str) -> None:
    (result,) = check_owner_step(Told([{**STEP, **changes}]), FULL, is_judged=True)
    assert result.status is status
    assert reason in result.reason


def test_moves_of_rows_that_are_wrong_are_a_failure() -> None:
    right = {"gather_is_right": True, "add_is_right": True, "gather_of_copy": 0.9, "add_of_copy": 0.8}
    (result,) = check_rows(Told([right]))
    assert result.status is Status.OK
    for name in ("gather_is_right", "add_is_right"):
        (result,) = check_rows(Told([{**right, name: False}]))
        assert result.status is Status.FAILED


def test_other_bits_and_waits_of_the_host_are_failures() -> None:
    (result,) = check_order(Told(["a", "a"], ["a", "a"], ["b", "b"], ["b", "c"]))
    assert (result.status, result.reason) == (
        Status.FAILED,
        "rows: delays on side streams have changed the weights",
    )
    (result,) = check_syncs(Told([0, 0], [1, 0]))
    assert result.status is Status.OK
    (result,) = check_syncs(Told([0, 0], [1, 2]))
    assert (result.status, result.reason) == (
        Status.FAILED,
        "rows: the host waited [1, 2] times, by rank, and may (1, 0)",
    )
    (result,) = check_syncs(Told([1, 0], [0, 0]))
    assert result.reason == "dense: the host waited [1, 0] times, by rank, and may (0, 0)"


# -- the processes, and the bodies that need a GPU for their verdict


def fail(rank: Rank) -> int:
    if rank.rank == 0:
        os._exit(3)
    raise ValueError("this rank has had enough")


def number(rank: Rank) -> int:
    return rank.rank


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew("cpu", TINY) as made:
        yield made


def test_a_rank_that_fails_or_ends_takes_no_other_check_with_it(crew: Crew) -> None:
    with pytest.raises(CrewError) as failed:
        crew.run(2, fail, limit=60)
    assert "rank 0: the process has ended with exit code 3" in str(failed.value)
    assert "rank 1: ValueError: this rank has had enough" in str(failed.value)
    assert crew.run(2, number, limit=60) == [0, 1]


def test_bodies_of_checks_that_need_a_gpu_run_on_the_cpu(crew: Crew) -> None:
    """All but the delays and the debug mode themselves."""
    for layout in ("dense", "rows"):
        digests = crew.run(2, train_delayed, layout, False, limit=60)
        assert digests[1] != ""
        assert digests[0] == ("" if layout == "rows" else digests[1])
        assert crew.run(2, step_without_syncs, layout, limit=60) == [0, 0]
    losses = {}
    for way in Way:
        ranks = crew.run(2, train_way, way, "float32", None, limit=60)
        losses[way] = ranks[1].losses
        assert [each.state > 0 for each in ranks].count(True) == (1 if way in (Way.DENSE, Way.ROWS) else 2)
    assert losses[Way.DENSE] == pytest.approx(losses[Way.ALL_REDUCE], rel=1e-6)
    assert losses[Way.ROWS] == pytest.approx(losses[Way.ALL_REDUCE], rel=1e-6)
    assert losses[Way.NAIVE] != pytest.approx(losses[Way.ALL_REDUCE], rel=1e-4)


def test_the_table_and_the_exit_status_tell_of_a_failure() -> None:
    checks = (
        CheckResult(name="one", status=Status.OK, seconds=1.0, shown="as it should be"),
        CheckResult(name="another", status=Status.FAILED, seconds=12.0, reason="too slow\nTraceback"),
        CheckResult(name="last", status=Status.SKIPPED, reason="there is no GPU"),
    )
    report = Report(machine={"device": "H", "driver": None, "torch": "2"}, checks=checks)
    assert not report.is_ok
    assert format_table(report).splitlines() == [
        "device H, torch 2",
        "one      ok         1.0 s  as it should be",
        "another  failed    12.0 s  too slow",
        "last     skipped    0.0 s  there is no GPU",
    ]
    assert replace(report, checks=checks[::2]).is_ok
