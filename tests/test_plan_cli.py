"""`piper-owner plan`: what it prints and writes, and what it refuses in one line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from piper_owner.cli import main
from piper_owner.cli.options import build_parser
from piper_owner.dag.graph import Bucket
from piper_owner.directives import lower_program, parse_program

GEMMA = (
    *("--preset", "gemma-2-2b", "--stages", "4", "--schedule", "1f1b"),
    *("--bandwidth", "25GB/s", "--tokens", "16384"),
)


def planned(*arguments: str, tmp_path: Path) -> dict[str, Any]:
    file = tmp_path / "plan.json"
    assert main(["plan", *arguments, "--json", str(file)]) == 0
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_gemma_in_a_process_of_its_own_without_torch() -> None:
    script = (
        "import sys; from piper_owner.cli import main; status = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules; raise SystemExit(status)"
    )
    began = time.perf_counter()
    command = [sys.executable, "-c", script, "plan", *GEMMA]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    seconds = time.perf_counter() - began
    assert (ran.returncode, ran.stderr) == (0, "")
    assert seconds < 20  # a loose bound: about half a second on an idle machine
    assert ran.stdout.isascii() or "\u2500" in ran.stdout
    assert "\x1b" not in ran.stdout
    assert max(map(len, ran.stdout.splitlines())) <= 80
    for words in (
        "gemma-2-2b: 2,614,341,888 parameters",
        "tie embed.weight = head.weight: one parameter, 256000 x 2304 bfloat16",
        "all-reduce",
        "rank 3 owns",
        "exposed sync",
        "memory by rank, rows",
        "advice: rows; against all-reduce: 10.6 GB less",
        "assumed: links of 25 GB/s",
    ):
        assert words in ran.stdout


def test_the_readme_has_what_the_command_prints() -> None:
    readme = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")
    found = re.search(
        r"```bash\npiper-owner (plan .*)\n```\n\n<!-- plan -->\n```\n(.*?)```\n", readme, re.DOTALL
    )
    assert found is not None
    command = [sys.executable, "-m", "piper_owner", *found[1].split()]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=environment)
    printed = "".join(f"{line.rstrip()}\n" for line in ran.stdout.splitlines())
    assert printed == found[2]


def test_the_figures_of_the_file(tmp_path: Path) -> None:
    found = planned(*GEMMA, "--rows", "2840", tmp_path=tmp_path)
    table = 256_000 * 2304
    methods = found["methods"]
    assert list(methods) == ["naive", "all-reduce", "dense", "rows"]
    assert (
        methods["dense"]["traffic"]["3"]["grads"] == methods["dense"]["traffic"]["0"]["weights"] == 2 * table
    )
    assert methods["rows"]["memory"]["0"]["rows"] == 4096 * 2304 * 2
    assert methods["rows"]["ties"][0]["owner"] == 3
    assert found["advice"]["method"] == "rows"
    assert found["model"]["parameters"] == 2_614_341_888
    assert found["rows_from"] == "given"
    tried = {(each["method"], each["owner"]) for each in found["tried"]}
    assert tried == {("dense", 0), ("dense", 3), ("rows", 3)}
    for method in methods.values():
        for memory in method["memory"].values():
            assert memory["total"] == sum(size for kind, size in memory.items() if kind != "total")


def test_of_many_ranks_the_first_and_last_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--stages", "12", "--layers", "12", "--hidden", "512"]) == 0
    out = capsys.readouterr().out
    assert "4 ranks between them are left out" in out
    assert [line.split()[2] for line in out.splitlines() if line.startswith("memory, rank")] == [
        *("0", "1", "2", "3"),
        *("8", "9", "10", "11"),
    ]
    assert "memory, fullest rank" in out
    assert max(map(len, out.splitlines())) <= 80


def test_two_plans_are_equal(tmp_path: Path) -> None:
    assert planned(*GEMMA, tmp_path=tmp_path) == planned(*GEMMA, tmp_path=tmp_path)


def test_the_gpt_of_the_train_command(tmp_path: Path) -> None:
    found = planned("--vocab", "300", "--hidden", "16", "--layers", "3", "--stages", "2", tmp_path=tmp_path)
    assert found["model"]["name"] == "gpt"
    assert found["methods"]["dense"]["ties"][0]["shape"] == [300, 16]


def test_rows_are_counted_in_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    text = tmp_path / "text.txt"
    text.write_text("one two three four five six seven " * 400)
    sizes = ("--vocab", "300", "--hidden", "16", "--tokens", "512")
    found = planned(*sizes, "--text", str(text), tmp_path=tmp_path)
    assert 5 < found["config"]["num_rows"] < 60
    assert "mean of 4 steps of" in found["rows_from"]


def test_the_schedule_as_directives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "schedule.json"
    assert main(["plan", "--stages", "3", "--microbatches", "4", "--emit-directives", str(file)]) == 0
    assert "advice" in capsys.readouterr().out
    program = parse_program(file.read_text(), source=str(file))
    lowered = lower_program(
        program,
        tags=[{"PP": stage} for stage in range(3)],
        stage_edges=[(0, 1), (1, 2)],
        buckets=[Bucket(name=f"stage{stage}", stages=(stage,)) for stage in range(3)],
    )
    assert (lowered.num_microbatches, lowered.placement) == (4, (0, 1, 2))


LONG = "9" * 10**7


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--preset", LONG), "--preset 999"),
        (("--stages", LONG), "--stages 999"),
        (("--bandwidth", LONG), "--bandwidth 999"),
        (("--flops", LONG), "--flops 999"),
        (("--dtype", LONG), "--dtype 999"),
        (("--owner", LONG), "--owner 999"),
        (("--json", LONG), "--json 999"),
        (("--model", LONG), "--model 999"),
        (("--schedule", LONG), "--schedule 999"),
        (("--stage-seconds", "1," * 10**6), "--stage-seconds"),
        (("--latency", LONG), "--latency 999"),
        (("--preset", "gema-2-2b"), "did you mean gemma-2-2b"),
        (("--preset", "gpt2", "--model", "gpt"), "--preset and --model"),
        (("--preset", "gpt2", "--vocab", "300"), "--vocab with --preset"),
        (("--stages", "-3"), "--stages -3: a whole number"),
        (("--stages", "2", "--devices", "3"), "--devices 3 with --stages 2"),
        (("--vocab", "1e9"), "--vocab 1e9"),
        (("--vocab", "99999999999"), "from 1 to 10,000,000"),
        (("--layers", "99999999"), "from 1 to 1,000,000"),
        (("--microbatches", "999999", "--tokens", "9999999"), "forwards a step"),
        (("--rows", "9000"), "the table has only 8,192 rows"),
        (("--owner", "7"), "rank 7 cannot own"),
        (("--hidden", "10", "--heads", "3"), "not a multiple of --heads 3"),
        (("--text", "/no/such/file"), "does not exist"),
        (("--text", "x", "--rows", "4"), "--rows and --text"),
        (("--emit-directives", "/no/such/folder/x"), "does not exist"),
        (("--dtype", "f\u00fcnf\n"), "choose one of"),
    ],
    ids=lambda value: ascii(value)[1:40] if isinstance(value, tuple) else "",
)
def test_what_is_refused_is_refused_in_one_line(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("piper-owner: error: ")
    assert err.count("\n") == 1
    assert len(err) < 700
    assert words in err


def test_the_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        build_parser().parse_args(["plan", "--help"])
    text = capsys.readouterr().out
    assert text.isascii()
    for name in ("--preset", "--bandwidth", "--text", "--emit-directives", "phi-4-mini", "exit status"):
        assert name in text
