"""Draws docs/step.svg: a step of 1F1B on four stages, with the sync of a dense tie in its bubbles.

python scripts/draw_step.py              write docs/step.svg
python scripts/draw_step.py --output -   print it

The first stage owns the tie. All durations are stated in units of a forward of one microbatch of one stage
; the drawing is the dry run of all ranks, two steps behind one another, up to where the second has
begun everywhere. Needs neither torch nor Ray.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Final, assert_never

from piper_owner.dag.graph import Bucket, TrainingDAG
from piper_owner.dag.nodes import (
    Across,
    Action,
    BucketStep,
    Collective,
    Compute,
    ComputeKind,
    Sync,
    SyncKind,
    Transfer,
)
from piper_owner.drawing.timeline import Arrow, draw
from piper_owner.ownership import OwnershipPlan, ParameterUse, plan_ownership
from piper_owner.p2p_nodes import executable
from piper_owner.schedules import Schedule, build_dag
from piper_owner.simulate import Timeline, simulate

STAGES: Final = 4
MICROBATCHES: Final = 4
STEPS: Final = 2
FORWARD: Final = 1.0
BACKWARD: Final = 2.0
STEP: Final = 0.5
GRADIENT: Final = 4.0
WEIGHTS: Final = 2.5
OUTPUT: Final = Path(__file__).resolve().parent.parent / "docs" / "step.svg"


def duration(action: Action) -> float:
    """How long an action takes, of a send how long its message flies; the pipeline's own take no time."""
    match action:
        case Compute(kind=kind):
            return BACKWARD if kind is ComputeKind.BACKWARD else FORWARD
        case BucketStep() | Sync(kind=SyncKind.OWNER_STEP):
            return STEP
        case Sync(kind=SyncKind.SEND_GRAD):
            return GRADIENT
        case Sync(kind=SyncKind.SEND_WEIGHT):
            return WEIGHTS
        case Sync() | Transfer() | Collective() | Across():
            return 0.0
        case _:
            assert_never(action)


def plan() -> OwnershipPlan:
    """The embedding on the first stage, the head on the last; the first one owns, both keep a copy."""
    uses = [
        ParameterUse(name=name, rank=stage, stage=stage, shape=(50_257, 768), dtype="float32")
        for name, stage in (("embed.weight", 0), ("head.weight", STAGES - 1))
    ]
    tie = ("embed.weight", "head.weight")
    return plan_ownership([tie], uses, world_size=STAGES, owner="first", layout="dense")


def program() -> TrainingDAG:
    """What every rank runs in a step."""
    built = build_dag(
        Schedule.ONE_F_ONE_B,
        placement=tuple(range(STAGES)),
        num_ranks=STAGES,
        num_microbatches=MICROBATCHES,
        buckets=[Bucket(name=f"stage{stage}", stages=(stage,)) for stage in range(STAGES)],
    )
    return executable(built, plan())


def run(dag: TrainingDAG, durations: Callable[[Action], float] = duration, steps: int = STEPS) -> Timeline:
    """The dry run of `steps` steps behind one another."""
    repeated = dataclasses.replace(dag, programs=tuple(each * steps for each in dag.programs))
    return simulate(repeated, durations)


def step_time(durations: Callable[[Action], float]) -> float:
    """How long a step takes where others follow it."""
    return run(program(), durations, 6).makespan - run(program(), durations, 5).makespan


def instant(action: Action) -> float:
    """The durations, if the messages of the tie took no time."""
    return 0.0 if isinstance(action, Sync) and action.kind is not SyncKind.OWNER_STEP else duration(action)


def cut(timeline: Timeline, end: float) -> Timeline:
    """What begins before `end`."""
    lengths = [sum(start < end for start in starts) for starts in timeline.starts]

    def short(rows: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
        return tuple(row[:length] for row, length in zip(rows, lengths, strict=True))

    programs = tuple(row[:length] for row, length in zip(timeline.programs, lengths, strict=True))
    return dataclasses.replace(
        timeline, programs=programs, starts=short(timeline.starts), ends=short(timeline.ends)
    )


def arrows(timeline: Timeline) -> list[Arrow]:
    """Gradient and weights of the tie, for as long as they fly."""
    words = {SyncKind.SEND_GRAD: "gradient", SyncKind.SEND_WEIGHT: "weights"}
    found = []
    for rank in range(STAGES):
        for event in timeline.events(rank):
            match event.action:
                case Sync(kind=SyncKind.SEND_GRAD | SyncKind.SEND_WEIGHT as kind, peer=int(peer)):
                    found.append(
                        Arrow(
                            source=rank,
                            sent=event.start,
                            target=peer,
                            received=event.start + duration(event.action),
                            label=repr(event.action),
                            text=words[kind],
                        )
                    )
                case _:
                    pass
    return found


def picture() -> str:
    """The SVG."""
    timeline = run(program())
    first = len(timeline.programs[-1]) // STEPS
    timeline = cut(timeline, timeline.starts[-1][first] + FORWARD * 2)
    length, free = step_time(duration), step_time(instant)
    return draw(
        timeline,
        title=f"1F1B on {STAGES} stages, the first one owns the tie: {length:g} a step, and {free:g} if the "
        "messages of the tie took no time",
        num_microbatches=MICROBATCHES,
        arrows=arrows(timeline),
    )


def main() -> None:
    """Write or print the drawing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", default=str(OUTPUT), help="file to write, or - to print (default: %(default)s)"
    )
    output = parser.parse_args().output
    if output == "-":
        print(picture(), end="")
    else:
        Path(output).write_text(picture(), encoding="ascii")


if __name__ == "__main__":
    main()
