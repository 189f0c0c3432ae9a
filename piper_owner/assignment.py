"""Agree on the owners across the ranks of a pipeline, and open the lines between them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining.stage import _PipelineStageBase

from piper_owner.errors import (
    ConfigError,
    ExchangeError,
    MessageMismatchError,
    ReplicaMismatchError,
    TieError,
)
from piper_owner.exchange import Exchange
from piper_owner.ownership import (
    OwnerChoice,
    OwnershipPlan,
    ParameterUse,
    Tie,
    TiePlan,
    Use,
    plan_ownership,
)
from piper_owner.sharding import check_shards, describe_shards, mesh_groups, reshard
from piper_owner.stages import (
    NameMap,
    Stage,
    named_places,
    numbered_stages,
    refuse_pending_backwards,
    refuse_scaled_twice,
    scale_shared_once,
)
from piper_owner.tied import TiedParameter
from piper_owner.ties import allocated, describe_uses, unite
from piper_owner.transport import Fabric, Failure, GlooFabric, Group, Line, MemoryNetwork
from piper_owner.transport.agreement import gather_texts, together

__all__ = ["Ownership", "TieLike", "assign_over", "assign_owners"]

TieLike = Tie | Sequence[str]
"""A tie, or its names."""

DEFAULT_CHUNK_BYTES: Final = 4 * 2**20
_ALONE: Final = timedelta(minutes=5)


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
        group: Group | None,
    ) -> None:
        self.plan = plan
        self.exchange = exchange
        self.rank = fabric.rank
        self.group = group
        self.board = fabric.board
        self.on_sync: list[Callable[[], None]] = []
        self.pipeline_stages: list[_PipelineStageBase] = []
        """Stages of torch.distributed.pipelining on this rank, as far as they were given."""
        self._is_scaling_checked = False
        self.step = 0
        """Optimizer steps taken so far; every message carries it."""

    def together(self, work: Callable[[], str]) -> list[str]:
        """`work()` of every rank, by rank; an error on one is raised on all. Collective."""
        return together(self.group, self.rank, work)

    def combine(self, value: float, *, largest: bool = False) -> float:
        """The sum, or the largest, of every rank's `value`, added in ascending rank. Collective.

        Raises MessageMismatchError on every rank unless all of them are in the same step.
        """
        if self.group is None:
            return value
        everyone = torch.zeros(2, len(self.group.ranks), dtype=torch.float64)
        everyone[0, self.rank] = value
        everyone[1, self.rank] = self.step
        self.group.all_reduce(everyone)
        values: list[float] = everyone[0].tolist()
        steps: list[float] = everyone[1].tolist()
        if len(set(steps)) > 1:
            where = ", ".join(f"rank {rank} in {step:g}" for rank, step in enumerate(steps))
            raise MessageMismatchError(
                f"the ranks are in different steps: {where}. All of them take or skip a step together: "
                "decide by what is equal on each, such as the norm that clip_grad_norm_ returns"
            )
        if largest:
            return max(values) if not any(map(math.isnan, values)) else math.nan
        return sum(values)

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
        """True if every replica is bit for bit the owner's value. Collective.

        Raises ReplicaMismatchError with the largest difference, on every holder of the tie.
        """
        try:
            return self.exchange.check(self.step)
        except ReplicaMismatchError:
            raise  # all of its holders have it, and `sync` may follow
        except BaseException as error:
            self.report(f"the check of replicas after step {self.step}", error)
            raise

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
                role = "owns it" if holder.rank == tie.owner else "holds a replica"
                stages = ", ".join(map(str, holder.stages))
                lines.append(f"  rank {holder.rank} {role} (stage {stages}, {holder.use.value} use)")
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
        if self.group is not None:
            self.group.close()

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
    timeout: timedelta | None = None,
) -> Ownership:
    """Decide who owns each tie of a pipeline, and make its copies one. Collective over `group`.

    Every rank of the pipeline calls it, also one that holds no tied parameter, before it makes its
    optimizer.

    stages: this rank's stage modules, or PipelineStages of torch.distributed.pipelining, or none.
        Their parameters are named as in the full model, apart from the prefixes of DDP,
        torch.compile and activation checkpointing; `names` maps others.
    ties: from `find_ties(full_model)`, or names, such as `[("embed.weight", "lm_head.weight")]`.
    group: the pipeline's process group, a one-dimensional DeviceMesh, or None for all ranks
        (without an initialised process group: a world of one). Ranks here are those of the group.
    owner: `"auto"`, `"first"`, `"last"`, or a rank, for all ties or by canonical name.
    uses: overrides how a parameter is used, by name: `"lookup"` or `"dense"`.
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
    return assign_over(_fabric(group, timeout), stages, ties, owner=owner, names=names, uses=uses)


