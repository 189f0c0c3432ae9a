"""Agree on the owners across the ranks of a pipeline, and open the lines between them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining.stage import _PipelineStageBase

from piper_owner.data_parallel import DataParallel, SideGroup
from piper_owner.ddp import averages, keep_out
from piper_owner.errors import ConfigError, ExchangeError, ReplicaMismatchError, TieError
from piper_owner.exchange import Exchange
from piper_owner.grid import agree_beside, as_scope, check_alike, check_grid, share_averages
from piper_owner.norms import add_powers
from piper_owner.ownership import (
    OwnerChoice,
    OwnershipPlan,
    ParameterUse,
    Scope,
    Tie,
    TiePlan,
    Use,
    plan_ownership,
)
from piper_owner.process_groups import fabric_of, side_group
from piper_owner.sharding import check_shards, describe_shards, reshard
from piper_owner.stages import (
    NameMap,
    Stage,
    numbered_stages,
    refuse_pending_backwards,
    refuse_scaled_twice,
    scale_shared_once,
)
from piper_owner.tied import TiedParameter
from piper_owner.ties import describe_uses
from piper_owner.transport import Fabric, Failure, Line
from piper_owner.transport.agreement import Agreement
from piper_owner.uniting import tie_here

__all__ = ["Ownership", "TieLike", "assign_over", "assign_owners"]

TieLike = Tie | Sequence[str]
"""A tie, or its names."""

DEFAULT_CHUNK_BYTES: Final = 4 * 2**20


class Ownership:
    """Who owns each tie, and this rank's lines to the others. Made by `assign_owners`.

    One OwnerOptimizer per rank uses it; close it when training ends.
    """

    def __init__(
        self,
        plan: OwnershipPlan,
        exchange: Exchange,
        *,
        fabric: Fabric,
        agreement: Agreement,
    ) -> None:
        self.plan = plan
        self.exchange = exchange
        self.rank = fabric.rank
        self.board = fabric.board
        self.on_sync: list[Callable[[], None]] = []
        self.pipeline_stages: list[_PipelineStageBase] = []
        """Stages of torch.distributed.pipelining on this rank, as far as they were given."""
        self._agreement = agreement
        self._is_scaling_checked = False
        self.step = 0
        """Optimizer steps taken so far; every message carries it."""

    @property
    def is_follower(self) -> bool:
        """Whether another pipeline owns the ties of this one."""
        return self.exchange.side is not None and self.exchange.side.is_follower

    def owns(self, tie: TiePlan) -> bool:
        """Whether this rank owns `tie`."""
        return tie.owner == self.rank and not self.is_follower

    def together(self, work: Callable[[], str]) -> list[str]:
        """`work()` of every rank of this pipeline, by rank; an error on one is raised on all. Collective.

        Raises TieError, on every rank, if pipelines side by side answer differently.
        """
        everyone = self._agreement.everyone(work)
        check_alike(everyone)
        return everyone[self._agreement.index]

    def combine(self, value: float, *, largest: bool = False) -> float:
        """The sum, or the largest, of every rank's `value`, added in ascending rank. Collective.

        Raises MessageMismatchError on every rank unless all of them are in the same step.
        """
        return self._agreement.combine(value, self.step, largest=largest)

    def combine_pipelines(self, value: float, *, largest: bool = False) -> float:
        """The same over this rank of every pipeline of `dp_group`; `value` itself without one."""
        return self._agreement.combine_pipelines(value, self.step, largest=largest)

    def combine_power(
        self, own: float, of_ties: float, *, largest: bool, groups: Sequence[dist.ProcessGroup]
    ) -> float:
        """The power of the whole norm, of this rank's `own` gradients and those of its ties. Collective.

        It is to be added up over `groups`, so if those add up pipelines, the ties count in one of them.
        """
        side = self.exchange.side
        if side is None:
            return self.combine(add_powers(own, of_ties, largest=largest), largest=largest)
        own, of_ties = self.combine(own, largest=largest), self.combine(of_ties, largest=largest)
        if side.is_global:
            of_ties = self.combine_pipelines(of_ties, largest=largest)
        if not side.is_lead and any(
            set(side.ranks or ()) <= set(dist.get_process_group_ranks(group)) for group in groups
        ):
            of_ties = 0.0
        return add_powers(own, of_ties, largest=largest)

    def check_scaling(self) -> None:
        """Raise ConfigError, on every rank, if a schedule of torch has scaled a tie's gradient twice.

        Only the first call looks: it comes before the first exchange of gradients. Collective. Every
        call raises on a rank where the weight half of a backward is still pending.
        """
        refuse_pending_backwards(self.pipeline_stages, self.rank)
        if self._is_scaling_checked:
            return
        self._is_scaling_checked = True
        shared = {
            (tie.name, holder.rank)
            for tie in self.plan.ties
            for holder in tie.holders
            if len(holder.names) > 1 or len(holder.stages) > 1
        }
        tied = self.exchange.tied

        def look() -> str:
            refuse_scaled_twice({name: tied[name].parameter for name, rank in shared if rank == self.rank})
            return ""

        if shared:
            self.together(look)

    def check(self) -> bool:
        """True if every replica, in every pipeline, is bit for bit the owner's value. Collective.

        Raises ReplicaMismatchError with the largest difference, on every holder of the tie.
        """
        side = self.exchange.side
        try:
            if side is None:
                return self.exchange.check(self.step)
            differences = self.exchange.differences(self.step)
        except ReplicaMismatchError:
            raise  # all of its holders have it, and `sync` may follow
        except BaseException as error:
            self.report(f"the check of replicas after step {self.step}", error)
            raise
        everyone = self._agreement.everyone(lambda: json.dumps(differences))
        for pipeline, answers in enumerate(everyone):
            for rank, answer in enumerate(answers):
                for name, (inside, across) in json.loads(answer).items():
                    if inside or across:
                        tie = self.plan[name]
                        raise ReplicaMismatchError(
                            f"tie {tie.tie.names}: rank {rank} of pipeline {pipeline}: a copy is not that of "
                            f"the owner, rank {tie.owner}, after step {self.step}: copies of the pipeline "
                            f"differ by up to {inside:g}, this one from pipeline 0 by up to {across:g}; "
                            "something other than the owner's step has written the weights"
                        )
        return True

    def sync(self) -> None:
        """Give every holder, and the owner's masters, the value of the tie's first name. Collective.

        Call it on every rank after weights were loaded or written.
        """
        with self.reporting("sync"):
            self.exchange.flush()
            self.exchange.share_values(warn=False)
        for refill in self.on_sync:
            refill()

    def share_first_values(self) -> None:
        """Make all copies the value of the tie's first name; warns where one differed. Collective."""
        try:
            self.exchange.share_values()
        except Warning:
            raise  # where warnings are errors: the copies are equal, and no rank is left waiting
        except BaseException as error:
            self.report("the first values of ties", error)
            raise

    def describe(self) -> str:
        """Who owns and who holds each tie, in words. Local."""
        if not self.plan.ties:
            return f"no tied parameters over {self.plan.world_size} ranks"
        lines = []
        for tie in self.plan.ties:
            shape = " x ".join(map(str, tie.shape)) or "scalar"
            frozen = "" if tie.requires_grad else ", frozen"
            lines.append(f"{' = '.join(tie.tie.names)}: one parameter, {shape} {tie.dtype}{frozen}")
            for holder in tie.holders:
                owns = holder.rank == tie.owner and not self.is_follower
                role = "owns it" if owns else "holds a replica"
                stages = ", ".join(map(str, holder.stages))
                lines.append(f"  rank {holder.rank} {role} (stage {stages}, {holder.use.value} use)")
        side = self.exchange.side
        if side is not None:
            whose = "rank in pipeline 0, for all" if side.is_global else "rank of each, in equal steps"
            scope = self.plan.scope.value
            lines.append(f"pipeline {side.index} of {side.size}: owned by the {whose} (scope {scope})")
        return "\n".join(lines)

    @contextmanager
    def reporting(self, where: str) -> Iterator[None]:
        """Let every other rank know of an error inside: it is written to the board, and this rank's
        lines close, so that every wait for it fails at once and names the cause. Local."""
        try:
            yield
        except BaseException as error:
            self.report(where, error)
            raise

    def report(self, where: str, error: BaseException) -> None:
        """What `reporting` does with an error. Local."""
        if isinstance(error, ExchangeError) and f"step {self.step}" not in str(error):
            error.args = (f"{where}: {error}",)  # an agreement of all ranks does not know its purpose
        first = (str(error).splitlines() or [""])[0]
        if self.exchange.side is not None:
            where = f"{where} of pipeline {self._agreement.index}"
        self.board.report(Failure(rank=self.rank, where=where, error=f"{type(error).__name__}: {first}"))
        self.abandon()

    def close(self) -> None:
        """Wait until the peers have all that was sent, then close the lines. Twice is fine."""
        try:
            self.exchange.flush()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the lines at once, so that every peer that waits for this rank fails. Local."""
        self.exchange.close()
        self._agreement.close()

    def __repr__(self) -> str:
        return f"<Ownership of rank {self.rank}: {self.describe()}>"


def assign_owners(
    stages: Stage | Sequence[Stage],
    ties: Sequence[TieLike],
    *,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    owner: OwnerChoice | Mapping[str, OwnerChoice] = "auto",
    names: NameMap | None = None,
    uses: Mapping[str, str] | None = None,
    scope: Literal["pipeline", "global"] = "pipeline",
    dp_group: dist.ProcessGroup | DeviceMesh | None = None,
    timeout: timedelta | None = None,
) -> Ownership:
    """Decide who owns each tie, and make its copies one. Collective over `group`, and `dp_group`.

    Every rank calls it, also one that holds no tied parameter, before it makes its optimizer.

    stages: this rank's stage modules, or PipelineStages of torch.distributed.pipelining, or none.
        Their parameters are named as in the full model, apart from the prefixes of DDP,
        torch.compile and activation checkpointing; `names` maps others.
    ties: from `find_ties(full_model)`, or names, such as `[("embed.weight", "lm_head.weight")]`.
    group: the pipeline's process group, a one-dimensional DeviceMesh, or None for all ranks
        (without an initialised process group: a world of one). Ranks here are those of the group.
    owner: `"auto"`, `"first"`, `"last"`, or a rank, for all ties or by canonical name.
    uses: overrides how a parameter is used, by name: `"lookup"` or `"dense"`.
    scope: `"pipeline"`: an owner in each of several equal pipelines; `"global"`: one for all, in the first.
    dp_group: as `group`, the ranks of this rank's stages in all pipelines, in the order of those. The
        combined gradient of a tie is averaged over it, once. DistributedDataParallel then leaves ties
        out where it wraps a stage after this call; before is right too. Without `dp_group` gradients
        are averaged before they are combined, by DistributedDataParallel or FSDP.
    timeout: bounds every wait of one rank for another; by default the group's.

    Names that meet on one rank become one Parameter there. A schedule of torch.distributed.pipelining
    with `scale_grads` scales it once if PipelineStages are given, or `attach` is called; if modules are
    given without, the first step raises ConfigError. Stages may be sharded by `fully_shard`, before this
    call, and alike on every holder of a tie (docs/fsdp.md). Copies on several ranks take the value of the
    holder of the tie's first name, with a warning if they differed. A copy on the meta device is
    allocated, on the device of its stages' other parameters, and filled; the first name's may not be there.

    Raises TieError on every rank for a name that no stage holds, a name in two ties, or copies that
    differ in shape, dtype or requires_grad; ConfigError on every rank for bad arguments;
    PeerTimeoutError if a rank of the group never calls.
    """
    return assign_over(
        fabric_of(group, timeout),
        stages,
        ties,
        owner=owner,
        names=names,
        uses=uses,
        scope=scope,
        side=None if dp_group is None else lambda: side_group(group, dp_group, timeout),
    )


def assign_over(
    fabric: Fabric,
    stages: Stage | Sequence[Stage],
    ties: Sequence[TieLike],
    *,
    owner: OwnerChoice | Mapping[str, OwnerChoice] = "auto",
    names: NameMap | None = None,
    uses: Mapping[str, str] | None = None,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    scope: str = "pipeline",
    side: Callable[[], SideGroup] | None = None,
) -> Ownership:
    """`assign_owners` over any fabric. Collective over its ranks, and those of the group that `side` gives.

    `side` is called once, where an error of it reaches all ranks.
    """
    rank, world_size = fabric.rank, fabric.world_size
    everyone = fabric.group(tuple(range(world_size)), "agreement") if world_size > 1 else None
    agreement = Agreement(everyone, rank)
    numbered: dict[int, torch.nn.Module] = {}
    sides: list[SideGroup] = []

    def describe() -> str:
        if side is not None:
            sides.append(side())
        numbered.update(numbered_stages(stages, rank=rank, world_size=world_size))
        reshard(numbered.values())
        found = describe_uses(numbered, rank=rank, names=names, uses=_uses(uses))
        wanted = [tie if isinstance(tie, Tie) else Tie(tuple(tie)) for tie in ties]
        answer = {
            "uses": [_use_to_json(use) for use in found],
            "ties": [list(tie.names) for tie in wanted],
            "owner": dict(owner) if isinstance(owner, Mapping) else owner,
            "shards": describe_shards(numbered, wanted, names=names),
            "scope": as_scope(scope).value,
            "side": [[each.fabric.rank, each.fabric.world_size] for each in sides],
        }
        return json.dumps(answer)

    def agree() -> OwnershipPlan:
        return _plan([json.loads(text) for text in agreement.everyone(describe)[0]], world_size=world_size)

    plan = agree_beside(agreement, fabric, sides, agree)
    tied: dict[str, TiedParameter] = {}

    def make_one() -> str:
        tied.update(tie_here(plan.held_by(rank), numbered, fabric, names=names))
        return averages(numbered.values(), tied, sides[0].ranks) if sides else ""

    averaged = agreement.everyone(make_one)
    if sides:
        check_alike(averaged)
        share_averages(plan, tied, averaged[0])
        for module in numbered.values():
            keep_out(module, [tie.parameter for tie in tied.values() if not tie.is_averaged])
    return _connect(plan, tied, stages, fabric, agreement, sides, chunk_bytes=chunk_bytes)


def _connect(
    plan: OwnershipPlan,
    tied: Mapping[str, TiedParameter],
    stages: Stage | Sequence[Stage],
    fabric: Fabric,
    agreement: Agreement,
    sides: Sequence[SideGroup],
    *,
    chunk_bytes: int,
) -> Ownership:
    """Open the lines of `plan` and make all copies equal. Collective."""
    listed = [stages] if isinstance(stages, torch.nn.Module | _PipelineStageBase) else list(stages)
    pipeline_stages = [stage for stage in listed if isinstance(stage, _PipelineStageBase)]
    scale_shared_once(pipeline_stages)
    lines = _open_lines(plan, fabric, chunk_bytes)
    beside = [DataParallel(each, fabric.rank, plan.scope, chunk_bytes=chunk_bytes) for each in sides]
    exchange = Exchange(fabric.rank, tied, lines, *beside)
    ownership = Ownership(plan, exchange, fabric=fabric, agreement=agreement)
    ownership.pipeline_stages += pipeline_stages
    ownership.share_first_values()
    return ownership


def _open_lines(plan: OwnershipPlan, fabric: Fabric, chunk_bytes: int) -> dict[int, Line]:
    """By peer, this rank's line to each rank that it exchanges a tie with."""
    lines = {}
    for low, high in plan.pairs:
        if fabric.rank in (low, high):
            peer = high if fabric.rank == low else low
            lines[peer] = Line(fabric.channel(peer, "tied"), chunk_bytes=chunk_bytes)
    return lines


