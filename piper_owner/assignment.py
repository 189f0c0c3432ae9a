"""Agree on the owners across the ranks of a pipeline, and open the lines between them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final, Literal, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining.stage import _PipelineStageBase

from piper_owner.answers import TieLike, describe_stages, plan_from
from piper_owner.arguments import is_timeout, read_settings
from piper_owner.data_parallel import DataParallel, SideGroup
from piper_owner.ddp import averages, keep_out
from piper_owner.errors import ConfigError, ExchangeError, InputError, PeerLostError, ReplicaMismatchError
from piper_owner.exchange import Exchange
from piper_owner.fetching import keep_rows, value_sources
from piper_owner.grid import agree_beside, check_alike, share_averages
from piper_owner.norms import add_powers
from piper_owner.ownership import (
    Layout,
    LayoutChoice,
    OwnerChoice,
    OwnershipPlan,
    TiePlan,
)
from piper_owner.process_groups import fabric_of, side_group
from piper_owner.sharding import is_nonzero, reshard
from piper_owner.stages import (
    NameMap,
    Stage,
    listed_stages,
    numbered_stages,
    refuse_pending_backwards,
    refuse_scaled_twice,
    refuse_unscaled,
    scale_shared_once,
)
from piper_owner.streams import refuse_capture
from piper_owner.tied import TiedParameter, refuse_replaced
from piper_owner.transport import Fabric
from piper_owner.transport.agreement import Agreement, in_call
from piper_owner.transport.paths import LineOpener
from piper_owner.uniting import tie_here

__all__ = ["Ownership", "TieLike", "as_ownership", "assign_over", "assign_owners"]

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
        self.unscaled: dict[int, int] = {}
        """By stage, the microbatches by which a later pass of its schedule is to divide its gradients."""
        self.names: NameMap | None = None
        """From names in the stages to those in the full model, as `assign_owners` was given them."""
        self._is_closed = False
        self.agreement = agreement
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

    def together(self, work: Callable[[], str], call: str) -> list[str]:
        """`work()` of every rank of this pipeline, by rank; an error on one is raised on all. Collective.

        `call` is what an error of the exchange names as the call that waited.

        Raises TieError, on every rank, if pipelines side by side answer differently.
        """
        self.refuse_closed()
        with in_call(call):
            everyone = self.agreement.everyone(work)
        check_alike(everyone)
        return everyone[self.agreement.index]

    def agree_on(self, where: str, check: Callable[[], None]) -> None:
        """Raise an InputError of `check` on one rank on all, of all pipelines, at the price of one sum over
        the pipeline and one over `dp_group`. Collective.

        Nothing has happened then, and the ranks may go on. Raises MessageMismatchError on every rank
        unless all of them are in the same step.
        """
        failed: InputError | None = None
        try:
            check()
        except InputError as error:
            failed = error

        def say() -> str:
            if failed is not None:
                raise failed
            return ""

        with self.reporting(where):
            is_wrong = self.combine_pipelines(self.combine(float(failed is not None))) > 0
        if is_wrong:
            self.together(say, where)

    def combine(self, value: float, *, largest: bool = False) -> float:
        """The sum, or the largest, of every rank's `value`, added in ascending rank. Collective.

        Raises MessageMismatchError on every rank unless all of them are in the same step.
        """
        return self.agreement.combine(value, self.step, largest=largest)

    def combine_pipelines(self, value: float, *, largest: bool = False) -> float:
        """The same over this rank of every pipeline of `dp_group`; `value` itself without one."""
        return self.agreement.combine_pipelines(value, self.step, largest=largest)

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

        Only the first call that finds none looks: it comes before the first exchange. Collective. Every
        call raises on a rank where the weight half of a backward is still pending, or no pass has divided
        the gradients by the microbatches, or a CUDA graph is captured; and PeerLostError after `close`.
        """
        self.refuse_closed()
        refuse_capture(self.rank)
        refuse_pending_backwards(self.pipeline_stages, self.rank)
        if self.unscaled:
            refuse_unscaled(self.pipeline_stages, self.unscaled, is_nonzero)
            self.unscaled.clear()
        if self._is_scaling_checked:
            return
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
            self.together(look, "the first exchange of gradients")
        self._is_scaling_checked = True  # not where it has raised: the gradient is still wrong

    def check(self) -> bool:
        """True if every replica, in every pipeline, is bit for bit the owner's value. Collective.

        Raises ReplicaMismatchError with the largest difference, on every holder of the tie; TieError on a
        rank where a module holds another Parameter by now.
        """
        self.refuse_closed()
        side = self.exchange.side
        try:
            refuse_replaced(self.exchange.tied.values(), self.rank)
            if side is None:
                return self.exchange.check(self.step)
            differences = self.exchange.differences(self.step)
        except ReplicaMismatchError:
            raise  # all of its holders have it, and `sync` may follow
        except BaseException as error:
            self.report(f"the check of replicas after step {self.step}", error)
            raise
        everyone = self.agreement.everyone(lambda: json.dumps(differences))
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

        Call it on every rank after weights were loaded or written. Fetched rows are forgotten.
        """
        self.refuse_closed()
        with self.reporting("sync"):
            refuse_replaced(self.exchange.tied.values(), self.rank)
            self.exchange.flush()
            self.exchange.share_values(warn=False)
            self.exchange.fetching.forget()
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
                why = f": {tie.reason}" if owns and tie.reason and tie.replicas else ""
                stages = ", ".join(map(str, holder.stages))
                rows = ", rows only" if holder.layout is Layout.ROWS else ""
                lines.append(
                    f"  rank {holder.rank} {role} (stage {stages}, {holder.use.value} use{rows}){why}"
                )
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
        if self.exchange.side is not None:
            where = f"{where} of pipeline {self.agreement.index}"
        self.board.report_error(self.rank, where, error)
        self.abandon()

    def close(self) -> None:
        """Wait until the peers have all that was sent, then close the lines. Twice is fine."""
        self._is_closed = True
        try:
            self.exchange.flush()
            self.exchange.drain()
        finally:
            self.abandon()

    def refuse_closed(self) -> None:
        """Raise PeerLostError after `close`. Local."""
        if self._is_closed:
            raise PeerLostError(
                f"rank {self.rank}: this Ownership was closed, and its lines to the other ranks with it; "
                "close it when training has ended. To go on, call assign_owners, and make an OwnerOptimizer, "
                "on every rank"
            )

    def abandon(self) -> None:
        """Close the lines at once, so that every peer that waits for this rank fails. Local."""
        self.exchange.close()
        self.agreement.close()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "an Ownership holds connections to other ranks and cannot be copied or pickled; share the object "
            "itself, or call assign_owners again on every rank"
        )

    def __repr__(self) -> str:
        return f"<Ownership of rank {self.rank}: {self.describe()}>"


def as_ownership(given: object) -> Ownership:
    """`given`, if it is an Ownership. Raises ConfigError for anything else. Local."""
    if not isinstance(given, Ownership):
        raise ConfigError(
            f"ownership= is a {type(given).__name__}; give the Ownership that assign_owners returns"
        )
    return given


def assign_owners(
    stages: Stage | Sequence[Stage],
    ties: Sequence[TieLike],
    *,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    owner: OwnerChoice | Mapping[str, OwnerChoice] = "auto",
    layout: LayoutChoice | Mapping[str, LayoutChoice] = "dense",
    names: NameMap | None = None,
    uses: Mapping[str, str] | None = None,
    scope: Literal["pipeline", "global"] = "pipeline",
    dp_group: dist.ProcessGroup | DeviceMesh | None = None,
    timeout: timedelta | None = None,
) -> Ownership:
    """Decide who owns each tie, and make its copies one. Collective over `group`, and `dp_group`: every
    rank calls it, also one that holds no tied parameter, before it makes its optimizer.

    stages: this rank's stage modules, or PipelineStages of torch.distributed.pipelining, or none.
        Their parameters are named as in the full model, apart from the prefixes of DDP,
        torch.compile and activation checkpointing; `names` maps others.
    ties: from `find_ties(full_model)`, or names, such as `[("embed.weight", "lm_head.weight")]`.
    group: the pipeline's process group, a one-dimensional DeviceMesh, or None for all ranks (without an
        initialised process group: a world of one). Ranks here are those of the group.
    owner: `"auto"`, `"first"`, `"last"`, or a rank, for all ties or by canonical name.
    layout: `"dense"`: every replica keeps a working copy. `"rows"`: one that only looks rows up keeps
        none; it fetches the rows of a step (`OwnerOptimizer.prefetch`), and a rank that uses all of
        the parameter owns it. `"auto"`: rows where that is possible. For all ties or by canonical name.
    uses: overrides how a parameter is used, by name: `"lookup"` or `"dense"`.
    scope: `"pipeline"`: an owner in each of several equal pipelines; `"global"`: one for all.
    dp_group: as `group`, the ranks of this rank's stages in all pipelines, in the order of those. A tie's
        combined gradient is averaged over it, once. DDP then leaves ties out where it wraps a stage after
        this call; before is right too. Without, DDP or FSDP averages gradients before they are combined.
    timeout: bounds every wait of one rank for another; by default the group's.

    Names that meet on one rank become one Parameter there. A schedule of torch.distributed.pipelining
    with `scale_grads` scales it once if PipelineStages are given, or `attach` is called; if modules are
    given without, the first step raises ConfigError. Stages may be sharded by `fully_shard`, before this
    call, and alike on every holder of a tie (docs/fsdp.md). Copies on several ranks take the value of the
    holder of the tie's first name, with a warning if they differed. A copy on the meta device is
    allocated, on the device of its stages' other parameters, and filled; the first name's may not be there.

    With rows, the nn.Embedding's weight becomes a compact table, empty before the first prefetch, which
    the stage's `state_dict()` and `load_state_dict` leave out. DDP then needs `dp_group`, and comes after.
    Raises TieError on every rank for a name of no stage, of two ties or of two Parameters of a stage, or
    copies unlike in shape, dtype or requires_grad; ConfigError on every rank for bad arguments;
    PeerTimeoutError if a rank never calls.
    """
    wait = timeout if is_timeout(timeout) else None  # the others hear of a bad one, too
    return assign_over(
        fabric_of(group, wait),
        stages,
        ties,
        owner=owner,
        layout=layout,
        names=names,
        uses=uses,
        scope=scope,
        side=None if dp_group is None else lambda: side_group(group, dp_group, wait),
        timeout=timeout,
    )


@in_call("assign_owners")
def assign_over(
    fabric: Fabric,
    stages: Stage | Sequence[Stage],
    ties: Sequence[TieLike],
    *,
    owner: OwnerChoice | Mapping[str, OwnerChoice] = "auto",
    layout: LayoutChoice | Mapping[str, LayoutChoice] = "dense",
    names: NameMap | None = None,
    uses: Mapping[str, str] | None = None,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    scope: str = "pipeline",
    side: Callable[[], SideGroup] | None = None,
    timeout: timedelta | None = None,
) -> Ownership:
    """`assign_owners` over any fabric. Collective over its ranks, and those of the group that `side` gives:
    that is called once, where an error of it reaches all ranks. A `timeout` is
    checked, but the fabric's counts."""
    rank, world_size = fabric.rank, fabric.world_size
    agreement = Agreement.over(fabric)
    numbered: dict[int, torch.nn.Module] = {}
    listed: list[Stage] = []
    sides: list[SideGroup] = []
    opener = LineOpener(fabric, chunk_bytes=chunk_bytes)

    def describe() -> str:
        if side is not None:
            sides.append(side())
        settings = read_settings(timeout=timeout, owner=owner, layout=layout, scope=scope)
        listed.extend(listed_stages(stages, rank))
        numbered.update(numbered_stages(listed, rank=rank, world_size=world_size))
        reshard(numbered.values())
        answer = describe_stages(numbered, ties, rank=rank, names=names, uses=uses)
        settings["side"] = [[each.fabric.rank, each.fabric.world_size] for each in sides]
        return json.dumps(answer | settings | {"place": opener.describe(numbered.values())})

    answers: list[dict[str, Any]] = []

    def agree() -> OwnershipPlan:
        answers.extend(json.loads(text) for text in agreement.everyone(describe)[0])
        opener.learn(answer["place"] for answer in answers)
        return plan_from(answers, world_size=world_size)

    plan = agree_beside(agreement, fabric, sides, agree)
    tied: dict[str, TiedParameter] = {}

    def make_one() -> str:
        sources = value_sources(plan, [answer["meta"] for answer in answers])
        mine = plan.held_by(rank)
        tied.update(tie_here(mine, numbered, fabric, sources, names=names, has_group=bool(sides)))
        return averages(numbered.values(), tied, sides[0].ranks) if sides else ""

    averaged = agreement.everyone(make_one)
    if sides:
        _note_averages(plan, tied, numbered, averaged)
    ownership = _connect(plan, tied, listed, agreement, sides, opener)
    ownership.names = names
    keep_rows(numbered, tied, rank, has_group=bool(sides))
    return ownership


