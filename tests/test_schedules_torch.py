"""The same sizes under torch.distributed.pipelining's generators: ours idle no longer."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from dag_cases import built
from torch.distributed.pipelining import (
    PipelineStage,
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, _Action
from torch.testing._internal.distributed.fake_pg import FakeStore

from piper_owner.dag.graph import TrainingDAG
from piper_owner.dag.lower import insert_transfers, with_programs
from piper_owner.dag.nodes import Compute, ComputeKind
from piper_owner.schedules import Placement, Schedule, place_stages
from piper_owner.simulate import Timeline, simulate

KINDS = {
    "FORWARD": ComputeKind.FORWARD,
    "FULL_BACKWARD": ComputeKind.BACKWARD,
    "BACKWARD_INPUT": ComputeKind.BACKWARD_INPUT,
    "BACKWARD_WEIGHT": ComputeKind.BACKWARD_WEIGHT,
}
THEIRS: dict[Schedule, tuple[type[PipelineScheduleMulti], Placement]] = {
    Schedule.INTERLEAVED: (ScheduleInterleaved1F1B, Placement.LOOP),
    Schedule.ZBV: (ScheduleZBVZeroBubble, Placement.V),
    Schedule.DUALPIPEV: (ScheduleDualPipeV, Placement.V),
}
SIZES = [
    *((Schedule.INTERLEAVED, *size) for size in ((2, 2, 4), (2, 4, 3), (4, 2, 3), (4, 2, 8), (4, 3, 10))),
    *((Schedule.INTERLEAVED, *size) for size in ((4, 4, 16), (8, 2, 32), (8, 2, 36))),
    *((Schedule.ZBV, ranks, 2, m) for ranks, m in itertools.product((2, 3, 4, 8), (1, 3, 8, 15, 35, 100))),
    *((Schedule.DUALPIPEV, ranks, 2, m) for ranks, m in itertools.product((2, 3, 4, 8), (16, 17, 32, 67))),
]


def _computes(actions: list[_Action | None]) -> Iterator[Compute]:
    for action in actions:
        # A pair that torch runs side by side is two computes here, the forward first.
        for each in (action.sub_actions or (action,)) if action is not None else ():
            assert each.microbatch_index is not None
            yield Compute(
                kind=KINDS[each.computation_type.name],
                stage=each.stage_index,
                microbatch=each.microbatch_index,
            )


def torchs(schedule: Schedule, ranks: int, each: int, microbatches: int) -> TrainingDAG:
    """What torch's generator orders, computes only."""
    kind, shape = THEIRS[schedule]
    placement = place_stages(ranks * each, ranks, shape)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        stages = [
            PipelineStage(torch.nn.Identity(), stage, len(placement), torch.device("cpu"))
            for stage, rank in enumerate(placement)
            if rank == 0
        ]
        made = kind(stages, microbatches, loss_fn=lambda output, _: output)  # type: ignore[arg-type]
        orders = [list(_computes(made.pipeline_order[rank])) for rank in range(ranks)]
    finally:
        dist.destroy_process_group()
    return with_programs(built(placement, microbatches, schedule=schedule), orders)


def idle(dag: TrainingDAG) -> float:
    """Of all ranks together, a forward taking 1, a backward 2, its parts 1."""
    timeline: Timeline = simulate(insert_transfers(dag))
    return sum(timeline.idle(rank) for rank in range(dag.num_ranks))


@pytest.mark.parametrize(("schedule", "ranks", "each", "microbatches"), SIZES)
def test_bubbles_are_no_longer_than_torchs(
    schedule: Schedule, ranks: int, each: int, microbatches: int
) -> None:
    placement = place_stages(ranks * each, ranks, THEIRS[schedule][1])
    ours = built(placement, microbatches, schedule=schedule)
    theirs = torchs(schedule, ranks, each, microbatches)
    assert idle(ours) <= idle(theirs)
    if schedule is Schedule.DUALPIPEV or (schedule is Schedule.INTERLEAVED and not microbatches % ranks):
        assert ours.programs == theirs.programs


def test_the_benchmark_of_planning_prints_a_line_for_each_schedule() -> None:
    script = Path(__file__).parent.parent / "scripts" / "bench_plan.py"
    done = subprocess.run(
        [sys.executable, str(script), "--microbatches", "2", "--limit", "0"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "more than 0 s" in done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["schedule", *(schedule.value for schedule in Schedule)]
