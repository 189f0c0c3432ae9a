"""The benchmark of the tied sync: its figures, its command, and the script that shapes a link."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from piper_owner.bench.config import BenchConfig, Host, StepWay, Way
from piper_owner.bench.launch import LOCAL, run_pair
from piper_owner.bench.predict import PREDICTED, Inputs, planned_exposed
from piper_owner.bench.result import (
    EXPOSED_HEADER,
    STEPS_HEADER,
    WAYS_HEADER,
    BenchResult,
    Exposed,
    WayFigures,
)
from piper_owner.cli import main
from piper_owner.cli.bench import print_figures
from piper_owner.errors import ConfigError, DataError, RunError

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "bench_network.py"
TINY = (
    *("--vocab", "600", "--hidden", "8", "--tokens", "64", "--rounds", "1", "--chunk-bytes", "4096"),
    *("--steps-vocab", "256", "--steps-hidden", "8", "--steps-sequence-length", "4"),
)
# What the figures of one way are called, and the whole file.
FIGURES = {"sync_seconds", "step_seconds", "total_seconds", "bytes", "limit_seconds"}
KEYS = {"rate_bits_per_s", "table", "tokens", "unique_rows", "ways", "steps", "exposed", "inputs", "auto"}
STEPS = ["untied", "allreduce", "dense", "dense_last", "rows"]
NUM_BYTES = 600 * 8 * 4


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Bytes are tokens of their own in a vocabulary that has no room for more."""
    file = tmp_path / "text"
    file.write_text("".join(f"line {number * number}\n" for number in range(2000)), encoding="ascii")
    return file


def check_inputs(value: object) -> None:
    assert isinstance(value, dict)
    assert set(value) == set(Inputs.__dataclass_fields__)
    assert all(seconds > 0 for name in ("forward_seconds", "backward_seconds") for seconds in value[name])
    assert all(value[name] > 0 for name in set(value) - {"forward_seconds", "backward_seconds"})


def check_figures(value: dict[str, object], *, steps: bool = True) -> dict[str, dict[str, float]]:
    assert set(value) == KEYS
    assert value["table"] == [600, 8]
    assert value["tokens"] == 64
    assert 1 < int(str(value["unique_rows"])) <= 64
    assert isinstance(value["steps"], dict)
    assert list(value["steps"]) == (STEPS if steps else [])
    assert all(seconds > 0 for seconds in value["steps"].values())
    assert isinstance(value["exposed"], dict)
    assert list(value["exposed"]) == (STEPS[2:] if steps else [])
    for exposed in value["exposed"].values():
        assert exposed["lowest_seconds"] <= exposed["measured_seconds"] <= exposed["highest_seconds"]
    assert value["auto"] == ("rows" if steps else None)
    if steps:
        check_inputs(value["inputs"])
    ways = value["ways"]
    assert isinstance(ways, dict)
    assert list(ways) == ["allreduce", "dense_serial", "dense", "rows"]
    for figures in ways.values():
        assert set(figures) == FIGURES
        assert all(number > 0 for number in figures.values())
    assert ways["rows"]["bytes"] < 0.5 * ways["allreduce"]["bytes"]
    # Whether the two directions are busy at once is what sets these two apart.
    assert ways["dense_serial"]["limit_seconds"] > 1.8 * ways["dense"]["limit_seconds"]
    return ways


