"""scripts/test_with_torch: what it refuses, and which versions it would install."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.mark.parametrize("arguments", [[], ["latest"], ["tests/test_rows.py"], ["2"], ["../../x"]])
def test_it_asks_for_a_version(arguments: list[str]) -> None:
    done = subprocess.run(
        [str(SCRIPTS / "test_with_torch"), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "usage: scripts/test_with_torch VERSION [arguments for pytest]" in done.stderr
    assert done.stdout == ""


def functions_of(script: str, *names: str) -> str:
    """The text of some functions of a shell script, as its lines have them."""
    text = (SCRIPTS / script).read_text()
    found = []
    for name in names:
        start = text.index(f"\n{name}() {{")
        found.append(text[start : text.index("\n}\n", start) + 3])
    return "".join(found)


@pytest.mark.parametrize(("version", "pins"), [("", ["torch==2.13.0"]), ("2.11.0", ["torch==2.11.0"])])
def test_another_torch_comes_with_its_own_bounds_and_all_else_as_it_was(
    version: str, pins: list[str]
) -> None:
    script = functions_of("_env.sh", "_constraints")
    command = f"ROOT={SCRIPTS.parent}; TORCH_VERSION={version}; {script} _constraints"
    done = subprocess.run(["bash", "-ec", command], capture_output=True, text=True, timeout=60, check=True)
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("torch==")] == pins
    assert "ray==2.60.0" in lines
    assert any(line.startswith("setuptools==") for line in lines) == (not version)
