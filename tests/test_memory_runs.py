"""`piper-owner memory` on Ray, and the same without Ray under torchrun: figures, tables, files, refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from memory_cases import CASES

from piper_owner.cli import main
from piper_owner.memory import KINDS

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "profile_memory.py"
SMALL = (
    *("--vocab", "400", "--hidden", "32", "--heads", "2", "--layers", "2", "--stages", "2", "--steps", "2"),
    *("--sequence-length", "16", "--microbatch-size", "2", "--microbatches", "4", "--timeout", "60"),
)
ALL = ["naive", "all-reduce", "dense", "rows"]


def options_of(name: str) -> list[str]:
    """The options that make a case of the command."""
    values = {
        "microbatches": 4,
        "microbatch_size": 2,
        "sequence_length": 16,
        "optimizer": name,
        **CASES[name],
    }
    return [part for key, value in values.items() for part in (f"--{key.replace('_', '-')}", str(value))]


def check(found: dict[str, Any], runs: list[str], num_ranks: int) -> None:
    """Everything is as predicted, and the file has what it promises."""
    assert list(found["runs"]) == runs
    assert found["exact"] is True
    assert found["peak_error"] < 0.1
    for name, run in found["runs"].items():
        assert list(run["ranks"]) == [str(rank) for rank in range(num_ranks)]
        for figures in run["ranks"].values():
            predicted, measured = figures["predicted"], figures["measured"]
            for kind in (*KINDS, "total", "peak"):
                assert figures["difference"][kind] == measured[kind] - predicted[kind]
                assert (
                    kind == "peak"
                    or kind == "staging"
                    or kind == "total"
                    or measured[kind] == predicted[kind]
                )
            assert measured["peak"] >= measured["weights"] + measured["optimizer"] > 0 or name == "rows"
            assert figures["process"]["resident"] is None or figures["process"]["resident"] > 10**7
        owners = {tie["owner"] for tie in run["ties"]}
        assert len(owners) == 1


def run_script(*arguments: str, file: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments, "--json", str(file)],
        capture_output=True, text=True, timeout=300, env=environment, check=False,
    )  # fmt: skip


@pytest.mark.usefixtures("ray_cluster")
def test_the_four_ways_on_ray(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "memory.json"
    assert main(["memory", *SMALL, "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    check(found, ALL, 2)
    assert found["where"] == "ray"
    state = {
        name: sum(rank["measured"]["optimizer"] for rank in run["ranks"].values())
        for name, run in found["runs"].items()
    }
    table = 400 * 32 * 8 + 4
    assert state["naive"] == state["all-reduce"] == state["dense"] + table == state["rows"] + table
    assert found["runs"]["rows"]["ranks"]["0"]["measured"]["rows"] > 0
    out, errors = capsys.readouterr()
    for words in (*ALL, "predicted", "measured", "difference", "to the byte", "peak", "resident set"):
        assert words in out
    assert max(map(len, out.splitlines())) <= 80
    assert "naive, all-reduce, dense, rows; 2 steps each" in errors


def test_two_ways_with_masters_under_torchrun(tmp_path: Path) -> None:
    file = tmp_path / "memory.json"
    options = ("--runs", "dense,rows", "--dtype", "bfloat16", "--master-dtype", "float32")
    done = run_script(*SMALL, *options, file=file)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    check(found, ["dense", "rows"], 2)
    assert found["where"] == "torchrun"
    ranks = found["runs"]["rows"]["ranks"]
    assert all(rank["measured"]["masters"] == 2 * rank["measured"]["weights"] > 0 for rank in ranks.values())
    assert "to the byte" in done.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("name", CASES)
def test_all_models_on_ray(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    file = tmp_path / "memory.json"
    assert main(["memory", *options_of(name), "--json", str(file)]) == 0
    check(json.loads(file.read_text()), ALL, CASES[name].get("stages", 3))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
@pytest.mark.parametrize("masters", [False, True])
def test_all_models_under_torchrun(name: str, masters: bool, tmp_path: Path) -> None:
    file = tmp_path / "memory.json"
    options = ("--dtype", "bfloat16", "--master-dtype", "float32") if masters else ()
    done = run_script(*options_of(name), *options, file=file)
    assert done.returncode == 0, done.stderr
    check(json.loads(file.read_text()), ALL, CASES[name]["stages"])


@pytest.mark.slow
def test_a_fourth_model_under_torchrun(tmp_path: Path) -> None:
    file = tmp_path / "memory.json"
    done = run_script(*SMALL, "--optimizer", "adafactor", "--schedule", "gpipe", file=file)
    assert done.returncode == 0, done.stderr
    check(json.loads(file.read_text()), ALL, 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--runs", "reference"], "--runs reference: choose among naive, all-reduce, dense, rows"),
        (["--steps", "1"], "--steps 1: at least 2 are needed"),
        (["--runs", "rows", "--placement", "v"], "layout='rows'"),
        (["--json", "no/such/folder.json"], "the folder no/such does not exist"),
        (["--json", "same", "--report", "same"], "--json writes to it too"),
        (["--owner", "everybody"], "--owner everybody: choose auto"),
        (["--devices", "9"], "--devices 9 with --stages 4"),
    ],
)
def test_bad_input_is_said_in_a_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["memory", *arguments]) == 2
    errors = capsys.readouterr().err
    assert words in errors
    assert errors.count("\n") == 1


def test_the_script_refuses_what_it_does_not_train() -> None:
    done = run_script("--schedule", "interleaved", file=Path("memory.json"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "use gpipe or 1f1b" in done.stderr
