"""A run that loses its owner goes on from the snapshots in the others' memory, without a disk."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from killed_ranks import CONFIG, TOKENS, Moment, assert_same, at, faulty_at, undisturbed
from ray_jobs import wait_until

from piper_owner.errors import ConfigError, RunError
from piper_owner.executor.config import RunKind
from piper_owner.executor.results import TrainResult
from piper_owner.runtime.actor import RankHost
from piper_owner.runtime.cluster import count_cpus
from piper_owner.runtime.driver import train
from piper_owner.runtime.keeping import Keeping

OWNER, REPLICA = 1, 0


def run(host_class: type[RankHost], **given: Any) -> TrainResult:  # noqa: ANN401 - other arguments of train
    try:
        return train(CONFIG, TOKENS, text="numbers", max_restarts=2, host_class=host_class, **given)
    finally:
        assert wait_until(lambda: count_cpus()[1] == 4, 10), "the reservation was not given back"


def moments(count: int) -> list[Any]:
    """(rank, step, delay in seconds): the first two of them always, the others with --all."""
    chance = random.Random(7)
    drawn = [(OWNER, chance.randrange(1, 30), chance.random() * 0.03) for _ in range(count)]
    drawn[1] = (REPLICA, *drawn[1][1:])
    return [drawn[0], drawn[1], *(pytest.param(*each, marks=pytest.mark.slow) for each in drawn[2:])]


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(("rank", "step", "delay"), moments(21))
def test_a_rank_that_is_killed_costs_a_step(rank: int, step: int, delay: float, tmp_path: Path) -> None:
    moment = Moment(rank=rank, method="step", number=step, delay=delay, marker=tmp_path / "marker")
    result = run(faulty_at(moment), snapshot=1)
    assert result.ownership.ties[0].owner == OWNER
    assert_same(result.runs[RunKind.OWNER], undisturbed())
    (restart,) = result.restarts
    assert restart.rank == rank
    # Whose copy had not arrived does not count, and the next step may have begun.
    assert restart.step - restart.from_step <= 3
    assert restart.from_step > 0 or step < 3


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_when_both_are_lost_the_checkpoint_counts(tmp_path: Path) -> None:
    killed = [at(12, tmp_path, f"marker {rank}", rank=rank) for rank in (OWNER, REPLICA)]
    keeping = Keeping(path=tmp_path / "run", every=10)
    result = run(faulty_at(*killed), snapshot=1, keeping=keeping)
    assert_same(result.runs[RunKind.OWNER], undisturbed())
    assert [restart.from_step for restart in result.restarts] in ([10], [10, 10])


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_when_both_are_lost_and_nothing_is_on_disk_it_says_so(tmp_path: Path) -> None:
    killed = [at(12, tmp_path, f"marker {rank}", rank=rank) for rank in (OWNER, REPLICA)]
    with pytest.raises(RunError, match=r"the copy of its snapshot is lost as well.*--checkpoint DIR keeps"):
        run(faulty_at(*killed), snapshot=1)


def test_one_worker_has_no_other_to_keep_a_copy() -> None:
    with pytest.raises(ConfigError, match="--snapshot with one worker"):
        train(replace(CONFIG, stages=1, devices=1), TOKENS, text="numbers", max_restarts=1, snapshot=1)
