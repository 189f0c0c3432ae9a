"""Faults under Ray: the run ends soon, with the error of the rank at fault, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from ray import cloudpickle
from ray_jobs import SMALL, job, wait_until

from piper_owner.data.batches import TokenStream
from piper_owner.errors import RunError
from piper_owner.executor.config import RunKind, TrainConfig
from piper_owner.executor.session import StepReport
from piper_owner.runtime.actor import RankHost
from piper_owner.runtime.cluster import count_cpus
from piper_owner.runtime.driver import train

# Actors cannot import a test module, so the classes below travel as they are.
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]

CONFIG = TrainConfig(
    stages=3,
    microbatches=4,
    microbatch_size=1,
    sequence_length=8,
    vocab=256,
    hidden=8,
    heads=2,
    layers=3,
    steps=4,
    timeout_seconds=30,
)
TOKENS = np.arange(400, dtype=np.int32) % 256
LIMIT = 15.0
# 127.0.0.1, the same in IPv6, and ::1, as the kernel's tables of sockets have them.
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
FAULTY_RANK, FAULTY_STEP = 1, 2


class RaisesInStep(RankHost):
    def step(self, index: int) -> StepReport:
        if (self.rank, index) == (FAULTY_RANK, FAULTY_STEP):
            raise ZeroDivisionError("planted")
        return super().step(index)


class RaisesInside(RankHost):
    """Fails below the session, amid the others' waits: in the forward of a module."""

    def step(self, index: int) -> StepReport:
        if (self.rank, index) == (0, FAULTY_STEP):
            assert self._session is not None
            self._session._modules[0].register_forward_pre_hook(_raise)  # type: ignore[union-attr]
        return super().step(index)


def _raise(module: object, args: object) -> None:
    raise IndexError("planted index")


class ReadsOutsideTheVocabulary(RankHost):
    """Its batch has ids that the vocabulary has not: seen before anybody sends anything."""

    def step(self, index: int) -> StepReport:
        if (self.rank, index) == (0, FAULTY_STEP):
            self._stream = TokenStream(
                TOKENS + 1000,
                microbatches=CONFIG.microbatches,
                microbatch_size=CONFIG.microbatch_size,
                sequence_length=CONFIG.sequence_length,
            )
        return super().step(index)


class RaisesInOpen(RankHost):
    def open(self, run: RunKind, prefix: str) -> None:
        if self.rank == FAULTY_RANK:
            # All processes of a machine share this clock.
            raise ZeroDivisionError(f"planted at {time.monotonic()}")
        super().open(run, prefix)


class KillsItself(RankHost):
    def step(self, index: int) -> StepReport:
        if (self.rank, index) == (FAULTY_RANK, FAULTY_STEP):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(index)


class Hangs(RankHost):
    def step(self, index: int) -> StepReport:
        if (self.rank, index) == (FAULTY_RANK, FAULTY_STEP):
            threading.Event().wait()
        return super().step(index)


def living(host_class: type[RankHost]) -> list[str]:
    """Titles of the processes of this class of actors."""
    titles = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                titles.append((entry / "cmdline").read_bytes().decode(errors="replace"))
            except OSError:
                continue
    return [title for title in titles if title.startswith(f"ray::{host_class.__name__}")]


@pytest.mark.parametrize(
    ("host_class", "config", "expected"),
    [
        (RaisesInStep, CONFIG, r"step 3 of the owner run: rank 1 failed: ZeroDivisionError: planted"),
        (RaisesInside, CONFIG, r"step 3 of the owner run: rank 0 failed first, at .*index"),
        (
            ReadsOutsideTheVocabulary,
            CONFIG,
            r"step 3 of the owner run: rank 0 failed.*id 1\d\d\d is outside the vocabulary of 256",
        ),
        (RaisesInOpen, CONFIG, r"start of the owner run: rank 1 failed: ZeroDivisionError: planted"),
        (
            KillsItself,
            CONFIG,
            r"step \d of the owner run: rank 1 died: its process \d+ was killed or crashed",
        ),
        (
            Hangs,
            TrainConfig(
                **{**{name: getattr(CONFIG, name) for name in CONFIG.__slots__}, "timeout_seconds": 3}
            ),
            r"step 3 of the owner run: rank \d failed: .*; rank 1 has reported nothing",
        ),
    ],
)
@pytest.mark.usefixtures("ray_cluster")
def test_run_ends_with_the_fault_of_the_rank_that_failed(
    host_class: type[RankHost], config: TrainConfig, expected: str
) -> None:
    # One cluster for all: that each run gets as far as its own fault shows it usable after the last.
    seen: list[float] = []

    def on_step(progress: object) -> None:
        assert living(host_class), "finding none at the end would prove nothing"
        seen.append(time.monotonic())

    with pytest.raises(RunError, match=expected) as raised:
        train(config, TOKENS, text="numbers", on_step=on_step, host_class=host_class)
    planted = re.search(r"planted at ([\d.]+)", str(raised.value))
    assert time.monotonic() - (float(planted[1]) if planted else seen[-1]) < LIMIT
    # Steps are called ahead: a fault may be seen before the results of the step before it.
    assert len(seen) <= (0 if host_class is RaisesInOpen else FAULTY_STEP)
    assert wait_until(lambda: not living(host_class), 10), living(host_class)
    assert wait_until(lambda: count_cpus()[1] == 4, 10), "the reservation was not given back"