def assign_over(
    fabric: Fabric,
    stages: Stage | Sequence[Stage],
    ties: Sequence[TieLike],
    *,
    owner: OwnerChoice | Mapping[str, OwnerChoice] = "auto",
    names: NameMap | None = None,
    uses: Mapping[str, str] | None = None,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
) -> Ownership:
    """`assign_owners` over any fabric. Collective over its ranks."""
    rank, world_size = fabric.rank, fabric.world_size
    everyone = tuple(range(world_size))
    group = fabric.group(everyone, "agreement") if world_size > 1 else None
    numbered: dict[int, torch.nn.Module] = {}

    def describe() -> str:
        numbered.update(numbered_stages(stages, rank=rank, world_size=world_size))
        reshard(numbered.values())
        found = describe_uses(numbered, rank=rank, names=names, uses=_uses(uses))
        wanted = [tie if isinstance(tie, Tie) else Tie(tuple(tie)) for tie in ties]
        answer = {
            "uses": [_use_to_json(use) for use in found],
            "ties": [list(tie.names) for tie in wanted],
            "owner": dict(owner) if isinstance(owner, Mapping) else owner,
            "shards": describe_shards(numbered, wanted, names=names),
        }
        return json.dumps(answer)

    answers = [json.loads(text) for text in together(group, rank, describe)]
    _check_alike(answers)
    every_use = [_use_from_json(fields) for answer in answers for fields in answer["uses"]]
    plan = plan_ownership(
        [Tie(tuple(tie)) for tie in answers[0]["ties"]], every_use, world_size=world_size, owner=owner
    )
    check_shards(plan, {other: answer["shards"] for other, answer in enumerate(answers)})
    tied: dict[str, TiedParameter] = {}

    def make_one() -> str:
        tied.update(_tie_here(plan.held_by(rank), numbered, fabric, names=names))
        return ""

    together(group, rank, make_one)
    listed = [stages] if isinstance(stages, torch.nn.Module | _PipelineStageBase) else list(stages)
    pipeline_stages = [stage for stage in listed if isinstance(stage, _PipelineStageBase)]
    scale_shared_once(pipeline_stages)
    exchange = Exchange(rank, tied, _lines(fabric, plan, chunk_bytes))
    ownership = Ownership(plan, exchange, fabric=fabric, group=group)
    ownership.pipeline_stages += pipeline_stages
    ownership.share_first_values()
    return ownership