def test_command_on_loopback(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    assert main(["bench", *TINY, "--text", str(text), "--json", str(file)]) == 0
    value = json.loads(file.read_text(encoding="ascii"))
    ways = check_figures(value)
    assert ways["allreduce"]["bytes"] == 2 * NUM_BYTES
    assert 2 * NUM_BYTES < ways["dense_serial"]["bytes"] < 2.1 * NUM_BYTES
    # Ids there, rows and their gradients; and headers.
    payload = value["unique_rows"] * (4 + 2 * 8 * 4)
    assert payload < ways["rows"]["bytes"] < payload + 2000
    out = capsys.readouterr().out
    assert "600 x 8 float32" in out
    for way in (*Way, *StepWay):
        assert f"\n{way.value} " in out


def test_training_steps_may_be_left_out(text: Path) -> None:
    config = BenchConfig(vocab=600, hidden=8, tokens=64, rounds=1, skip_steps=True, rate=1e9)
    result = run_pair(config, LOCAL, text=text)
    check_figures(result.to_json(), steps=False)
    assert result.rate_bits_per_s == 1e9
    assert result.ways[Way.ALLREDUCE].limit_seconds == pytest.approx(8 * NUM_BYTES / 1e9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--vocab", "255"], "--vocab 255: a byte-level vocabulary"),
        (["--steps-vocab", "255"], "--steps-vocab 255"),
        (["--rounds", "0"], "--rounds 0: at least 1"),
        (["--steps-hidden", "0"], "--steps-hidden 0: at least 1"),
        (["--timeout", "nan"], "--timeout nan"),
        (["--skip-steps", "--timeout", "0"], "--timeout 0"),
        (["--json", "no/such/folder/out.json"], "the folder no/such/folder does not exist"),
        (["--json", "."], "this is a folder"),
        (["--text", "no/such/text"], "no/such/text does not exist"),
    ],
)
def test_bad_input_is_found_before_anything_starts(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    assert main(["bench", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_text_may_be_too_short(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("few words", encoding="ascii")
    with pytest.raises(DataError, match="--tokens asks for 64"):
        run_pair(BenchConfig(vocab=256, hidden=8, tokens=64), LOCAL, text=file)


def children() -> set[str]:
    """The processes that this thread has started and not waited for."""
    return set(Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split())


def test_failed_rank_is_named_and_nothing_stays(text: Path) -> None:
    hosts = (Host(), Host(interface="no-such-interface"))
    config = BenchConfig(vocab=600, hidden=8, tokens=64, rounds=1, skip_steps=True, timeout_seconds=3)
    before = children()
    with pytest.raises(RunError, match=r"rank 1: .*interface 'no-such-interface'"):
        run_pair(config, hosts, text=text)
    assert children() <= before


def test_help_fits_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        main(["bench", "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "--steps-microbatches N" in out


# 16,384,000 parameters in 65.5 MB, over a link of 1 Gbit/s: 0.524 s.
INPUTS = Inputs(
    forward_seconds=(0.05, 0.1),
    backward_seconds=(0.12, 0.2),
    lookup_seconds=0.02,
    rows_lookup_seconds=0.001,
    table_step_seconds=0.03,
    rate_bits_per_s=1e9,
    latency_seconds=1e-4,
    num_rows=500,
)
WIRE = 32_000 * 512 * 4 * 8 / 1e9


class TestPlannedExposed:
    def test_dense_waits_for_the_link_and_steps_one_table_less(self) -> None:
        found = planned_exposed(BenchConfig(), INPUTS)
        # One more chunk is under way, and one table less is stepped behind the last backward.
        chunk = WIRE / 16
        assert WIRE - 0.03 < found[StepWay.DENSE] < WIRE - 0.03 + 2 * chunk
        # Both begin when the first stage ends its last backward, where the other gradient waits or begins.
        assert found[StepWay.DENSE_LAST] == pytest.approx(found[StepWay.DENSE] + 1e-4, rel=1e-6)

    def test_rows_wait_for_two_messages_and_save_a_part_of_each_backward(self) -> None:
        rows = planned_exposed(BenchConfig(), INPUTS)[StepWay.ROWS]
        assert rows < 0.5 * WIRE
        costly = planned_exposed(BenchConfig(), replace(INPUTS, lookup_seconds=0.04))[StepWay.ROWS]
        assert costly < rows - 0.02
        many = planned_exposed(BenchConfig(), replace(INPUTS, num_rows=5000))[StepWay.ROWS]
        # Ids there, rows back, and their gradients: one behind the other.
        assert many - rows == pytest.approx(4500 * (4 + 2 * 512 * 4) * 8 / 1e9, rel=0.05)


def made_result() -> BenchResult:
    figures = WayFigures(
        sync_seconds=0.2, step_seconds=0.1, total_seconds=0.3, bytes=4_000_000, limit_seconds=0.1
    )
    ways = dict.fromkeys(Way, figures) | {
        Way.ROWS: replace(figures, sync_seconds=0.02, total_seconds=0.12, limit_seconds=0.02)
    }
    steps = dict(zip(StepWay, (2.0, 2.2, 2.1, 2.09, 1.9), strict=True))
    return BenchResult(
        rate_bits_per_s=1e9,
        table=(1000, 10),
        tokens=9,
        unique_rows=5,
        ways=ways,
        steps=steps,
        exposed=dict(zip(PREDICTED, map(made_exposed, (0.1, 0.09, -0.1)), strict=True)),
        inputs=INPUTS,
        auto=StepWay.ROWS,
    )


def made_exposed(seconds: float) -> Exposed:
    return Exposed(
        predicted_seconds=1.1 * seconds,
        measured_seconds=seconds,
        lowest_seconds=seconds - 1.0,
        highest_seconds=seconds + 1.0,
    )


def test_result_survives_json() -> None:
    result = made_result()
    assert BenchResult.from_json(json.loads(json.dumps(result.to_json()))) == result


def test_command_fits_80_columns() -> None:
    console = Console(file=io.StringIO(), width=80)
    print_figures(
        replace(
            made_result(),
            ways=dict.fromkeys(
                Way,
                WayFigures(
                    sync_seconds=12.3456,
                    step_seconds=1.2345,
                    total_seconds=13.5801,
                    bytes=309_440_000,
                    limit_seconds=12.3778,
                ),
            ),
        ),
        console,
    )
    assert isinstance(console.file, io.StringIO)
    out = console.file.getvalue()
    for cell in ("dense_serial", "12345.6", "1234.5", "13580.1", "309.44", "12377.8", "1.00x", "1.000x"):
        assert f"{cell} " in out.replace("\n", " "), "no cell is cut"


def test_tables_and_notes() -> None:
    result = made_result()
    assert {len(row) for row in result.way_cells()} == {len(WAYS_HEADER)}
    assert {len(row) for row in result.step_cells()} == {len(STEPS_HEADER)}
    assert {len(row) for row in result.exposed_cells()} == {len(EXPOSED_HEADER)}
    assert result.exposed_cells()[-1] == ("rows", "-110.0", "-100.0", "-1100.0 to 900.0", "1.10x")
    assert result.way_cells()[-1] == (*("rows", "20.0", "100.0", "120.0", "4.00", "20.0", "1.00x", "0.400x"),)
    assert result.notes() == [
        "rows: a sync takes 1.00x its limit; an all-reduce takes 10.0x as long (5.0x by the limits)",
        "dense: sync and step take 1.000x the time of all-reduce and both steps",
        "1F1B: a whole step takes 0.950x the untied one with rows, 1.100x with all-reduce",
        "least exposed first, predicted: rows, dense_last, dense; measured: rows, dense_last, dense; auto "
        "takes rows",
    ]
    equal = dict(result.exposed) | {
        StepWay.DENSE_LAST: replace(result.exposed[StepWay.DENSE_LAST], predicted_seconds=0.1101)
    }
    assert replace(result, exposed=equal).notes()[-1] == (
        "least exposed first, predicted: rows, dense = dense_last; measured: rows, dense_last, dense; auto "
        "takes rows"
    )


# The script


def script(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **changes}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=60).stdout


def test_script_over_a_shaped_link(text: Path, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    done = script(*TINY, "--text", str(text), "--json", str(file), "--rate", "500mbit")
    assert done.returncode == 0, done.stderr
    if done.stdout.startswith("skipped: "):
        pytest.skip(done.stdout.strip())
    value = json.loads(file.read_text(encoding="ascii"))
    ways = check_figures(value)
    assert value["rate_bits_per_s"] == 5e8
    assert ways["allreduce"]["bytes"] > 2 * NUM_BYTES, "the interface counts the headers of packets too"
    assert "198.18.0" not in subprocess.run(["ip", "address"], capture_output=True, text=True).stdout
    assert done.stderr.count("\n") == 1, "nothing but that it measures"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_script_leaves_nothing_when_it_is_ended(number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), "--rounds", "1000"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        said = process.stderr.readline()
        if not said:
            pytest.skip(process.stdout.read().strip())
        assert said.startswith("measuring between two hosts")
        run = f"piper-owner-{process.pid}-"
        assert namespaces().count(run) == 2
        process.send_signal(number)
        process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == (130 if number == signal.SIGINT else 128 + number)
    assert run not in namespaces()


def test_script_says_why_it_skips(tmp_path: Path) -> None:
    done = script("--skip-steps", PATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("skipped: ")
    assert "piper-owner bench" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "fast"], "--rate fast: give a number"),
        (["--rate", "0gbit"], "--rate 0"),
        (["--plot", "no/such/folder/out.png"], "the folder no/such/folder does not exist"),
        (["--vocab", "255"], "--vocab 255"),
    ],
)
def test_script_refuses_bad_input(arguments: list[str], message: str) -> None:
    done = script(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location("bench_network", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    file = tmp_path / "out.png"
    module.plot(made_result(), file)
    assert file.read_bytes().startswith(b"\x89PNG")


def test_rate_must_be_a_number() -> None:
    with pytest.raises(ConfigError, match="--rate nan"):
        BenchConfig(rate=float("nan"))
