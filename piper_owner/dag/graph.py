"""The TrainingDAG: what every rank does in one training step, in which order, and what needs what.

Stored are the programs alone: per rank, its actions in temporal order. Data edges follow from
the actions (a forward feeds its backward, a send its recv, the last weight-backward the step),
so the two can never disagree.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from piper_owner.dag.edges import data_edges, offsets, topological_ids
from piper_owner.dag.nodes import Action
from piper_owner.errors import DagError

__all__ = ["Bucket", "Edge", "EdgeKind", "Node", "TrainingDAG"]


class EdgeKind(enum.Enum):
    """Why one action comes after another."""

    DATA = "data"
    TEMPORAL = "temporal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """The unit that an optimizer step, or the sync of a tie, works on.

    A plain bucket holds parameters of one stage and is stepped by that stage's rank; its `owner`
    is None. A tie is a bucket of its own: `stages` are all stages that use the parameter, and
    `owner` is the one rank that steps it; `row_ranks`, ascending, are its replicas that keep no copy
    and fetch the rows that they use.
    """

    name: str
    stages: tuple[int, ...]
    owner: int | None = None
    row_ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One action of one rank."""

    rank: int
    action: Action


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """`target` comes after `source`: it needs its result, or the rank's program says so."""

    source: Node
    target: Node
    kind: EdgeKind


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingDAG:
    """One training step of all ranks.

    `placement[s]` is the rank of stage `s`; `stage_edges` says which stage's activation feeds
    which stage (a chain for an ordinary pipeline); `programs[r]` are the actions of rank `r`, in
    temporal order. With `num_pipelines` above 1, that many equal pipelines run the same programs on other
    data (data parallelism), and one of them stands for all.

    Raises DagError when the parts do not fit together (a rank or stage out of range, two buckets
    of one name, an owner that holds nothing). Whether the programs are right is for
    `piper_owner.dag.rules.check_rules` to say.
    """

    placement: tuple[int, ...]
    num_ranks: int
    num_microbatches: int
    stage_edges: tuple[tuple[int, int], ...]
    buckets: tuple[Bucket, ...]
    programs: tuple[tuple[Action, ...], ...]
    num_pipelines: int = 1

    def __post_init__(self) -> None:
        _check_shape(self)
        _check_buckets(self)

    @property
    def num_stages(self) -> int:
        """How many stages the pipeline has."""
        return len(self.placement)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages placed on `rank`, ascending."""
        return tuple(stage for stage, place in enumerate(self.placement) if place == rank)

    def bucket(self, name: str) -> Bucket:
        """The bucket of that name; KeyError if there is none."""
        for bucket in self.buckets:
            if bucket.name == name:
                return bucket
        raise KeyError(name)

    def holders_of(self, bucket: Bucket) -> tuple[int, ...]:
        """The ranks that use `bucket`, ascending."""
        return tuple(sorted({self.placement[stage] for stage in bucket.stages}))

    def replicas_of(self, bucket: Bucket) -> tuple[int, ...]:
        """The ranks that use a tie and do not own it, ascending; none for a plain bucket."""
        if bucket.owner is None:
            return ()
        return tuple(rank for rank in self.holders_of(bucket) if rank != bucket.owner)

    def nodes(self) -> Iterator[Node]:
        """Every action: rank by rank, in temporal order."""
        for rank, program in enumerate(self.programs):
            for action in program:
                yield Node(rank=rank, action=action)

    def edges(self) -> Iterator[Edge]:
        """Every edge: the temporal ones (consecutive actions of a rank), then the data edges."""
        nodes = list(self.nodes())
        base = offsets(self)
        for start, end in itertools.pairwise(base):
            for i in range(start, end - 1):
                yield Edge(source=nodes[i], target=nodes[i + 1], kind=EdgeKind.TEMPORAL)
        for source, target in data_edges(self):
            yield Edge(source=nodes[source], target=nodes[target], kind=EdgeKind.DATA)

    def topological_order(self) -> tuple[Node, ...]:
        """All nodes, each after everything it needs; equal DAGs give equal orders.

        Raises DagError that names the actions of one cycle when there is no such order.
        """
        nodes = list(self.nodes())
        return tuple(nodes[i] for i in topological_ids(self))


def _check_shape(dag: TrainingDAG) -> None:
    if dag.num_ranks < 1 or dag.num_microbatches < 1 or not dag.placement or dag.num_pipelines < 1:
        raise DagError(
            f"a TrainingDAG needs at least one rank, stage, microbatch and pipeline, not {dag.num_ranks}, "
            f"{len(dag.placement)}, {dag.num_microbatches} and {dag.num_pipelines}"
        )
    for stage, rank in enumerate(dag.placement):
        if not 0 <= rank < dag.num_ranks:
            raise DagError(
                f"stage {stage} is placed on rank {rank}, but the ranks are 0 to {dag.num_ranks - 1}"
            )
    if len(dag.programs) != dag.num_ranks:
        raise DagError(
            f"{len(dag.programs)} programs for {dag.num_ranks} ranks: give one each, empty if it idles"
        )
    stages = range(dag.num_stages)
    for early, late in dag.stage_edges:
        if early == late or early not in stages or late not in stages:
            raise DagError(
                f"stage edge {early}->{late}: give two different stages of 0 to {dag.num_stages - 1}"
            )
    if len(set(dag.stage_edges)) != len(dag.stage_edges):
        raise DagError(f"a stage edge is listed twice in {dag.stage_edges}; list each once")


def _check_buckets(dag: TrainingDAG) -> None:
    seen = set()
    for bucket in dag.buckets:
        if not bucket.name or bucket.name in seen:
            raise DagError(f"bucket {bucket.name!r}: each bucket has a name, and no two have the same")
        seen.add(bucket.name)
        if not bucket.stages or list(bucket.stages) != sorted(set(bucket.stages)):
            raise DagError(
                f"bucket {bucket.name!r} lists stages {bucket.stages}; list at least one, ascending"
            )
        for stage in bucket.stages:
            if not 0 <= stage < dag.num_stages:
                raise DagError(
                    f"bucket {bucket.name!r}: stage {stage} is not one of 0 to {dag.num_stages - 1}"
                )
        if bucket.owner is None:
            if len(bucket.stages) > 1:
                raise DagError(
                    f"bucket {bucket.name!r} belongs to stages {bucket.stages} but has no owner: a plain "
                    "bucket belongs to one stage; name the rank that owns a tie"
                )
        elif bucket.owner not in dag.holders_of(bucket):
            raise DagError(
                f"bucket {bucket.name!r} is owned by rank {bucket.owner}, which runs none of its stages "
                f"{bucket.stages}; choose one of the ranks {list(dag.holders_of(bucket))}"
            )
        replicas = dag.replicas_of(bucket)
        if list(bucket.row_ranks) != sorted(set(bucket.row_ranks).intersection(replicas)):
            raise DagError(
                f"bucket {bucket.name!r} keeps rows only on the ranks {bucket.row_ranks}; list some of its "
                f"replicas {replicas}, ascending"
            )
