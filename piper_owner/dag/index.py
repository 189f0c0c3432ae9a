"""Where every action of a TrainingDAG stands: one pass over it, plain integers, for edges and rules.

Looking up dataclasses in dictionaries costs seconds on 400,000 actions, so (stage, microbatch)
and (stage edge, microbatch) are positions in flat lists instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, assert_never

from piper_owner.dag.nodes import (
    Across,
    BucketStep,
    Collective,
    Compute,
    ComputeKind,
    Sync,
    Transfer,
    TransferKind,
)

if TYPE_CHECKING:
    from piper_owner.dag.graph import TrainingDAG

__all__ = ["ABSENT", "DagIndex", "Violation"]

ABSENT: Final = -1
"""The position of an action that a program does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One broken rule: on which rank, at which action (its text), what is wrong and what to do."""

    rank: int
    action: str
    what: str
    remedy: str


class DagIndex:
    """Positions, within their rank's program, of the actions of `dag`; local and read-only once made.

    Attributes (a *cell* is `stage * num_microbatches + microbatch`; a *slot* is
    `edge * num_microbatches + microbatch`, where edges are the stage edges between two ranks):

    - `forward`, `backward` (B or I), `weight` (B or W), `split` (whether backward is I): by cell;
    - `send_activation`, `recv_activation`, `send_input_grad`, `recv_input_grad`: by slot;
    - `remote_edges`: the (source stage, target stage) of each edge between ranks;
    - `steps`, `syncs`, `collectives`, `across`: by rank, pairs of position and action;
    - `first_use`, `last_use`, `last_weight`: by stage, its first and last compute, and its last
      weight-backward;
    - `last_weight_on`: by rank, its last weight-backward of any stage;
    - `sent`, `received`: by `source rank * num_ranks + target rank`, pipeline messages as slots
      (gradients of inputs come after all activations: `slot + number of slots`);
    - `misplaced_computes`, `misplaced_transfers`: actions that fit no cell or slot, or a taken one.
    """

    __slots__ = (
        "across", "backward", "collectives", "dag", "edge_of", "first_use", "forward", "last_use",
        "last_weight", "last_weight_on", "misplaced_computes", "misplaced_transfers", "num_slots", "received",
        "recv_activation", "recv_input_grad", "remote_edges", "send_activation", "send_input_grad", "sent",
        "split", "steps", "syncs", "weight",
    )  # fmt: skip

    def __init__(self, dag: TrainingDAG) -> None:
        placement, microbatches = dag.placement, dag.num_microbatches
        cells = len(placement) * microbatches
        self.dag = dag
        self.forward = [ABSENT] * cells
        self.backward = [ABSENT] * cells
        self.weight = [ABSENT] * cells
        self.split = [False] * cells
        self.remote_edges = [(a, b) for a, b in dag.stage_edges if placement[a] != placement[b]]
        self.edge_of = {a * len(placement) + b: i for i, (a, b) in enumerate(self.remote_edges)}
        self.num_slots = len(self.remote_edges) * microbatches
        self.send_activation = [ABSENT] * self.num_slots
        self.recv_activation = [ABSENT] * self.num_slots
        self.send_input_grad = [ABSENT] * self.num_slots
        self.recv_input_grad = [ABSENT] * self.num_slots
        self.steps: list[list[tuple[int, BucketStep]]] = [[] for _ in dag.programs]
        self.syncs: list[list[tuple[int, Sync]]] = [[] for _ in dag.programs]
        self.collectives: list[list[tuple[int, Collective]]] = [[] for _ in dag.programs]
        self.across: list[list[tuple[int, Across]]] = [[] for _ in dag.programs]
        self.first_use = [ABSENT] * len(placement)
        self.last_use = [ABSENT] * len(placement)
        self.last_weight = [ABSENT] * len(placement)
        self.last_weight_on = [ABSENT] * dag.num_ranks
        self.sent: dict[int, list[int]] = {}
        self.received: dict[int, list[int]] = {}
        self.misplaced_computes: list[Violation] = []
        self.misplaced_transfers: list[Violation] = []
        for rank in range(dag.num_ranks):
            self._scan(rank)

    def _scan(self, rank: int) -> None:
        # Exact types first: this loop sees every action of the largest programs.
        for position, action in enumerate(self.dag.programs[rank]):
            kind = type(action)
            if kind is Compute:
                self._compute(rank, position, action)  # type: ignore[arg-type]
            elif kind is Transfer:
                self._transfer(rank, position, action)  # type: ignore[arg-type]
            else:
                match action:
                    case BucketStep():
                        self.steps[rank].append((position, action))
                    case Sync():
                        self.syncs[rank].append((position, action))
                    case Collective():
                        self.collectives[rank].append((position, action))
                    case Across():
                        self.across[rank].append((position, action))
                    case Compute() | Transfer():
                        raise AssertionError(f"{kind} is a subclass of an action")
                    case _:
                        assert_never(action)

    def _compute(self, rank: int, position: int, action: Compute) -> None:
        dag, stage, microbatch = self.dag, action.stage, action.microbatch
        if not (0 <= stage < len(dag.placement) and 0 <= microbatch < dag.num_microbatches):
            self._misplaced(rank, action, "there is no such stage or microbatch", "remove it")
            return
        if dag.placement[stage] != rank:
            self._misplaced(
                rank, action, f"stage {stage} is placed on rank {dag.placement[stage]}", "move it there"
            )
            return
        cell = stage * dag.num_microbatches + microbatch
        kind = action.kind
        if kind is ComputeKind.FORWARD:
            taken = self.forward[cell]
            self.forward[cell] = position
        else:
            taken = self._backward(cell, position, kind)
            if kind is not ComputeKind.BACKWARD_INPUT:
                self.last_weight[stage] = position
                self.last_weight_on[rank] = position
        if self.first_use[stage] == ABSENT:
            self.first_use[stage] = position
        self.last_use[stage] = position
        if taken != ABSENT:
            first = dag.programs[rank][taken]
            self._misplaced(
                rank, action, f"action {taken}, {first!r}, already computes it", "keep one of them"
            )

    def _backward(self, cell: int, position: int, kind: ComputeKind) -> int:
        taken = ABSENT
        if kind is not ComputeKind.BACKWARD_WEIGHT:
            taken = self.backward[cell]
            self.backward[cell] = position
            self.split[cell] = kind is ComputeKind.BACKWARD_INPUT
        if kind is not ComputeKind.BACKWARD_INPUT:
            if self.weight[cell] != ABSENT:
                taken = self.weight[cell]
            self.weight[cell] = position
        return taken

    def _misplaced(self, rank: int, action: Compute, what: str, remedy: str) -> None:
        self.misplaced_computes.append(Violation(rank=rank, action=repr(action), what=what, remedy=remedy))

    def _transfer(self, rank: int, position: int, action: Transfer) -> None:
        dag, kind = self.dag, action.kind
        stages = len(dag.placement)
        stage, other, peer = action.stage, action.peer_stage, action.peer
        sends_activation = kind is TransferKind.SEND_ACTIVATION
        forward_end = sends_activation or kind is TransferKind.RECV_INPUT_GRAD
        edge = self.edge_of.get(stage * stages + other if forward_end else other * stages + stage, ABSENT)
        if (
            edge == ABSENT
            or not 0 <= action.microbatch < dag.num_microbatches
            or not (0 <= stage < stages and 0 <= other < stages)
            or dag.placement[stage] != rank
            or dag.placement[other] != peer
        ):
            self.misplaced_transfers.append(self._stray(rank, action))
            return
        slot = edge * dag.num_microbatches + action.microbatch
        match kind:
            case TransferKind.SEND_ACTIVATION:
                taken = self.send_activation
                self.sent.setdefault(rank * dag.num_ranks + peer, []).append(slot)
            case TransferKind.RECV_ACTIVATION:
                taken = self.recv_activation
                self.received.setdefault(peer * dag.num_ranks + rank, []).append(slot)
            case TransferKind.SEND_INPUT_GRAD:
                taken = self.send_input_grad
                self.sent.setdefault(rank * dag.num_ranks + peer, []).append(slot + self.num_slots)
            case TransferKind.RECV_INPUT_GRAD:
                taken = self.recv_input_grad
                self.received.setdefault(peer * dag.num_ranks + rank, []).append(slot + self.num_slots)
            case _:
                assert_never(kind)
        if taken[slot] != ABSENT:
            self.misplaced_transfers.append(
                Violation(
                    rank=rank,
                    action=repr(action),
                    what=f"action {taken[slot]} is the same transfer",
                    remedy="keep one of them",
                )
            )
        taken[slot] = position

    def _stray(self, rank: int, action: Transfer) -> Violation:
        return Violation(
            rank=rank,
            action=repr(action),
            what="no stage edge between two ranks, at these stages, ranks and microbatch, needs it",
            remedy="remove it: insert_transfers adds exactly the transfers that the stage edges need",
        )