def _note_averages(
    plan: OwnershipPlan,
    tied: Mapping[str, TiedParameter],
    stages: Mapping[int, torch.nn.Module],
    averaged: list[list[str]],
) -> None:
    """Which gradients DDP averages, as all ranks of all pipelines say; it leaves out the others. Local."""
    check_alike(averaged)
    share_averages(plan, tied, averaged[0])
    for module in stages.values():
        keep_out(module, [tie.parameter for tie in tied.values() if not tie.is_averaged])


def _connect(
    plan: OwnershipPlan,
    tied: Mapping[str, TiedParameter],
    stages: Sequence[Stage],
    agreement: Agreement,
    sides: Sequence[SideGroup],
    opener: LineOpener,
) -> Ownership:
    """Open the lines of `plan` and make all copies equal. Collective."""
    pipeline_stages = [stage for stage in stages if isinstance(stage, _PipelineStageBase)]
    scale_shared_once(pipeline_stages)
    fabric, chunk_bytes = opener.fabric, opener.chunk_bytes
    lines, row_lines = opener.open(plan.pairs, "tied"), opener.open(plan.row_pairs, "rows")
    beside = [DataParallel(each, fabric.rank, plan.scope, chunk_bytes=chunk_bytes) for each in sides]
    exchange = Exchange(fabric.rank, tied, lines, side=beside[0] if beside else None, row_lines=row_lines)
    ownership = Ownership(plan, exchange, fabric=fabric, agreement=agreement)
    ownership.pipeline_stages += pipeline_stages
    ownership.share_first_values()
    return ownership
