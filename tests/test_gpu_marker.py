"""The `gpu` marker: a test that needs GPUs says how many, and what is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from gpu_marker import what_is_missing

HERE = Path(__file__).resolve().parent

CONFTEST = """
import pytest
import torch
from gpu_marker import add_option, skip_without_gpus


def pytest_addoption(parser):
    add_option(parser)


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu(number): needs GPUs")
    torch.cuda.device_count = lambda: {available}


def pytest_runtest_setup(item):
    skip_without_gpus(item)
"""

TESTS = """
import pytest


@pytest.mark.gpu
def test_one():
    pass


@pytest.mark.gpu(2)
def test_two():
    pass


@pytest.mark.gpu(4)
@pytest.mark.parametrize("number", [1, 2])
def test_four(number):
    pass


def test_none():
    pass
"""


def run(folder: Path, available: int, *arguments: str) -> str:
    """What pytest prints of tests that need 0, 1, 2 and 4 GPUs, of which there are `available`."""
    (folder / "conftest.py").write_text(CONFTEST.replace("{available}", str(available)))
    (folder / "test_them.py").write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", str(folder), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=folder,
        env={"PYTHONPATH": str(HERE), "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_tests_are_skipped_that_need_more_gpus_than_there_are(tmp_path: Path) -> None:
    output = run(tmp_path, 2)
    assert "needs 4 GPUs, and CUDA_VISIBLE_DEVICES shows torch 2" in output
    assert "SKIPPED [2]" in output
    assert "3 passed, 2 skipped" in output


@pytest.mark.slow
def test_all_run_on_the_cpu_when_that_is_asked_for(tmp_path: Path) -> None:
    output = run(tmp_path, 0, "--gpu-device", "cpu")
    assert "5 passed" in output
    assert "skipped" not in output


@pytest.mark.parametrize(
    ("needed", "available", "missing"),
    [
        (1, 0, "needs 1 GPU, and torch finds no CUDA device"),
        (4, 0, "needs 4 GPUs, and torch finds no CUDA device"),
        (2, 1, "needs 2 GPUs, and CUDA_VISIBLE_DEVICES shows torch 1"),
        (1, 1, None),
        (2, 8, None),
    ],
)
def test_a_skip_says_what_is_missing(needed: int, available: int, missing: str | None) -> None:
    assert what_is_missing(needed, available) == missing


def test_every_test_of_the_folder_is_marked() -> None:
    files = sorted((HERE / "gpu").glob("test_*.py"))
    assert len(files) == 2
    for file in files:
        lines = file.read_text().splitlines()
        for number, line in enumerate(lines):
            if line.startswith("def test_"):
                above = lines[max(0, number - 4) : number]
                assert any(each.startswith("@pytest.mark.gpu(") for each in above), f"{file.name}: {line}"
