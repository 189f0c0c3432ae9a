"""`scripts/gpu_check`: every check in turn, then a short table."""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import torch

from piper_owner.gpu_check.bandwidth import check_owner_step, check_rows
from piper_owner.gpu_check.crew import Crew, CrewError
from piper_owner.gpu_check.ordering import check_order, check_syncs
from piper_owner.gpu_check.result import CheckResult, Figure, Report, Status, format_table
from piper_owner.gpu_check.sizes import FULL, TINY, Sizes
from piper_owner.gpu_check.training import check_memory, check_training

__all__ = ["main"]

_OK: Final = 0
_FAILED: Final = 1
_BAD_INPUT: Final = 2

_DESCRIPTION: Final = """\
Check on one GPU what piper-owner promises: two ranks share it, over host memory.
It needs torch and numpy; neither Ray nor an installed piper-owner. A few minutes.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks; 0 if none failed, 1 if one did, 2 where there is no GPU or an option is wrong."""
    options = _parser().parse_args(arguments)
    if options.json is not None and not options.json.absolute().parent.is_dir():
        return _refuse(
            f"--json {options.json}: the folder {options.json.parent} does not exist; make it first"
        )
    if options.device == "cuda" and not torch.cuda.is_available():
        return _refuse(
            f"torch {torch.__version__} finds no GPU on this machine; --device cpu runs the checks that make "
            "sense on a CPU, tiny"
        )
    is_cuda = options.device == "cuda"
    sizes = FULL if is_cuda else TINY
    with Crew("cuda:0" if is_cuda else "cpu", sizes) as crew:
        crew.start(2)
        report = Report(machine=_machine(is_cuda), checks=tuple(_run_all(crew, sizes, is_cuda)))
    print(format_table(report))
    if options.json is not None:
        options.json.write_text(json.dumps(report.to_json(), indent=2) + "\n", encoding="utf-8")
    return _OK if report.is_ok else _FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/gpu_check", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cuda: the first GPU that CUDA_VISIBLE_DEVICES shows; cpu: tiny sizes, to test the checks "
        "themselves (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    return parser


def _refuse(what: str) -> int:
    print(f"gpu_check: error: {what}", file=sys.stderr)
    return _BAD_INPUT


def _run_all(crew: Crew, sizes: Sizes, is_cuda: bool) -> Iterator[CheckResult]:
    """Each check's results, as they come, with a line to stderr for each."""
    without = "the CPU has no streams, no allocator that counts, and nothing to wait for"
    checks: tuple[tuple[str, bool, Callable[[], Iterator[CheckResult]]], ...] = (
        ("train float32", True, lambda: check_training(crew, "float32")),
        ("train bfloat16", True, lambda: check_training(crew, "bfloat16")),
        ("memory", is_cuda, lambda: check_memory(crew, sizes)),
        ("owner step", True, lambda: check_owner_step(crew, sizes, is_judged=is_cuda)),
        ("rows", True, lambda: check_rows(crew)),
        ("stream order", is_cuda, lambda: check_order(crew)),
        ("host syncs", is_cuda, lambda: check_syncs(crew)),
    )
    for name, runs, check in checks:
        results = check() if runs else _skipped(name, without)
        for result in _timed(name, results):
            text = result.reason or result.shown
            print(f"{result.name}: {result.status.value}: {text}", file=sys.stderr, flush=True)
            yield result


def _skipped(name: str, reason: str) -> Iterator[CheckResult]:
    yield CheckResult(name=name, status=Status.SKIPPED, reason=reason)


def _timed(name: str, results: Iterator[CheckResult]) -> Iterator[CheckResult]:
    """The results with their seconds; a check whose processes fail has failed."""
    while True:
        start = time.monotonic()
        try:
            result = next(results)
        except StopIteration:
            return
        except CrewError as error:
            yield CheckResult(
                name=name, status=Status.FAILED, reason=str(error), seconds=time.monotonic() - start
            )
            return
        yield replace(result, seconds=time.monotonic() - start)


def _machine(is_cuda: bool) -> dict[str, Figure]:
    """The card, driver, versions and date, for the table of a run."""
    machine: dict[str, Figure] = {
        "device": torch.cuda.get_device_name(0) if is_cuda else "CPU",
        "driver": _driver() if is_cuda else None,
        "CUDA": torch.version.cuda if is_cuda else None,
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }
    return machine


def _driver() -> str | None:
    """The version of NVIDIA's driver, if its own tool is there to say so."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.split()
    return lines[0] if lines else None
