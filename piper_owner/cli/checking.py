"""What `piper-owner verify` finds out about a schedule, without any process. It needs no torch."""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import Final, assert_never

from piper_owner.dag import pipeline_rules
from piper_owner.dag.graph import TrainingDAG
from piper_owner.dag.index import DagIndex, Violation
from piper_owner.dag.lower import insert_transfers
from piper_owner.dag.nodes import Action, Transfer, parse_action
from piper_owner.dag.rules import RULES, Rule, level_of
from piper_owner.dag.text import parse_dag
from piper_owner.directives import lower_program, parse_program
from piper_owner.directives.inference import infer_tags
from piper_owner.directives.lower import MAX_CELLS
from piper_owner.errors import ConfigError, DagError, DagParseError, RuleViolationError
from piper_owner.frontends.torch_csv import looks_like_torch_csv, parse_torch_csv
from piper_owner.simulate import Timeline, dry_run

__all__ = ["FileKind", "Verdict", "check", "parse_edges", "read_schedule"]

_SHOWN: Final = 8
_TRANSFER_RULES: Final = (
    pipeline_rules.transfers_present,
    pipeline_rules.transfer_positions,
    pipeline_rules.messages_in_order,
)


class FileKind(enum.Enum):
    """What a file holds, by its content."""

    DIRECTIVES = "directives"
    TRAINING_DAG = "training_dag"
    TORCH_CSV = "torch_csv"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the checks found: `error` is None where all is right.

    `timeline` holds what ran, `wrong` the cells that are wrong (rank, position in its program);
    `more` are further broken rules.
    """

    timeline: Timeline
    error: DagError | None = None
    more: tuple[str, ...] = ()
    wrong: frozenset[tuple[int, int]] = frozenset()


def read_schedule(
    text: str, *, source: str, edges: Sequence[tuple[int, int]] | None
) -> tuple[FileKind, TrainingDAG, int]:
    """What the text holds, its TrainingDAG, and how many equal pipelines run it.

    `edges` are the stage edges of a directive program; None is a chain. Raises ConfigError for a text
    of no known kind, DirectiveError or DagError for one that is wrong.
    """
    kind = _kind_of(text, source)
    if edges is not None and kind is not FileKind.DIRECTIVES:
        raise ConfigError(
            f"--edges: {source} holds a {kind.value}, which says itself what feeds what; leave it out"
        )
    match kind:
        case FileKind.DIRECTIVES:
            program = parse_program(text, source=source)
            tags = infer_tags(program)
            chain = [(stage, stage + 1) for stage in range(len(tags) - 1)]
            for early, late in edges or ():
                if late >= len(tags):
                    raise ConfigError(f"--edges {early}-{late}: {source} has regions 0 to {len(tags) - 1}")
            lowered = lower_program(
                program, tags=tags, stage_edges=chain if edges is None else edges, buckets=()
            )
            return kind, lowered.dag, lowered.num_pipelines
        case FileKind.TRAINING_DAG:
            dag = parse_dag(text)
            if dag.num_stages * dag.num_microbatches > MAX_CELLS:
                raise DagError(
                    f"{dag.num_stages} stages x {dag.num_microbatches} microbatches: more than {MAX_CELLS} "
                    "together are not supported"
                )
            return kind, dag, dag.num_pipelines
        case FileKind.TORCH_CSV:
            return kind, parse_torch_csv(text), 1
        case _:
            assert_never(kind)


def _kind_of(text: str, source: str) -> FileKind:
    start = text.lstrip()
    if start[:1] in ("[", "{"):
        return FileKind.DIRECTIVES
    if start.startswith("training_dag"):
        return FileKind.TRAINING_DAG
    if looks_like_torch_csv(text):
        return FileKind.TORCH_CSV
    what = f"it starts with {start[:30].splitlines()[0]!a}" if start else "it is empty"
    raise ConfigError(
        f"{source}: {what}; give a schedule program (a JSON array of directives), a TrainingDAG "
        "('training_dag ..') or a torch schedule saved as CSV ('0F0,0F1,..')"
    )


def parse_edges(text: str) -> tuple[tuple[int, int], ...]:
    """Stage edges such as `0-1,0-2`. Raises ConfigError for anything else."""
    edges = []
    for word in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,6})\s*-\s*(\d{1,6})\s*", word)
        edge = (int(found[1]), int(found[2])) if found else (0, 0)
        if edge[0] >= edge[1]:
            raise ConfigError(
                f"--edges: {word[:40]!a} is no edge from an earlier region to a later one, such as 0-1"
            )
        if edge in edges:
            raise ConfigError(f"--edges: {word.strip()} stands there twice")
        edges.append(edge)
    return tuple(edges)


def check(dag: TrainingDAG) -> Verdict:
    """Every rule, then a dry run of all ranks: matching, deadlock, one order for each pair. Pure.

    Where there are no transfers they are inserted first, as every run does.
    """
    broken = _broken_rules(dag)
    if broken:
        return _verdict_of_rules(dag, broken)
    if not _has_transfers(dag):
        dag = insert_transfers(dag)
    ran = dry_run(dag)
    return Verdict(timeline=ran.timeline, error=ran.error, wrong=ran.wrong)


def _has_transfers(dag: TrainingDAG) -> bool:
    return any(type(action) is Transfer for program in dag.programs for action in program)


def _broken_rules(dag: TrainingDAG) -> list[tuple[Rule, Violation]]:
    level, transfers = level_of(dag), _has_transfers(dag)
    index = DagIndex(dag)
    return [
        (rule, violation)
        for rule in RULES
        if level in rule.levels or (transfers and rule.check in _TRANSFER_RULES)
        for violation in rule.check(index)
    ]


def _verdict_of_rules(dag: TrainingDAG, broken: list[tuple[Rule, Violation]]) -> Verdict:
    """The first broken rule is the error; the cells of all are marked, missing actions at the end."""
    lines = [
        f"rank {violation.rank}, {violation.action}: {violation.what}; {violation.remedy} [rule: {rule.name}]"
        for rule, violation in broken[:_SHOWN]
    ]
    if len(broken) > _SHOWN:
        lines.append(f"... and {len(broken) - _SHOWN} more")
    wanted: dict[int, set[str]] = {}
    for _, violation in broken:
        wanted.setdefault(violation.rank, set()).add(violation.action)
    ran = dry_run(dag)
    timeline = ran.timeline
    programs = list(timeline.programs)
    wrong: set[tuple[int, int]] = set()
    for rank, names in wanted.items():
        if 0 <= rank < dag.num_ranks:
            words = list(map(repr, programs[rank]))
            missing = tuple(map(parse_action, filter(_is_action, sorted(names.difference(words)))))
            programs[rank] += missing
            wrong.update((rank, at) for at, word in enumerate(words) if word in names)
            wrong.update((rank, len(words) + at) for at in range(len(missing)))
    # A rule may name a message, or several actions of a tie: then where the dry run is stuck, or what
    # the rank does for that tie.
    wrong = wrong or set(ran.wrong) or _related(programs, broken)
    return Verdict(
        timeline=_reaching(replace(timeline, programs=tuple(programs)), wrong),
        error=RuleViolationError(lines[0]),
        more=tuple(lines[1:]),
        wrong=frozenset(wrong),
    )


def _related(
    programs: Sequence[Sequence[Action]], broken: list[tuple[Rule, Violation]]
) -> set[tuple[int, int]]:
    """Cells of the bucket that a broken rule names, or, without any, the last one of its rank."""
    cells: set[tuple[int, int]] = set()
    ranks = range(len(programs))
    for violation in (violation for _, violation in broken if violation.rank in ranks):
        words = list(map(repr, programs[violation.rank]))
        bucket = re.search(r"\[.+\]", violation.action)
        if bucket is not None:
            cells.update((violation.rank, at) for at, word in enumerate(words) if bucket[0] in word)
    rank = broken[0][1].rank
    return cells or ({(rank, len(programs[rank]) - 1)} if rank in ranks and programs[rank] else set())


def _is_action(text: str) -> bool:
    try:
        parse_action(text)
    except DagParseError:
        return False
    return True


def _reaching(timeline: Timeline, wrong: Set[tuple[int, int]]) -> Timeline:
    """`timeline` with what a rank did not reach appended, up to its last wrong cell, so that it shows."""
    starts = [list(row) for row in timeline.starts]
    for rank, position in wrong:
        while len(starts[rank]) <= position:
            starts[rank].append(max(starts[rank][-1] if starts[rank] else 0.0, timeline.makespan) + 1)
    return replace(timeline, starts=tuple(map(tuple, starts)))
