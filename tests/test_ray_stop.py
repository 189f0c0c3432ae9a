"""Ctrl+C and SIGTERM under `--checkpoint`: the run is saved, ends, and goes on later with the same bits."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from killed_ranks import CONFIG, TOKENS, assert_same, at, faulty_at, undisturbed
from ray_jobs import SMALL, job, wait_until

from piper_owner.checkpoint import read_index
from piper_owner.executor.config import RunKind
from piper_owner.executor.results import TrainResult
from piper_owner.runtime.actor import RankHost
from piper_owner.runtime.cluster import count_cpus
from piper_owner.runtime.driver import train
from piper_owner.runtime.keeping import Keeping
from piper_owner.runtime.progress import StepProgress
from piper_owner.runtime.signals import Stopped, noticed


def run(
    folder: Path,
    *signals: signal.Signals,
    step: int,
    told: list[int],
    resume: bool = False,
    host_class: type[RankHost] = RankHost,
) -> TrainResult:
    """Train, with `signals` to this process after `step`."""

    def on_step(done: StepProgress) -> None:
        if done.step == step:
            for number in signals:
                signal.raise_signal(number)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return train(
            CONFIG,
            TOKENS,
            text="numbers",
            compare=(RunKind.REFERENCE,) if signals else (),
            on_step=on_step,
            on_stop=told.append,
            keeping=Keeping(path=folder, every=9, resume=resume),
            host_class=host_class,
        )
    finally:
        assert {number: signal.getsignal(number) for number in before} == before
        assert wait_until(lambda: count_cpus()[1] == 4, 10), "the reservation was not given back"


# In the middle; and where the step was saved anyway, and after the last one.
STOPS = [(signal.SIGTERM, 4)]
MORE_STOPS = [(signal.SIGINT, 7), (signal.SIGTERM, 16), (signal.SIGINT, 30)]


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("stops", [STOPS, pytest.param(MORE_STOPS, marks=pytest.mark.slow)])
def test_a_run_that_is_stopped_goes_on_with_the_same_bits(
    stops: list[tuple[signal.Signals, int]], tmp_path: Path
) -> None:
    told: list[int] = []
    resume = False
    for number, step in stops:
        with pytest.raises(Stopped) as stopped:
            run(tmp_path, number, step=step, told=told, resume=resume)
        assert (stopped.value.number, stopped.value.is_kept, stopped.value.failure) == (number, True, "")
        # Two steps are in hand when a step is done; none is called for after the signal.
        assert stopped.value.step == min(CONFIG.steps, step + 2)
        assert read_index(tmp_path).step == stopped.value.step
        resume = True
    assert told == [step + 2 for _, step in stops if step < CONFIG.steps]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert len(list(tmp_path.iterdir())) == 2  # the index, and its data
    assert_same(run(tmp_path, step=0, told=told, resume=True).runs[RunKind.OWNER], undisturbed())


@pytest.mark.usefixtures("ray_cluster")
def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", signal.SIGINT, signal.SIGINT, step=4, told=[])
    assert not (tmp_path / "run" / "checkpoint.json").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_a_rank_that_fails_while_it_is_stopped_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    killed = faulty_at(at(12, tmp_path))
    with pytest.raises(Stopped) as stopped:
        run(tmp_path / "run", signal.SIGINT, step=11, told=[], host_class=killed)
    assert (stopped.value.step, stopped.value.is_kept) == (9, True)
    assert "rank 1 died" in stopped.value.failure


def test_signals_that_are_ignored_stay_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with noticed() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert stop.number is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_ctrl_c_saves_and_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with job(*SMALL, "--steps", "100000", "--checkpoint", str(folder), "--every", "50") as running:
        assert wait_until((folder / "checkpoint.json").exists, 90)
        running.signal_group(signal.SIGINT)
        status, out, errors = running.end(60)
        assert status == 130, errors
        step = read_index(folder).step
        assert f"stopping after step {step}, to save it" in errors
        assert f"{folder} holds the run up to step {step}, and the same command with --resume" in errors
        assert "Traceback" not in errors
        assert out == ""
        assert wait_until(lambda: not running.processes(), 10), running.processes()
        assert list(running.folder.glob("piper-owner-*")) == []
    assert len(list(folder.iterdir())) == 2


@pytest.mark.slow
def test_sigterm_to_the_command_saves_as_well(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with job(*SMALL, "--steps", "100000", "--checkpoint", str(folder), "--every", "50") as running:
        assert wait_until((folder / "checkpoint.json").exists, 90)
        running.process.send_signal(signal.SIGTERM)
        status, _, errors = running.end(60)
        assert status == 143, errors
        assert f"holds the run up to step {read_index(folder).step}, and" in errors
        assert wait_until(lambda: not running.processes(), 10), running.processes()
