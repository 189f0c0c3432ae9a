"""Under torchrun, without Ray: torch's seven schedules on GPUs equal one process; memory; a killed rank.

Each body runs on the CPU, over gloo, with --gpu-device cpu.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from gpu_marker import device_of
from gpu_training import DTYPES, TOLERANCES, Found, GpuCase, HeldCase
from pipelines import LOOPED, SCHEDULES, V_SHAPED

HERE = Path(__file__).resolve().parent
BODY = HERE / "gpu_training.py"
PATHS = (HERE.parent.parent, HERE.parent, HERE)
LIMIT = 400.0

MANY = [
    GpuCase(schedule=schedule, dtype=dtype, layout=layout)  # type: ignore[arg-type]
    for schedule, dtype, layout in itertools.product(SCHEDULES, DTYPES, ("dense", "auto"))
]
TWO_BY_TWO = [
    GpuCase(schedule=schedule, dtype=dtype, layout=layout, dp=2)  # type: ignore[arg-type]
    for schedule, dtype, layout in itertools.product(
        ("Schedule1F1B", "ScheduleZBVZeroBubble"), DTYPES, ("dense", "auto")
    )
]
ON_ONE = [
    GpuCase(schedule=kind.__name__, dtype=dtype)
    for kind, dtype in itertools.product((*V_SHAPED, *LOOPED), DTYPES)
]
HELD = [HeldCase(layout="dense"), HeldCase(layout="rows")]

Trained = Callable[[int, Sequence[GpuCase | HeldCase], GpuCase | HeldCase], list[Found]]


def environment(**variables: str) -> dict[str, str]:
    """That of a rank, which imports what the tests do."""
    path = os.pathsep.join(map(str, PATHS))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}


def torchrun(num: int, cases: Sequence[GpuCase | HeldCase], folder: Path) -> list[dict[str, Found]]:
    """What each of `num` ranks found, by case."""
    (folder / "cases.json").write_text(json.dumps([asdict(case) for case in cases]))
    launch = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1")
    done = subprocess.run(
        [sys.executable, *launch, "--nproc-per-node", str(num), str(BODY), str(folder)],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr[-6000:]
    files = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(num)]
    return [{name: Found(**found) for name, found in file.items()} for file in files]


@pytest.fixture(scope="module")
def trained(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """`trained(num, cases, case)`: what the ranks found of `case`; all `cases` run in one start."""
    ran: dict[tuple[int, int], list[dict[str, Found]]] = {}

    def look(num: int, cases: Sequence[GpuCase | HeldCase], case: GpuCase | HeldCase) -> list[Found]:
        key = (num, id(cases))
        if key not in ran:
            device = device_of(pytestconfig)
            chosen = [replace(each, device=device) for each in cases]
            ran[key] = torchrun(num, chosen, tmp_path_factory.mktemp("ranks"))
        return [found[str(case)] for found in ran[key]]

    return look


def check(case: GpuCase, ranks: Sequence[Found], device: str) -> None:
    assert max(rank.difference for rank in ranks) < TOLERANCES[case.dtype]
    assert all(rank.is_equal for rank in ranks)
    assert all(rank.device.startswith(device) for rank in ranks)
    assert [rank.tied_states for rank in ranks] == [rank.owned for rank in ranks]
    # The second of four steps overflows, and every rank knows.
    assert [rank.scale for rank in ranks] == [8.0 if case.dtype == "amp" else 1.0] * len(ranks)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("case", MANY, ids=str)
def test_every_schedule_on_two(trained: Trained, pytestconfig: pytest.Config, case: GpuCase) -> None:
    check(case, trained(2, MANY, case), device_of(pytestconfig))


@pytest.mark.gpu(4)
@pytest.mark.parametrize("case", MANY, ids=str)
def test_every_schedule_on_four(trained: Trained, pytestconfig: pytest.Config, case: GpuCase) -> None:
    check(case, trained(4, MANY, case), device_of(pytestconfig))


@pytest.mark.gpu(4)
@pytest.mark.parametrize("case", TWO_BY_TWO, ids=str)
def test_two_pipelines_of_two(trained: Trained, pytestconfig: pytest.Config, case: GpuCase) -> None:
    check(case, trained(4, TWO_BY_TWO, case), device_of(pytestconfig))


@pytest.mark.gpu(1)
@pytest.mark.parametrize("case", ON_ONE, ids=str)
def test_all_stages_on_one(trained: Trained, pytestconfig: pytest.Config, case: GpuCase) -> None:
    (found,) = trained(1, ON_ONE, case)
    check(case, [found], device_of(pytestconfig))
    assert found.owned == 2


@pytest.mark.gpu(2)
@pytest.mark.parametrize("case", HELD, ids=str)
def test_memory_of_a_table(trained: Trained, case: HeldCase) -> None:
    """The owner holds weight and two moments; a copy is a table, and the rows of 100 ids are next to none."""
    replica, owner = trained(2, HELD, case)
    # Two chunks of staging on each rank come on top: a sixth of the table.
    wanted = 1.0 if case.layout == "dense" else 0.0
    assert replica.held_tables == pytest.approx(wanted, abs=0.3)
    assert owner.held_tables == pytest.approx(3, abs=0.3)
    assert replica.is_equal
    assert owner.is_equal


@pytest.mark.gpu(2)
def test_the_survivor_of_a_killed_rank_is_told(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    start = time.monotonic()
    ranks = [
        subprocess.Popen(
            [sys.executable, str(BODY), str(tmp_path), device_of(pytestconfig)],
            env=environment(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2"),
        )
        for rank in range(2)
    ]
    try:
        codes = [rank.wait(LIMIT) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0, -9]
    told = (tmp_path / "told").read_text()
    assert told.startswith("step 2: PeerLostError: ")
    assert "rank 1" in told
    assert time.monotonic() - start < LIMIT
