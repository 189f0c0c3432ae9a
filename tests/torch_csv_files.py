"""Writes the schedules of torch.distributed.pipelining as CSV into a folder; run in a process of its own.

The process group is torch's own fake one: the schedules are real, and nothing is sent.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.testing._internal.distributed.fake_pg import FakeStore

RANKS = 4
MICROBATCHES = 8
LOOP = ("ScheduleInterleaved1F1B", "ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble")
V = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")


def main(folder: Path) -> None:
    """Write `<schedule>.<format>.csv`; `deferred` is compute_comms under `defer_pp_recv`."""
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    for name in (*LOOP, *V):
        stages = [
            PipelineStage(nn.Linear(2, 2), index, 2 * RANKS, torch.device("cpu"))
            for index in (0, RANKS if name in LOOP else 2 * RANKS - 1)
        ]
        schedule = getattr(schedules, name)(stages, MICROBATCHES, loss_fn=lambda output, _: output.sum())
        schedule._prepare_schedule_with_comms(schedule.pipeline_order)
        for form in ("compute_only", "compute_comms"):
            schedule._dump_csv(str(folder / f"{name}.{form}.csv"), form)
        schedule._defer_pp_recv = True
        schedule._prepare_schedule_with_comms(schedule.pipeline_order)
        schedule._dump_csv(str(folder / f"{name}.deferred.csv"), "compute_comms")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
