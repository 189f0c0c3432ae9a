"""What must be true of a TrainingDAG, a plan and this rank's modules before the rank starts. Local."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from piper_owner.dag.graph import TrainingDAG
from piper_owner.dag.nodes import Collective, Sync, SyncKind
from piper_owner.errors import DagError, TieError
from piper_owner.executor.ports import StagePorts, stage_edges
from piper_owner.fetching import check_row_places
from piper_owner.ownership import OwnershipPlan, TiePlan
from piper_owner.p2p_nodes import fetch_nodes, sync_nodes
from piper_owner.transport.base import Fabric

__all__ = ["check_planned", "check_ports", "check_row_stages", "check_side", "check_stages", "check_syncs"]


def check_stages(dag: TrainingDAG, rank: int, stages: Mapping[int, nn.Module]) -> None:
    if sorted(stages) != list(dag.stages_of(rank)):
        raise DagError(
            f"rank {rank} runs the stages {list(dag.stages_of(rank))}, not {sorted(stages)}; give it the "
            "module of each of its stages, by stage number"
        )


def check_planned(tie: TiePlan, rank: int, parameter: nn.Parameter) -> None:
    """The plan was made of what the ranks said they hold; the modules must be that."""
    planned = (tie.shape, tie.dtype, tie.requires_grad)
    dtype = str(parameter.dtype).removeprefix("torch.")
    found = (tuple(parameter.shape), dtype, parameter.requires_grad)
    if planned != found:
        raise TieError(
            f"tie {tie.tie.names}: the plan has (shape, dtype, requires_grad) {planned}, and rank {rank} "
            f"holds {found}; plan again with the modules as they are, on every rank"
        )


def check_syncs(dag: TrainingDAG, plan: OwnershipPlan, rank: int, *, clips: bool, copies: bool) -> None:
    """Raise DagError unless the DAG's syncs are the plan's, in its order, and it clips if it should."""
    program = dag.programs[rank]
    live = [tie for tie in plan.ties if tie.requires_grad]
    planned = () if copies else (*fetch_nodes(live, rank), *sync_nodes(live, rank))
    for kind in SyncKind:
        here = [node for node in program if isinstance(node, Sync) and node.kind is kind]
        wanted = [node for node in planned if node.kind is kind]
        if here != wanted:
            raise DagError(
                f"rank {rank} has {here} in its program where the ownership plan has {wanted}, in this "
                "order; insert the syncs of this plan with p2p_nodes.executable"
            )
    reduced = [node for node in program if isinstance(node, Collective) and node.bucket is not None]
    ties = {tie.name: tie.ranks for tie in plan.ties}
    for node in reduced:
        if not copies or ties.get(str(node.bucket)) != node.ranks:
            raise DagError(
                f"rank {rank} has {node!r} in its program: an all-reduce is for the copies of a tie, over "
                "all of its ranks (p2p_nodes.executable_copies, copies=True)"
            )
    if clips != any(isinstance(node, Collective) and node.bucket is None for node in program):
        raise DagError(
            f"rank {rank}: clip is {'given' if clips else 'not given'}, and its program does "
            f"{'not ' if clips else ''}clip; give both or neither"
        )


def check_ports(dag: TrainingDAG, ports: Sequence[StagePorts]) -> None:
    if len(ports) != dag.num_stages or stage_edges(ports) != tuple(sorted(dag.stage_edges)):
        raise DagError(
            f"the ports of {len(ports)} stages have the edges {list(stage_edges(ports))}, and the "
            f"TrainingDAG of {dag.num_stages} stages has {sorted(dag.stage_edges)}; build it with "
            "the edges of the ports"
        )


def check_side(dag: TrainingDAG, side: Fabric | None) -> None:
    """Raise DagError unless `side` leads to as many pipelines as `dag` is for."""
    found = 1 if side is None else side.world_size
    if found != dag.num_pipelines:
        raise DagError(
            f"the TrainingDAG is for {dag.num_pipelines} pipelines, and the ranks of side= are {found}; give "
            "the same rank of every pipeline"
        )


def check_row_stages(
    ties: Sequence[TiePlan], rank: int, stages: Mapping[int, nn.Module], ports: Sequence[StagePorts]
) -> None:
    """Raise TieError unless this rank can keep rows of `ties` as the plan has it."""
    for tie in ties:
        if rank not in tie.row_replicas:
            continue
        check_row_places(stages, tie, None, rank=rank)
        unknown = [stage for stage in tie.holder(rank).stages if not ports[stage].ids]
        if unknown:
            raise TieError(
                f"tie {tie.tie.names}: rank {rank} is to keep rows only, and looks them up in the stages "
                f"{unknown} by ids that are not inputs of the model; only those are known before a step, so "
                "plan it with layout='dense'"
            )
