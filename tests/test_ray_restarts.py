"""A run that loses a rank begins again by itself, and ends with the bits of the undisturbed one."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from killed_ranks import CONFIG, TOKENS, Moment, WithDropout, assert_same, at, faulty_at, undisturbed
from ray import cloudpickle
from ray_jobs import SMALL, job, wait_until

from piper_owner.errors import ConfigError, RunError
from piper_owner.executor.config import RunKind, TrainConfig
from piper_owner.executor.results import Restart, TrainResult
from piper_owner.runtime.actor import RankHost
from piper_owner.runtime.cluster import count_cpus
from piper_owner.runtime.driver import train
from piper_owner.runtime.keeping import Keeping
from piper_owner.runtime.progress import StepProgress

# Actors cannot import a test module, so the classes below travel as they are.
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]

EVERY = 7


def random_moment(seed: int, folder: Path) -> Moment:
    """Anywhere in the run: mostly in a step, sometimes as it starts, saves or ends."""
    chance = random.Random(seed)
    method = chance.choice(["step"] * 6 + ["save", "open", "finish"])
    most = {"step": CONFIG.steps, "save": 1 + CONFIG.steps // EVERY}.get(method, 1)
    return Moment(
        rank=chance.randrange(CONFIG.devices),
        method=method,
        number=chance.randrange(most),
        delay=chance.choice([0.0, 1.0, 2.0]) * chance.random() * 0.02,
        marker=folder / "marker",
    )


def restarted(
    host_class: type[RankHost],
    folder: Path,
    *,
    config: TrainConfig = CONFIG,
    most: int = 3,
    **given: Any,  # noqa: ANN401 - other arguments of train
) -> TrainResult:
    """Train with a checkpoint in `folder`; see that nothing is left."""
    keeping = Keeping(path=folder / "run", every=EVERY)
    try:
        return train(
            config, TOKENS, text="numbers", keeping=keeping, max_restarts=most, host_class=host_class, **given
        )
    finally:
        assert wait_until(lambda: count_cpus()[1] == 4, 10), "the reservation was not given back"


MOMENTS = [seed if seed in (0, 3) else pytest.param(seed, marks=pytest.mark.slow) for seed in range(20)]


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("seed", MOMENTS)
def test_killed_at_a_random_moment_it_ends_with_the_same_bits(seed: int, tmp_path: Path) -> None:
    moment = random_moment(seed, tmp_path)
    seen: list[StepProgress] = []
    told: list[Restart] = []
    result = restarted(faulty_at(moment), tmp_path, on_step=seen.append, on_restart=told.append)
    assert_same(result.runs[RunKind.OWNER], undisturbed())
    assert result.replicas_equal
    assert moment.marker.exists()
    if moment.method == "finish":  # a timer may come too late
        assert len(result.restarts) <= 1
        return
    (restart,) = result.restarts
    assert told == [restart]
    assert restart.rank == moment.rank
    assert restart.from_step % EVERY == 0 or restart.from_step == CONFIG.steps
    assert f"rank {moment.rank} died: its process " in restart.why
    assert " on node " in restart.why
    if moment.method == "step":
        noticed = f"; rank {1 - moment.rank} noticed it at "  # unless it waited for nobody by then
        assert noticed in restart.why or "noticed" not in restart.why
        assert 0 <= restart.step - restart.from_step <= 2 * EVERY
    steps = [progress.step for progress in seen]
    again = next((i for i in range(1, len(steps)) if steps[i] <= steps[i - 1]), len(steps))
    assert steps[again:] == list(range(restart.from_step + 1, CONFIG.steps + 1)) or again == len(steps)


@pytest.mark.usefixtures("ray_cluster")
def test_dropout_draws_the_same_from_snapshots_and_checkpoints(tmp_path: Path) -> None:
    config = replace(CONFIG, steps=14)

    def run(name: str, host_class: type[RankHost] = RankHost, **given: Any) -> TrainResult:  # noqa: ANN401
        (tmp_path / name).mkdir()
        return restarted(host_class, tmp_path / name, config=config, source=WithDropout(), **given)

    straight = run("straight").runs[RunKind.OWNER]
    assert straight.losses[0] != undisturbed().losses[0], "dropout does something"
    for name, snapshot in (("checkpoint", None), ("snapshot", 4)):
        result = run(name, faulty_at(at(13, tmp_path, f"{name} marker")), snapshot=snapshot)
        (restart,) = result.restarts
        assert restart.from_step in ((7,) if snapshot is None else (8, 12))  # that of 12 may be on its way
        assert_same(result.runs[RunKind.OWNER], straight)


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_it_is_restarted_as_often_as_it_may_be(tmp_path: Path) -> None:
    config = replace(CONFIG, steps=9)
    raises = faulty_at(
        at(3, tmp_path, "a"), at(8, tmp_path, "b"), at(8, tmp_path, "c"), error=ZeroDivisionError("planted")
    )
    with pytest.raises(RunError) as caught:
        restarted(raises, tmp_path, config=config, most=2)
    assert "rank 1 failed: ZeroDivisionError: planted (rank 1 is on node " in str(caught.value)
    assert "; it was restarted 2 times before this (--max-restarts 2)" in str(caught.value)
    # What was kept on the way is whole.
    keeping = Keeping(path=tmp_path / "run", every=EVERY, resume=True)
    result = train(config, TOKENS, text="numbers", keeping=keeping)
    assert result.runs[RunKind.OWNER].losses == undisturbed().losses[:9]
    assert result.restarts == ()


@pytest.mark.usefixtures("ray_cluster")
def test_what_would_fail_again_is_not_restarted(tmp_path: Path) -> None:
    told: list[Restart] = []
    wrong = faulty_at(at(2, tmp_path), error=ConfigError("planted"))
    with pytest.raises(RunError, match="ConfigError: planted"):
        restarted(wrong, tmp_path, config=replace(CONFIG, steps=4), on_restart=told.append)
    assert told == []


@pytest.mark.usefixtures("ray_cluster")
def test_the_run_that_failed_begins_again_alone(tmp_path: Path) -> None:
    config = replace(CONFIG, steps=3)
    seen: list[tuple[RunKind, int]] = []
    # The second "open" on a rank is that of the second run.
    moment = Moment(rank=0, method="finish", number=0, delay=0.0, marker=tmp_path / "marker")

    class Second(faulty_at(moment)):  # type: ignore[misc]
        runs = 0

        def open(self, *args: Any) -> None:  # noqa: ANN401
            super().open(*args)
            self.runs += 1

        def finish(self) -> Any:  # noqa: ANN401
            return super().finish() if self.runs == 2 else RankHost.finish(self)

    result = restarted(
        Second,
        tmp_path,
        config=config,
        compare=(RunKind.NAIVE, RunKind.REFERENCE),
        on_step=lambda done: seen.append((done.run, done.step)),
    )
    assert result.runs[RunKind.OWNER].losses == undisturbed().losses[:3]
    (restart,) = result.restarts
    assert (restart.run, restart.rank, restart.from_step) == (RunKind.REFERENCE, 0, 0)
    once = [1, 2, 3]
    expected = [(RunKind.OWNER, once), (RunKind.REFERENCE, once * 2), (RunKind.NAIVE, once)]
    assert seen == [(kind, step) for kind, steps in expected for step in steps]


@pytest.mark.slow
def test_a_killed_worker_of_the_command_costs_nothing_but_time(tmp_path: Path) -> None:
    file, folder = tmp_path / "result.json", tmp_path / "run"
    options = ("--steps", "300", "--json", str(file), "--checkpoint", str(folder), "--every", "10")
    with job(*SMALL, *options, "--max-restarts", "1") as running:
        assert wait_until((folder / "checkpoint.json").exists, 90)
        workers = [p for p, title in running.processes().items() if title.startswith("ray::RankHost.step")]
        os.kill(workers[0], signal.SIGKILL)
        status, out, errors = running.end()
        assert status == 0, errors
        assert "Replicas equal the owner's value bit for bit." in out
        assert f"its process {workers[0]} was killed" in errors
        assert "the owner run goes on after step " in errors
        assert "Traceback" not in errors
        assert wait_until(lambda: not running.processes(), 10), running.processes()
    written = json.loads(file.read_text())
    (restart,) = written["restarts"]
    assert sorted(restart) == ["from_step", "rank", "run", "step", "why"]
    assert restart["from_step"] % 10 == 0 < restart["from_step"]
    assert len(written["runs"]["owner"]["losses"]) == 300