def test_killed_worker_ends_the_command(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    with job(*SMALL, "--steps", "100000", "--json", str(result)) as running:
        running.read_until("owner")  # the announcement
        workers: list[int] = []

        def find() -> bool:
            workers[:] = [p for p, t in running.processes().items() if t.startswith("ray::RankHost.step")]
            return bool(workers)

        assert wait_until(find, 60)
        # Meanwhile nobody else reaches it: not from another machine, and not through its files.
        assert running.listening() <= LOOPBACK
        (own,) = running.folder.glob("piper-owner-*")
        assert stat.S_IMODE(own.stat().st_mode) == 0o700
        os.kill(workers[0], signal.SIGKILL)
        start = time.monotonic()
        status, out, errors = running.end()
        assert time.monotonic() - start < LIMIT
        assert status == 1
        last = errors.strip().splitlines()[-1]
        assert "error: step " in last
        assert "of the owner run: rank " in last
        assert f" died: its process {workers[0]} was killed" in last
        assert "Traceback" not in errors
        assert out == ""
        assert not result.exists()
        assert wait_until(lambda: not running.processes(), 10), running.processes()
        assert list(running.folder.glob("piper-owner-*")) == []


@pytest.mark.parametrize("when", ["while Ray starts", "while it trains"])
def test_ctrl_c_leaves_nothing_behind(when: str) -> None:
    with job(*SMALL, "--steps", "100000") as running:
        if when == "while it trains":
            assert wait_until(
                lambda: any(title.startswith("ray::RankHost.step") for title in running.processes().values()),
                60,
            )
        else:
            assert wait_until(
                lambda: any("ray::DashboardAgent" in title for title in running.processes().values()), 60
            )
        running.signal_group(signal.SIGINT)
        status, out, errors = running.end(30)
        assert status == 130, errors
        assert "interrupted" in errors
        assert "Traceback" not in errors
        assert out == ""
        assert wait_until(lambda: not running.processes(), 10), running.processes()
        assert list(running.folder.glob("piper-owner-*")) == []


def test_sigterm_leaves_nothing_behind() -> None:
    with job(*SMALL, "--steps", "100000") as running:
        assert wait_until(
            lambda: any(title.startswith("ray::RankHost.step") for title in running.processes().values()), 60
        )
        # As `timeout` and service managers do: Ray's own processes get the signal as well, and end
        # before the driver has tidied up.
        running.signal_group(signal.SIGTERM)
        status, _, errors = running.end(60)
        # 1: Ray's own threads may end the process, without its raylet, once it has tidied up.
        assert status in (128 + signal.SIGTERM, 1), errors
        assert wait_until(lambda: not running.processes(), 10), running.processes()
        assert list(running.folder.glob("piper-owner-*")) == []


@pytest.mark.parametrize("rounds", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_two_jobs_at_once(rounds: int, tmp_path: Path) -> None:
    for index in range(rounds):
        files = [tmp_path / f"{index}-{name}.json" for name in ("a", "b")]
        with (
            job(*SMALL, "--steps", "3", "--json", str(files[0])) as one,
            job(*SMALL, "--steps", "3", "--json", str(files[1])) as two,
        ):
            for running in (one, two):
                status, _, errors = running.end()
                assert status == 0, errors
                assert wait_until(lambda running=running: not running.processes(), 10)  # type: ignore[misc]
        results = [json.loads(file.read_text())["runs"]["owner"]["losses"] for file in files]
        assert results[0] == results[1]
