"""`piper-owner verify`: read a schedule, check it, show it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from piper_owner.cli.checking import FileKind, Verdict, check, parse_edges, read_schedule
from piper_owner.cli.output import write_json, write_text
from piper_owner.dag.graph import TrainingDAG
from piper_owner.dag.nodes import Transfer, format_action
from piper_owner.drawing.timeline import draw
from piper_owner.errors import DagError, InputError, RunError
from piper_owner.paths import check_output, read_text_file, readable
from piper_owner.simulate import Timeline

__all__ = ["run"]

_KEYS: Final = (
    "ok", "error", "error_kind", "more", "kind", "num_ranks", "num_stages", "num_microbatches",
    "num_pipelines", "placement", "makespan", "idle", "wrong",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Schedule:
    """What a file holds."""

    kind: FileKind
    dag: TrainingDAG
    num_pipelines: int


def run(arguments: argparse.Namespace) -> int:
    """Check the file, print the verdict, and return the exit status: 0 right, 2 wrong.

    The error goes to stderr, one line, with further broken rules below it; summary and grid go to
    stdout. Raises InputError for options that cannot work, RunError for an output that cannot be written.
    """
    check_output("--json", arguments.json)
    check_output("--svg", arguments.svg)
    edges = None if arguments.edges is None else parse_edges(arguments.edges)
    try:
        text = read_text_file(arguments.file, what="schedule")
        kind, dag, num_pipelines = read_schedule(text, source=str(arguments.file), edges=edges)
        schedule = _Schedule(kind=kind, dag=dag, num_pipelines=num_pipelines)
        verdict = check(dag)
    except (InputError, DagError) as error:
        line = str(error).partition("\n")[0]
        line = line if isinstance(error, InputError) else f"{arguments.file}: {line}"
        print(f"piper-owner: error: {readable(line)}", file=sys.stderr)
        if arguments.json is not None:
            unread = {name: None for name in _KEYS} | {"ok": False, "more": [], "wrong": []}
            _write(arguments.json, "--json", unread | {"error": line, "error_kind": type(error).__name__})
        return 2
    try:
        _show(arguments, schedule, verdict)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever reads, such as head, has seen enough; the exit status still counts.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if arguments.json is not None:
        _write(arguments.json, "--json", _to_json(arguments.file, schedule, verdict))
    if arguments.svg is not None:
        drawing = draw(
            verdict.timeline,
            title=f"{arguments.file.name}: {_headline(verdict)}",
            num_microbatches=dag.num_microbatches,
            wrong=verdict.wrong,
        )
        _write(arguments.svg, "--svg", drawing)
    return 0 if verdict.error is None else 2


def _headline(verdict: Verdict) -> str:
    return "ok" if verdict.error is None else str(verdict.error).partition("\n")[0]


def _show(arguments: argparse.Namespace, schedule: _Schedule, verdict: Verdict) -> None:
    size = {"max_rows": arguments.max_rows, "max_ranks": arguments.max_ranks}
    if verdict.error is not None:
        line = readable(f"{arguments.file}: {_headline(verdict)}")
        print(f"piper-owner: error: {line}", file=sys.stderr)
        for line in verdict.more:
            print(f"  {line}", file=sys.stderr)
        sys.stderr.flush()
        print(verdict.timeline.format_grid(**size, wrong=verdict.wrong))
        return
    timeline = verdict.timeline
    print(readable(f"{arguments.file}: ok, {_summary(schedule)}"))
    idle = [timeline.idle(rank) for rank in range(schedule.dag.num_ranks)]
    share = sum(idle) / (len(idle) * timeline.makespan) if timeline.makespan else 0.0
    ranks = ", ".join(f"rank {rank} {time:g}" for rank, time in enumerate(idle[: arguments.max_ranks]))
    more = ", ..." if len(idle) > arguments.max_ranks else ""
    print(f"makespan {timeline.makespan:g} units of time, idle {share:.0%} ({ranks}{more})")
    print()
    print(_computes(timeline).format_grid(**size))


def _summary(schedule: _Schedule) -> str:
    dag = schedule.dag
    parts = [
        schedule.kind.value.replace("_", " "),
        _count(dag.num_ranks, "rank"),
        _count(dag.num_stages, "stage"),
        _count(dag.num_microbatches, "microbatch"),
    ]
    if schedule.num_pipelines > 1:
        parts.append(_count(schedule.num_pipelines, "equal pipeline"))
    return ", ".join(parts)


def _count(number: int, what: str) -> str:
    plural = "es" if what.endswith("ch") else "s"
    return f"{number} {what}{'' if number == 1 else plural}"


def _computes(timeline: Timeline) -> Timeline:
    """`timeline` without the pipeline's own messages, which take no time there."""
    kept = [
        [event for event in timeline.events(rank) if not isinstance(event.action, Transfer)]
        for rank in range(len(timeline.programs))
    ]
    return replace(
        timeline,
        programs=tuple(tuple(event.action for event in row) for row in kept),
        starts=tuple(tuple(event.start for event in row) for row in kept),
        ends=tuple(tuple(event.end for event in row) for row in kept),
    )


def _to_json(file: Path, schedule: _Schedule, verdict: Verdict) -> dict[str, Any]:
    timeline, dag = verdict.timeline, schedule.dag
    good = verdict.error is None
    return {
        "ok": good,
        "error": None if good else f"{file}: {_headline(verdict)}",
        "error_kind": None if good else type(verdict.error).__name__,
        "more": list(verdict.more),
        "kind": schedule.kind.value,
        "num_ranks": dag.num_ranks,
        "num_stages": dag.num_stages,
        "num_microbatches": dag.num_microbatches,
        "num_pipelines": schedule.num_pipelines,
        "placement": list(dag.placement),
        "makespan": timeline.makespan if good else None,
        "idle": [timeline.idle(rank) for rank in range(dag.num_ranks)] if good else None,
        "wrong": [
            {"rank": rank, "position": position, "action": format_action(timeline.programs[rank][position])}
            for rank, position in sorted(verdict.wrong)
        ],
    }


def _write(path: Path, option: str, value: Mapping[str, Any] | str) -> None:
    try:
        if isinstance(value, str):
            write_text(path, value)
        else:
            write_json(path, dict(value))
    except OSError as error:
        raise RunError(f"{option} {path}: cannot write it: {error.strerror or error}") from error
