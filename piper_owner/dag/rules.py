"""The rules a TrainingDAG keeps, as a table, and the levels of lowering at which each holds.

    BUILT        a schedule made it: what is computed where, and in which order
    SYNCED       and the ties are combined, stepped and sent back
    EXECUTABLE   and the transfers and the steps are there: a rank can run it

The rules look at one rank, or at one pair of ranks, at a time; whether all ranks together can
finish is for the dry run (`piper_owner.simulate`) to say.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from piper_owner.dag import pipeline_rules, pipelines_rules, sync_rules
from piper_owner.dag.graph import TrainingDAG
from piper_owner.dag.index import DagIndex, Violation
from piper_owner.dag.nodes import BucketStep, Collective, Sync, SyncKind, Transfer
from piper_owner.errors import RuleViolationError

__all__ = ["RULES", "Level", "Rule", "check_rules", "level_of"]

_SHOWN: Final = 8


class Level(enum.Enum):
    """How far a TrainingDAG has been lowered."""

    BUILT = "built"
    SYNCED = "synced"
    EXECUTABLE = "executable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule, the levels at which it holds, and the function that finds where it is broken."""

    name: str
    levels: frozenset[Level]
    check: Callable[[DagIndex], Iterator[Violation]]


_ALWAYS: Final = frozenset(Level)
_FROM_SYNCED: Final = frozenset({Level.SYNCED, Level.EXECUTABLE})
_EXECUTABLE: Final = frozenset({Level.EXECUTABLE})

RULES: Final = (
    Rule(name="computed once, where placed", levels=_ALWAYS, check=pipeline_rules.computed_once),
    Rule(name="forward before backward", levels=_ALWAYS, check=pipeline_rules.compute_order),
    Rule(name="every transfer present", levels=_EXECUTABLE, check=pipeline_rules.transfers_present),
    Rule(name="transfers beside their compute", levels=_EXECUTABLE, check=pipeline_rules.transfer_positions),
    Rule(name="messages in one order", levels=_EXECUTABLE, check=pipeline_rules.messages_in_order),
    Rule(name="every bucket stepped once", levels=_EXECUTABLE, check=sync_rules.stepped_once),
    Rule(name="steps follow gradients", levels=_ALWAYS, check=sync_rules.steps_follow_gradients),
    Rule(name="sync nodes belong to a tie", levels=_FROM_SYNCED, check=sync_rules.sync_belongs),
    Rule(name="tie 1: one gradient send", levels=_FROM_SYNCED, check=sync_rules.one_gradient_send),
    Rule(name="tie 2: sends match recvs in order", levels=_FROM_SYNCED, check=sync_rules.tied_messages_match),
    Rule(name="tie 3: recvs, step, weights, next use", levels=_FROM_SYNCED, check=sync_rules.step_between),
    Rule(name="tie 4: rows before their use", levels=_FROM_SYNCED, check=sync_rules.rows_come_first),
    Rule(name="one clip on every rank", levels=_FROM_SYNCED, check=sync_rules.one_clip),
    Rule(name="averaged over pipelines", levels=_EXECUTABLE, check=pipelines_rules.averaged_across),
    Rule(name="all-reduces agree", levels=_FROM_SYNCED, check=sync_rules.all_reduces_agree),
)
"""Every rule, in the order in which they are checked."""


def check_rules(dag: TrainingDAG, level: Level) -> None:
    """Check every rule that holds at `level`. Pure and local.

    Raises RuleViolationError that lists what is broken: the rule, the rank, the action and what
    to do about it.
    """
    index = DagIndex(dag)
    lines: list[str] = []
    broken = 0
    for rule in RULES:
        if level not in rule.levels:
            continue
        for violation in rule.check(index):
            broken += 1
            if broken <= _SHOWN:
                where = f"rank {violation.rank}, {violation.action}"
                lines.append(f"  [{rule.name}] {where}: {violation.what}; {violation.remedy}")
    if broken:
        more = f"\n  ... and {broken - _SHOWN} more" if broken > _SHOWN else ""
        raise RuleViolationError(
            f"the TrainingDAG breaks a rule of level {level.value} in {broken} places:\n"
            + "\n".join(lines)
            + more
        )


def level_of(dag: TrainingDAG) -> Level:
    """The level that the actions of `dag` claim, by their kinds alone."""
    stepped: set[str] = set()
    transfers = synced = False
    for program in dag.programs:
        for action in program:
            match action:
                case Transfer():
                    transfers = True
                case BucketStep(bucket=bucket):
                    stepped.add(bucket)
                case Sync(kind=kind, bucket=bucket):
                    synced = True
                    if kind is SyncKind.OWNER_STEP:
                        stepped.add(bucket)
                case Collective():
                    synced = True
                case _:
                    pass
    needs_transfers = any(dag.placement[a] != dag.placement[b] for a, b in dag.stage_edges)
    if stepped.issuperset(bucket.name for bucket in dag.buckets) and (transfers or not needs_transfers):
        return Level.EXECUTABLE
    return Level.SYNCED if synced else Level.BUILT