def _plan(answers: list[dict[str, Any]], *, world_size: int) -> OwnershipPlan:
    """The plan of a pipeline from what each of its ranks says."""
    for other, answer in enumerate(answers):
        for what in ("ties", "owner", "scope"):
            if answer[what] != answers[0][what]:
                raise TieError(
                    f"assign_owners was called with {what}={answers[0][what]!r} on rank 0 and {what}="
                    f"{answer[what]!r} on rank {other}; give every rank the same"
                )
    scope = Scope(answers[0]["scope"])
    check_grid([answer["side"][0] if answer["side"] else None for answer in answers], scope)
    every_use = [_use_from_json(fields) for answer in answers for fields in answer["uses"]]
    ties = [Tie(tuple(tie)) for tie in answers[0]["ties"]]
    plan = plan_ownership(ties, every_use, world_size=world_size, owner=answers[0]["owner"])
    check_shards(plan, {other: answer["shards"] for other, answer in enumerate(answers)})
    return replace(plan, scope=scope)


def _uses(uses: Mapping[str, str] | None) -> dict[str, Use]:
    known = [use.value for use in Use]
    for name, use in (uses or {}).items():
        if use not in known:
            raise ConfigError(f"uses[{name!r}] is {use!r}; choose one of {known}")
    return {name: Use(use) for name, use in (uses or {}).items()}


def _use_to_json(use: ParameterUse) -> list[Any]:
    return [use.name, use.rank, use.stage, list(use.shape), use.dtype, use.requires_grad, use.use.value]


def _use_from_json(fields: list[Any]) -> ParameterUse:
    name, rank, stage, shape, dtype, requires_grad, use = fields
    return ParameterUse(
        name=name,
        rank=rank,
        stage=stage,
        shape=tuple(shape),
        dtype=dtype,
        requires_grad=requires_grad,
        use=Use(use),
    )