def _fabric(group: dist.ProcessGroup | DeviceMesh | None, timeout: timedelta | None) -> Fabric:
    """A fabric over the ranks of `group`, on a prefix of the default store of its own."""
    if not (dist.is_available() and dist.is_initialized()):
        if group is not None:
            raise ConfigError("group= was given, but torch.distributed is not initialised")
        return MemoryNetwork(1, timeout=timeout or _ALONE).fabric(0)
    if isinstance(group, DeviceMesh) and group.ndim != 1:
        raise ConfigError(
            f"group= is a DeviceMesh with the dimensions {group.mesh_dim_names or group.ndim}; give the "
            'pipeline\'s alone, such as mesh["pp"]'
        )
    chosen: Any = group.get_group() if isinstance(group, DeviceMesh) else group or dist.group.WORLD
    member = isinstance(chosen, dist.ProcessGroup)
    ranks = dist.get_process_group_ranks(chosen) if member else []
    if dist.get_rank() not in ranks:
        raise ConfigError(
            f"rank {dist.get_rank()} is not in the group= it was given (ranks {ranks}); give every rank the "
            "group of its own pipeline"
        )
    rank = ranks.index(dist.get_rank())
    wait = timeout or chosen._get_backend(chosen._device_types[0]).options._timeout
    store = PrefixStore(
        f"piper_owner/{chosen.group_name}/{'-'.join(map(str, ranks))}",
        dist.distributed_c10d._get_default_store(),
    )
    # Every call gets a prefix of its own: a rank's n-th call meets the others' n-th.
    call = store.add(f"calls/{rank}", 1)
    return GlooFabric(PrefixStore(str(call), store), rank, len(ranks), timeout=wait)


def _lines(fabric: Fabric, plan: OwnershipPlan, chunk_bytes: int) -> dict[int, Line]:
    """This rank's lines by peer, opened in the order that all ranks have."""
    peers = [high if fabric.rank == low else low for low, high in plan.pairs if fabric.rank in (low, high)]
    return {peer: Line(fabric.channel(peer, "tied"), chunk_bytes=chunk_bytes) for peer in peers}


def _check_alike(answers: Sequence[Mapping[str, Any]]) -> None:
    for other, answer in enumerate(answers):
        for what in ("ties", "owner"):
            if answer[what] != answers[0][what]:
                raise TieError(
                    f"assign_owners was called with {what}={answers[0][what]!r} on rank 0 and {what}="
                    f"{answer[what]!r} on rank {other}; give every rank the same"
                )


def _tie_here(
    ties: Sequence[TiePlan],
    stages: Mapping[int, torch.nn.Module],
    fabric: Fabric,
    *,
    names: NameMap | None,
) -> dict[str, TiedParameter]:
    """This rank's part in each of `ties`, by name; collective over the meshes that shard them."""
    found = [place for module in stages.values() for place in named_places(module, names)]
    places = {
        tie.name: [(module, leaf) for name, module, leaf in found if name in tie.tie.names] for tie in ties
    }
    for tie in ties:
        parameters = [module._parameters[leaf] for module, leaf in places[tie.name]]
        _agree_over_shards(tie, parameters, fabric.timeout)
    tied = {}
    for tie in ties:
        parameter = unite(stages, tie.tie, names=names, may_be_meta=tie.source != fabric.rank)
        tied[tie.name] = TiedParameter(
            plan=tie,
            parameter=allocated(stages, parameter),
            places=tuple(places[tie.name]),
            is_empty=parameter.is_meta,
        )
    return tied


def _agree_over_shards(tie: TiePlan, parameters: Iterable[torch.Tensor | None], timeout: timedelta) -> None:
    """Raise TieError, on every rank of a mesh that shards one of `parameters`, unless all pipelines have
    the same owner of `tie`. Collective over the mesh.

    The state of a sharded tie is one DTensor: all of its parts are at the same stage.
    """
    groups = {g.group_name: g for p in parameters if p is not None for g in mesh_groups(p)}
    for shards in groups.values():
        fabric = _fabric(shards, timeout)
        group = fabric.group(tuple(range(fabric.world_size)), "shards")
        try:
            owners = gather_texts(group, fabric.rank, str(tie.owner))
        finally:
            group.close()
        if len(set(owners)) > 1:
            raise TieError(
                f"tie {tie.tie.names}: it is sharded over pipelines that chose the ranks "
                f"{', '.join(owners)} of theirs as its owner; give every one the same owner="
            )


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
