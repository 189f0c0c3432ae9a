"""From a schedule program to the TrainingDAG of one pipeline, computes only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from piper_owner.dag.graph import Bucket, TrainingDAG
from piper_owner.dag.nodes import Action, Compute, ComputeKind
from piper_owner.dag.rules import Level, check_rules
from piper_owner.directives.completing import complete
from piper_owner.directives.model import Filter, Pass, Program, Split
from piper_owner.directives.ordering import OrderGraph
from piper_owner.directives.placing import read_places
from piper_owner.directives.regions import Regions, Splitting, read_split
from piper_owner.errors import DirectiveError
from piper_owner.schedules.one_f_one_b import one_f_one_b

__all__ = ["MAX_CELLS", "Lowered", "lower_program"]

MAX_CELLS: Final = 2**20
"""The most regions x microbatches of a program; more is taken for a slip of the pen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """What a program means for a model.

    `dag` is one pipeline at Level.BUILT, and stands for each of `num_pipelines` equal ones (the data
    parallel degree; 1 without `replicate`). Stages are the regions in trace order; `placement` and
    `num_microbatches` are those of `dag`. `devices[p][r]` is the device, as the program numbers them,
    that is rank r of pipeline p.
    """

    dag: TrainingDAG
    placement: tuple[int, ...]
    num_microbatches: int
    num_pipelines: int
    devices: tuple[tuple[int, ...], ...]


def lower_program(
    program: Program,
    *,
    tags: Sequence[Mapping[str, int]],
    stage_edges: Iterable[tuple[int, int]],
    buckets: Iterable[Bucket],
) -> Lowered:
    """Apply `program` to the model whose stage s is annotated `tags[s]`. Pure and local.

    `stage_edges` say which stage feeds which, (early, late) with early < late. Each rank computes
    in an order that keeps every data dependency and every `order` directive; without one it is 1F1B,
    with some it is as near to that as they let it be (see `completing`).

    An order holds on all devices together where it is checked, and on each device where it runs:
    no message is sent for it, so what it puts after a compute of another device waits for data only.

    Raises DirectiveError, quoting the directives, for filters that pick nothing, regions placed
    twice or nowhere, unequal pipelines, a second split, and orders that contradict themselves, each
    other or the data dependencies; ConfigError for a model without regions; DagError for edges and
    buckets that do not fit the stages.
    """
    regions = Regions(program, tags)
    placed = read_places(regions)
    splitting = read_split(regions)
    edges = tuple(stage_edges)
    _limit(program, len(tags), splitting.num_microbatches)
    num_ranks = len(placed.devices[0])

    def dag_of(programs: tuple[tuple[Action, ...], ...]) -> TrainingDAG:
        return TrainingDAG(
            placement=placed.placement,
            num_ranks=num_ranks,
            num_microbatches=splitting.num_microbatches,
            stage_edges=edges,
            buckets=tuple(buckets),
            programs=programs,
        )

    buckets = tuple(buckets)
    dag_of(((),) * num_ranks)  # the parts fit together before anything is made of them
    if any(True for _ in program.orders()):
        graph = OrderGraph(regions, splitting, edges)
        dag = dag_of(complete(graph, placed.placement, num_ranks))
        _refuse_crossing(dag, regions, splitting)
    else:
        dag = dag_of(one_f_one_b(placed.placement, num_ranks, splitting.num_microbatches))
    check_rules(dag, Level.BUILT)
    return Lowered(
        dag=dag,
        placement=placed.placement,
        num_microbatches=splitting.num_microbatches,
        num_pipelines=len(placed.devices),
        devices=placed.devices,
    )


def _limit(program: Program, num_stages: int, num_microbatches: int) -> None:
    if num_stages * num_microbatches > MAX_CELLS:
        index = next(i for i, directive in enumerate(program.directives) if isinstance(directive, Split))
        raise program.error(
            index,
            f"{num_microbatches} microbatches of {num_stages} regions are more than {MAX_CELLS} together; "
            "split into fewer",
        )


def _refuse_crossing(dag: TrainingDAG, regions: Regions, splitting: Splitting) -> None:
    """Raise DirectiveError where orders let two ranks take messages of one stage edge crosswise.

    The sender makes them in one order and the receiver uses them in another: the receiver would have
    to put messages aside. No schedule asks for that; two orders that do have a slip in one of them.
    """
    forwards: list[list[int]] = [[] for _ in dag.placement]
    backwards: list[list[int]] = [[] for _ in dag.placement]
    for program in dag.programs:
        for action in program:
            if type(action) is Compute:
                if action.kind is ComputeKind.FORWARD:
                    forwards[action.stage].append(action.microbatch)
                elif action.kind is not ComputeKind.BACKWARD_WEIGHT:
                    backwards[action.stage].append(action.microbatch)
    for early, late in dag.stage_edges:
        if dag.placement[early] == dag.placement[late]:
            continue
        for part, source, target, made, used in (
            (Pass.FORWARD, early, late, forwards[early], forwards[late]),
            (Pass.BACKWARD, late, early, backwards[late], backwards[early]),
        ):
            if made != used:
                error = _Crossing(regions, splitting, part, source, target).error(made, used)
                if error is not None:
                    raise error


class _Crossing:
    """Looks for the two directives that order the ends of one stage edge differently."""

    def __init__(self, regions: Regions, splitting: Splitting, part: Pass, source: int, target: int) -> None:
        self.regions, self.splitting, self.part = regions, splitting, part
        self.source, self.target = source, target

    def error(self, made: list[int], used: list[int]) -> DirectiveError | None:
        """The error for the first two microbatches that two directives order so; None if none do."""
        senders = list(self._ranks(self.source))
        receivers = list(self._ranks(self.target))
        program = self.regions.program
        for first, second in _inversions(made, used):
            sender = next((i for i, at in senders if _before(at, first, second)), None)
            receiver = next((i for i, at in receivers if _before(at, second, first)), None)
            if sender is not None and receiver is not None:
                what = "activations" if self.part is Pass.FORWARD else "gradients"
                with_what = "itself" if sender == receiver else program.quote(sender)
                return program.error(
                    receiver,
                    f"it crosses with {with_what}: two ranks' messages, the {what} that stage {self.source} "
                    f"sends to stage {self.target}, are made for microbatch {first} before {second} there "
                    f"and used for {second} before {first} here; messages of a pair are first in, first out: "
                    "give both stages one order of microbatches",
                )
        return None

    def _ranks(self, stage: int) -> Iterator[tuple[int, dict[int, int]]]:
        """By directive that picks this pass of `stage`: the group of each microbatch."""
        for index, order in self.regions.program.orders():
            at: dict[int, int] = {}
            for number, group in enumerate(order.groups):
                for picked in group:
                    if self._fits(picked):
                        stages, microbatches = self.regions.picked(index, picked, self.splitting)
                        if stage in stages:
                            at.update(dict.fromkeys(microbatches, number))
            if len(at) > 1:
                yield index, at

    def _fits(self, picked: Filter) -> bool:
        if self.part is Pass.FORWARD:
            return picked.part in (None, Pass.FORWARD)
        return picked.part in (None, Pass.BACKWARD, Pass.BACKWARD_INPUT)


def _before(at: Mapping[int, int], first: int, second: int) -> bool:
    return first in at and second in at and at[first] < at[second]


def _inversions(made: list[int], used: list[int]) -> Iterator[tuple[int, int]]:
    """Neighbours of `used` that `made` has the other way round, as `made` has them."""
    place = {microbatch: at for at, microbatch in enumerate(made)}
    for earlier, later in pairwise(used):
        if place[later] < place[earlier]:
            yield later, earlier
