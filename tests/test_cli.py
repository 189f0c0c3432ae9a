"""The command line: options, exit status, progress, tables and the JSON file."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from ray_jobs import SMALL, job
from rich.console import Console

from piper_owner.cli import main
from piper_owner.cli.checkpoint_options import CheckpointOptions
from piper_owner.cli.options import TrainOptions, build_parser, read
from piper_owner.cli.progress import show_progress
from piper_owner.cli.render import loss_tolerance, print_result, verdict
from piper_owner.cli.train import write_json
from piper_owner.cli.units import format_bytes, format_difference, format_seconds
from piper_owner.directives import Program
from piper_owner.directives.model import Filter, Split
from piper_owner.errors import ConfigError
from piper_owner.executor.config import RunKind, TrainConfig
from piper_owner.executor.plan import plan_run
from piper_owner.executor.results import Restart, RunResult, TiedBytes, TrainResult
from piper_owner.runtime.progress import StepProgress
from piper_owner.transport.messages import BytesSent


def options(*arguments: str) -> TrainOptions:
    return read(build_parser().parse_args(["train", *arguments]))


def made_run(kind: RunKind, loss: float, *, optimizer: tuple[int, ...], weight: float = 1.0) -> RunResult:
    ranks = range(4)
    return RunResult(
        kind=kind,
        losses=(9.0, loss),
        seconds_per_step=0.25,
        tokens_per_second=8192.0,
        bytes_sent_per_step={rank: BytesSent(grads=4_194_304 if rank == 3 else 0) for rank in ranks},
        tied_bytes={
            rank: TiedBytes(optimizer=optimizer[rank], weights=4_194_304 if rank == 3 else 0)
            for rank in ranks
        },
        optimizer_state_bytes=dict.fromkeys(ranks, 0),
        weights={0: {"embed.weight": torch.tensor([weight])}},
    )


def made_result(*runs: RunResult, **changes: object) -> TrainResult:
    config = replace(TrainConfig(), **changes)  # type: ignore[arg-type]
    return TrainResult(
        config=config,
        text="numbers",
        ownership=plan_run(config, RunKind.OWNER).ownership,
        runs={run.kind: run for run in runs},
        replicas_equal=True,
    )


FULL = (
    made_run(RunKind.OWNER, 7.0, optimizer=(8_388_608, 0, 0, 0)),
    made_run(RunKind.REFERENCE, 7.0, optimizer=(8_388_608, 0, 0, 0)),
    made_run(RunKind.NAIVE, 7.5, optimizer=(8_388_608, 0, 0, 8_388_608), weight=1.5),
    made_run(RunKind.ALLREDUCE, 7.0, optimizer=(8_388_608, 0, 0, 8_388_608)),
)


def printed(result: TrainResult, *, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_result(result, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# Options


def test_defaults_are_those_of_the_config() -> None:
    assert options() == TrainOptions(config=TrainConfig())


def test_every_option_arrives(tmp_path: Path) -> None:
    given = options(
        *("--stages", "6", "--devices", "2", "--placement", "v", "--schedule", "gpipe"),
        *("--microbatches", "5", "--microbatch-size", "3", "--sequence-length", "7"),
        *("--layers", "8", "--hidden", "24", "--heads", "3", "--vocab", "300", "--owner", "0"),
        *("--layout", "dense", "--dp", "3", "--scope", "global"),
        *("--model", "models:build"),
        *("--optimizer", "sgd", "--lr", "0.5", "--clip", "2", "--dtype", "float64", "--steps", "9"),
        *("--seed", "4", "--check-every", "6", "--chunk-bytes", "1000", "--timeout", "7.5"),
        *("--text", "some/text", "--json", "out.json", "--address", "h:1", "--compare", "naive, reference"),
        *("--checkpoint", str(tmp_path), "--every", "3", "--resume", "--max-restarts", "2"),
        *("--snapshot", "6", "--device", "cuda", "--gpus-per-rank", "0.5"),
    )
    config = TrainConfig(
        stages=6, devices=2, placement="v", schedule="gpipe", microbatches=5, microbatch_size=3,
        sequence_length=7, layers=8, hidden=24, heads=3, vocab=300, owner=0, optimizer="sgd", lr=0.5,
        clip=2.0, dtype="float64", steps=9, seed=4, check_every=6, chunk_bytes=1000, timeout_seconds=7.5,
        layout="dense", dp=3, scope="global", model="models:build", device="cuda", gpus_per_rank=0.5,
    )  # fmt: skip
    default = TrainConfig()
    same = [f.name for f in fields(config) if getattr(config, f.name) == getattr(default, f.name)]
    same.remove("program")  # says what some of the others do
    assert same == [], "an option that is not changed is not tested"
    assert given == TrainOptions(
        config=config,
        compare=(RunKind.REFERENCE, RunKind.NAIVE),
        text=Path("some/text"),
        json=Path("out.json"),
        address="h:1",
        checkpoint=CheckpointOptions(path=tmp_path, every=3, resume=True, max_restarts=2, snapshot=6),
        stages_given=True,
    )


def test_a_program_stands_in_place_of_options(tmp_path: Path) -> None:
    file = tmp_path / "schedule.json"
    file.write_text('[{"op": "split", "filter": {}, "num_microbatches": 3}]')
    program = Program(directives=(Split(filter=Filter(), num_microbatches=3),))
    given = options("--directives", str(file), "--scope", "global", "--owner", "last")
    assert given.config == TrainConfig(program=program, scope="global", owner="last")
    for option, value in (
        ("--stages", "4"), ("--devices", "4"), ("--placement", "loop"), ("--schedule", "1f1b"),
        ("--microbatches", "8"), ("--dp", "1"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"^{option} with --directives, whose program says that"):
            options("--directives", str(file), option, value)


def test_regions_decide_the_number_of_stages(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    assert main(["train", "--model", "annotated_models:TwoRegions", "--stages", "3"]) == 2
    assert "--stages 3: annotated_models:TwoRegions has 2 regions, and so 2 stages" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["auto", "first", "last"])
def test_owner_by_word(value: str) -> None:
    assert options("--owner", value).config.owner == value


def test_help_explains_every_option_within_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        main(["train", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    names = {field.name for field in fields(TrainConfig)} - {"timeout_seconds", "program"}
    shown = text.partition("options:")[2]
    pictures = ("report", "trace", "trace-steps", "profile")
    for name in (
        *names,
        "timeout",
        "text",
        "compare",
        "json",
        "address",
        "directives",
        *pictures,
        "checkpoint",
        "every",
        "resume",
        "max-restarts",
        "snapshot",
    ):
        assert f"--{name.replace('_', '-')} " in shown
    for heading in (
        "pipeline:",
        "model:",
        "training:",
        "data:",
        "comparison and output:",
        "checkpoints:",
        "cluster:",
    ):
        assert heading in text
    assert shown.count("(default") == len(names) + 15


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("piper-owner ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices", "5", "--stages", "4"], "a device without a stage has nothing to do"),
        (["--vocab", "255"], "at least 256"),
        (["--json", "no/such/folder/out.json"], "the folder no/such/folder does not exist"),
        (["--json", "."], "this is a folder"),
        (["--resume"], "--resume needs --checkpoint DIR"),
        (["--every", "2"], "--every needs --checkpoint DIR"),
        (["--max-restarts", "2"], "--max-restarts needs --checkpoint DIR, or --snapshot N"),
        (["--snapshot", "2"], "--snapshot needs --max-restarts K"),
        (["--snapshot", "0", "--max-restarts", "2"], "--snapshot 0: at least 1 step is needed"),
        (["--checkpoint", "run", "--max-restarts", "-1"], "--max-restarts -1: 0 restarts, or more"),
        (["--checkpoint", "run", "--every", "0"], "--every 0: at least 1 step is needed"),
        (["--checkpoint", "no/such/folder/run"], "the folder no/such/folder does not exist"),
        (["--checkpoint", "README.md"], "this is a file"),
        (["--checkpoint", "no-run-here", "--resume"], "no-run-here does not exist: there is no checkpoint"),
        (["--compare", "naive,magic"], "--compare magic: choose among reference, naive, allreduce"),
        (["--compare", "owner"], "the owner run is always there"),
        (["--owner", "middle"], "--owner middle: choose auto, first, last, or the number of a rank"),
        (["--owner", "-1"], "--owner -1"),
        (["--owner", "1"], "rank 1 cannot own 'embed.weight'"),
        (["--text", "no/such/text"], "no/such/text does not exist"),
        (["--address", "nonsense"], "--address nonsense: give the HOST:PORT"),
        (["--steps", "0"], "--steps 0: at least 1"),
        (["--lr", "nan"], "--lr nan"),
        (["--gpus-per-rank", "0"], "--gpus-per-rank 0: a rank uses one GPU or a part of it"),
        (["--device", "cuda", "--gpus-per-rank", "1.5"], "more than 0 and at most 1"),
    ],
)
def test_bad_input_is_found_before_anything_starts(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Importing the driver is the first thing that a start does; here it would fail otherwise.
    monkeypatch.setitem(sys.modules, "piper_owner.runtime.driver", None)
    assert main(["train", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("piper-owner: error: ")
    assert "Traceback" not in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "4 ranks need 4 GPUs (one for each rank), and this machine has no GPU; use --device cpu"),
        (("--gpus-per-rank", "0.5"), "4 ranks need 2 GPUs (0.5 for each rank)"),
        (("--stages", "1"), "1 rank needs 1 GPU (one for each rank)"),
    ],
)
def test_gpus_that_are_not_there_are_found_before_anything_starts(
    arguments: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "piper_owner.runtime.driver", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert main(["train", "--device", "cuda", *arguments]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("piper-owner: error: --device cuda: ")
    assert message in " ".join(errors.split())


@pytest.mark.parametrize(
    ("content", "message"), [(b"", "empty"), (b"\0\1", "binary"), (b"a b", "only 3 tokens")]
)
def test_text_that_cannot_be_trained_on(
    content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "text"
    file.write_bytes(content)
    assert main(["train", "--text", str(file), "--vocab", "256"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--stages", "two"], ["--pp", "2"], ["--schedule", "1b1f"], ["--step", "3"], ["extra"]]
)
def test_unknown_options_and_words_are_bad_input(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", *arguments])
    assert ended.value.code == 2
    assert "error: " in capsys.readouterr().err


# The JSON file


def test_json_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    write_json(file, {"a": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(file, {"a": math.nan})
    assert json.loads(file.read_text()) == {"a": 1}
    write_json(file, {"a": 2})
    assert json.loads(file.read_text()) == {"a": 2}
    assert list(tmp_path.iterdir()) == [file]


def test_json_that_cannot_be_put_in_place_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="no"):
        write_json(tmp_path / "out.json", {})
    assert list(tmp_path.iterdir()) == []


def test_json_to_a_device_does_not_replace_it() -> None:
    write_json(Path(os.devnull), {"a": 1})
    assert not Path(os.devnull).is_file()


# What is printed


def test_table_shows_the_runs_side_by_side_within_80_columns() -> None:
    text = printed(made_result(*FULL, steps=2))
    assert max(map(len, text.splitlines())) <= 80
    assert "tie embed.weight = head.weight: one parameter, 8192 x 128 float32" in text
    assert "rank 0 holds a replica (stage 0, lookup use, rows layout)" in text
    assert "rank 3 owns it (stage 3, dense use, dense layout)" in text
    rows = {line[:24].strip(): line[24:].split() for line in text.splitlines()}
    assert rows["loss at step 2"] == ["7.00000", "7.00000", "7.50000", "7.00000"]
    assert rows["largest loss diff"] == ["0", "-", "0.5", "0"]
    assert rows["largest weight diff"] == ["0", "-", "0.5", "0"]
    assert rows["weights of tie"] == rows["held by rank 3"] == ["4.19", "MB"] * 4
    assert rows["held by rank 0"] == ["0", "B"] * 4
    assert rows["on rank 3"] == ["0", "B", "0", "B", "8.39", "MB", "8.39", "MB"]
    assert rows["optimizer state of tie"] == ["8.39", "MB", "8.39", "MB", "16.8", "MB", "16.8", "MB"]
    assert rows["sent by rank 3"] == ["4.19", "MB"] * 4
    assert rows["time per step"] == ["250", "ms"] * 4
    assert "\u2026" not in text, "a column was cut"


def test_verdict_is_computed() -> None:
    lines = verdict(made_result(*FULL, steps=2))
    assert lines[0] == "Replicas equal the owner's value bit for bit."
    assert lines[1].startswith("owner trains like the reference: losses differ by 0, within the 1e-05")
    assert lines[2].startswith(
        "naive does NOT train like the reference: losses differ by 0.5, weights by 0.5;"
    )
    assert lines[3].startswith("allreduce trains like the reference, with 2.0 times the tied optimizer state")
    swapped = {RunKind.OWNER: RunKind.NAIVE, RunKind.NAIVE: RunKind.OWNER}
    runs = [replace(run, kind=swapped.get(run.kind, run.kind)) for run in FULL]
    lines = verdict(made_result(*runs, steps=2))
    assert any(line.startswith("owner does NOT train like the reference") for line in lines)
    assert any(line.startswith("naive trains like the reference") for line in lines)


def test_verdict_of_faults() -> None:
    wrong = replace(made_result(*FULL, steps=2), replicas_equal=False)
    assert verdict(wrong)[0] == "FAULT: a replica does not hold the owner's value."
    nan = made_run(RunKind.OWNER, math.nan, optimizer=(8, 0, 0, 0))
    assert verdict(made_result(nan, FULL[1], steps=2))[1].startswith(
        "owner does NOT train like the reference"
    )
    off = made_run(RunKind.OWNER, 7.0, optimizer=(8, 0, 0, 0), weight=1 + 1e-6)
    for dtype, expected in (("float64", "owner does NOT"), ("float32", "owner trains like")):
        assert verdict(made_result(off, FULL[1], steps=2, dtype=dtype))[1].startswith(expected)


def test_verdict_without_a_reference_and_without_replicas() -> None:
    lines = verdict(made_result(FULL[0], placement="v", devices=2, steps=2))
    assert lines[0] == "One device holds all of the tie: one parameter, no messages."
    assert "--compare reference" in lines[1]


def test_verdict_without_a_tie() -> None:
    result = made_result(FULL[0], steps=2)
    untied = replace(result, ownership=replace(result.ownership, ties=()))
    assert verdict(untied)[0] == "The model has no tied parameter: there is nothing to keep in step."


def test_tolerance_grows_with_the_steps() -> None:
    assert loss_tolerance(made_result(FULL[0], steps=5)) == 1e-5
    assert loss_tolerance(made_result(FULL[0], steps=40)) == pytest.approx(8e-5)
    assert loss_tolerance(made_result(FULL[0], steps=1, dtype="float64")) == 1e-10


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (9994, "9.99 kB"), (9996, "10.0 kB"),
        (99_960, "100 kB"), (999_499, "999 kB"), (999_500, "1.00 MB"), (4_194_304, "4.19 MB"),
        (7_000_000_000, "7.00 GB"), (2 * 10**16, "20000 TB"),
    ],
)  # fmt: skip
def test_bytes_in_words(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_other_units() -> None:
    seconds = [format_seconds(value) for value in (1.324, 0.9996, 0.085, 0.0012)]
    assert seconds == ["1.32 s", "1.00 s", "85 ms", "1.2 ms"]
    differences = [format_difference(value) for value in (0.0, 2.44e-7, 0.128, 6.5, math.nan)]
    assert differences == ["0", "2.4e-07", "0.13", "6.5", "not a number"]


@pytest.mark.parametrize(("steps", "lines"), [(2, 2), (40, 5), (43, 6)])
def test_progress_without_a_terminal_is_a_plain_line_now_and_then(steps: int, lines: int) -> None:
    console = Console(file=io.StringIO(), width=40)
    with show_progress(console, TrainConfig(steps=steps), [RunKind.OWNER]) as shown:
        for step in range(1, steps + 1):
            shown.on_step(
                StepProgress(run=RunKind.OWNER, step=step, loss=1.5, tokens_per_second=2e3, tied_bytes=8000)
            )
    assert isinstance(console.file, io.StringIO)
    written = console.file.getvalue().splitlines()
    assert len(written) == 1 + lines
    assert written[-1] == f"owner      step {steps:>4}/{steps}  loss 1.5000  2,000 tok/s  tie 8.00 kB/step"
    assert "\x1b" not in console.file.getvalue()


def test_progress_on_a_terminal_shows_every_run() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    runs = [RunKind.OWNER, RunKind.REFERENCE]
    with show_progress(console, TrainConfig(steps=2), runs) as shown:
        shown.on_step(
            StepProgress(run=RunKind.OWNER, step=1, loss=1.5, tokens_per_second=2e3, tied_bytes=8_400_000)
        )
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "1/2" in text
    assert "loss 1.5000  2,000 tok/s  tie 8.40 MB/step" in text
    assert "reference" in text


@pytest.mark.parametrize("is_terminal", [False, True])
def test_progress_goes_back_at_a_restart_and_says_why(is_terminal: bool) -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=is_terminal)
    restart = Restart(run=RunKind.OWNER, step=9, rank=1, why="step 9: rank 1 died at SEND[a.b]", from_step=5)
    with show_progress(console, TrainConfig(steps=10), [RunKind.OWNER]) as shown:
        shown.on_step(
            StepProgress(run=RunKind.OWNER, step=8, loss=1.5, tokens_per_second=2e3, tied_bytes=8000)
        )
        shown.on_restart(restart)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "step 9: rank 1 died at SEND[a.b]; the owner run goes on after step 5" in text
    assert (" 5/10" in text) is is_terminal


# The whole command


def test_command_proves_its_result(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    compared = ("--compare", "reference,naive,allreduce")
    with job(*SMALL, "--dtype", "float64", "--steps", "5", *compared, "--json", str(file)) as running:
        status, out, errors = running.end()
    assert status == 0, errors
    written = json.loads(file.read_text())
    assert written["max_abs_loss_diff"]["owner"] < 1e-10
    assert written["max_abs_param_diff"]["owner"] < 1e-10
    assert written["max_abs_param_diff"]["naive"] > 1e-4
    assert written["replicas_equal"] is True
    assert written["config"]["text"] == "the Python standard library's source"
    assert "owner trains like the reference" in out
    assert "naive does NOT train like the reference" in out
    assert "\x1b" not in out + errors
    assert max(map(len, out.splitlines())) <= 80
    assert "Traceback" not in errors
    assert "raylet" not in errors, "Ray's own words are noise here"


def test_python_m_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "piper_owner", "--version"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.startswith("piper-owner ")
