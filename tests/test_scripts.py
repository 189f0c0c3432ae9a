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


def pins(version: str) -> list[str]:
    script = functions_of("_env.sh", "_constraints")
    command = f"ROOT={SCRIPTS.parent}; torch_version={version}; {script} _constraints"
    done = subprocess.run(["bash", "-ec", command], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.splitlines()


def test_without_a_version_the_pins_are_those_of_the_file() -> None:
    assert pins("") == (SCRIPTS / "constraints.txt").read_text().splitlines()


def test_another_torch_comes_with_its_own_bounds_and_all_else_as_it_was() -> None:
    before, after = set(pins("")), set(pins("2.11.0"))
    assert after - before == {"torch==2.11.0"}
    gone = {line.partition("==")[0] for line in before - after}
    assert gone == {"torch", "setuptools", "sympy", "networkx"}
