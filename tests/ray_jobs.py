"""Run `piper-owner train` as a user does, and see what it leaves behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_PROGRAM = "import sys; from piper_owner.cli import main; sys.exit(main())"

SMALL = (
    *("--vocab", "300", "--hidden", "16", "--heads", "2", "--layers", "2", "--sequence-length", "16"),
    *("--microbatch-size", "1", "--microbatches", "4", "--stages", "2"),
)
"""Sizes that train in milliseconds a step."""


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Poll `condition` until it holds; whether it did within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def processes_of(session: int) -> dict[int, str]:
    """Everything alive in a session: title by pid.

    Ray's processes make groups of their own and change their titles and environments, but stay in
    the session.
    """
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            # After "pid (name)", where the name may hold anything: state, parent, group, session.
            state, _, _, its = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            title = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if int(its) == session and state != "Z":
            found[int(entry.name)] = title.strip()
    return found


def kill_session(session: int) -> None:
    """Kill whatever is alive in a session, also what it starts meanwhile, and see it end."""

    def ended() -> bool:
        left = processes_of(session)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not left

    wait_until(ended, 30)


@dataclass
class Job:
    """A running command, in a session of its own."""

    process: subprocess.Popen[str]
    folder: Path
    errors: list[str] = field(default_factory=list)

    def read_until(self, text: str) -> None:
        """Read lines of stderr up to one that holds `text`."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.errors.append(line)
            if text in line:
                return
        raise AssertionError(f"{text!r} never came; stderr was {''.join(self.errors)}")

    def end(self, seconds: float = 120) -> tuple[int, str, str]:
        """(exit status, stdout, stderr), waiting at most `seconds`."""
        out, errors = self.process.communicate(timeout=seconds)
        return self.process.returncode, out, "".join(self.errors) + errors

    def processes(self) -> dict[int, str]:
        """Everything alive in this command's session, itself included: title by pid."""
        return processes_of(self.process.pid)

    def listening(self) -> set[str]:
        """Where processes of the session accept TCP connections: addresses as the kernel spells them."""
        inodes = set()
        for pid in self.processes():
            with suppress(OSError):
                for entry in Path(f"/proc/{pid}/fd").iterdir():
                    with suppress(OSError):
                        inodes.add(os.readlink(entry))
        found = set()
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
                    found.add(words[1].partition(":")[0])
        return found

    def signal_group(self, number: signal.Signals) -> None:
        """What a terminal does for Ctrl+C: signal the whole foreground group."""
        os.killpg(self.process.pid, number)


def plain_environment() -> dict[str, str]:
    """This process's environment without Ray's settings, and with this package to import."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {**kept, "PYTHONPATH": str(ROOT)}


@contextmanager
def job(*arguments: str, inside: Sequence[str] = (), **variables: str) -> Iterator[Job]:
    """`piper-owner train` with `arguments`; whatever is left of it at the end is killed.

    `inside` comes before the command, such as `ip netns exec NAME`. Ray's settings are not
    inherited; `variables` are added to the environment.
    """
    folder = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))
    environment = {**plain_environment(), "TMPDIR": str(folder), **variables}
    process = subprocess.Popen(
        [*inside, sys.executable, "-c", _PROGRAM, "train", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env=environment,
        start_new_session=True,
    )
    started = Job(process=process, folder=folder)
    try:
        yield started
    finally:
        kill_session(process.pid)
        process.communicate()
        shutil.rmtree(folder, ignore_errors=True)
