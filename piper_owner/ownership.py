"""Who owns a tied parameter: pure planning, the same on every rank.

A *tie* names parameters of the full model that are one parameter. Given where each of them is
used, `plan_ownership` decides, for every tie, which rank is the *owner* (the one that steps it)
and which ranks hold a *replica*. The plan is a frozen value: running only reads it, and its
`digest` is compared across ranks before anything is sent.

Nothing here imports torch: dtypes are their names ("float32"), shapes are tuples.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from piper_owner.cost import Candidate, Election, elect
from piper_owner.errors import ConfigError, TieError

__all__ = [
    "Holder",
    "Layout",
    "LayoutChoice",
    "OwnerChoice",
    "OwnershipPlan",
    "ParameterUse",
    "Scope",
    "Tie",
    "TiePlan",
    "Use",
    "elect_owner",
    "plan_ownership",
]

OwnerChoice = Literal["auto", "first", "last"] | int
"""How to choose the owner: `"auto"`, the holder of the tie's first or last name, or a rank."""

LayoutChoice = Literal["dense", "rows", "auto"]
"""What lookup-only replicas keep: a copy, the rows of the step, or those where it is possible."""

_CHOICES: Final = ("auto", "first", "last")
_LAYOUTS: Final = ("dense", "rows", "auto")


class Use(enum.Enum):
    """How a holder uses the parameter: rows by id (nn.Embedding), or all of it (a matmul)."""

    LOOKUP = "lookup"
    DENSE = "dense"


class Layout(enum.Enum):
    """What a holder keeps: a working copy of the whole parameter, or the rows of this step."""

    DENSE = "dense"
    ROWS = "rows"


class Scope(enum.Enum):
    """How far an owner's reach goes where equal pipelines run side by side on other data."""

    PIPELINE = "pipeline"
    """Every pipeline has an owner of its own, and all of them take the same step."""
    GLOBAL = "global"
    """The owner in the first pipeline steps for all of them."""


@dataclass(frozen=True, slots=True)
class Tie:
    """Parameters of the full model, by name, that are one parameter.

    The first name is the canonical one: it names the tie in plans, messages and checkpoints, and
    its holder's value wins when copies differ at the start.

    Raises TieError if there is no name, a name twice, or a name that is not a non-empty string.
    """

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if isinstance(self.names, str):
            raise TieError(
                f"Tie({self.names!r}): give a tuple of names, such as ({self.names!r}, 'lm_head.weight')"
            )
        object.__setattr__(self, "names", tuple(self.names))
        if not self.names:
            raise TieError("a tie needs at least one parameter name")
        for name in self.names:
            if not isinstance(name, str) or not name:
                raise TieError(f"a tie is made of parameter names, not {name!r}, in {self.names}")
        if len(set(self.names)) != len(self.names):
            raise TieError(f"a tie lists each name once; repeated in {self.names}")

    @property
    def name(self) -> str:
        """The canonical name."""
        return self.names[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterUse:
    """One parameter of one stage on one rank, as that rank reports it."""

    name: str
    rank: int
    stage: int
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool = True
    use: Use = Use.DENSE


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A rank that uses the tied parameter, in one or more of its stages, under one or more names."""

    rank: int
    stages: tuple[int, ...]
    names: tuple[str, ...]
    use: Use
    layout: Layout = Layout.DENSE

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready `{rank, stages, names, use, layout}`."""
        return {
            "rank": self.rank,
            "stages": list(self.stages),
            "names": list(self.names),
            "use": self.use.value,
            "layout": self.layout.value,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class TiePlan:
    """One tie: its shape and dtype, who holds it (ascending ranks), and who owns it.

    `reason` says in words why the owner is the owner; plans that differ in it alone are equal.
    """

    tie: Tie
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool
    owner: int
    holders: tuple[Holder, ...]
    reason: str = field(default="", compare=False)

    @property
    def name(self) -> str:
        """The canonical name of the tie."""
        return self.tie.name

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that hold the parameter, ascending."""
        return tuple(holder.rank for holder in self.holders)

    @property
    def replicas(self) -> tuple[int, ...]:
        """Ranks that hold it and do not own it, ascending; empty for a tie on one rank."""
        return tuple(holder.rank for holder in self.holders if holder.rank != self.owner)

    @property
    def source(self) -> int:
        """The rank whose value wins at the start: the holder of the canonical name."""
        return next((h.rank for h in self.holders if self.name in h.names), self.owner)

    @property
    def copies(self) -> tuple[int, ...]:
        """Replicas that keep a working copy, ascending: the owner sends them its new weights."""
        return tuple(r for r in self.replicas if self.holder(r).layout is Layout.DENSE)

    @property
    def row_replicas(self) -> tuple[int, ...]:
        """Replicas that keep only the rows in use, ascending: the owner serves them."""
        return tuple(r for r in self.replicas if self.holder(r).layout is Layout.ROWS)

    def holder(self, rank: int) -> Holder:
        """The holder on `rank`; KeyError if that rank does not hold the parameter."""
        for holder in self.holders:
            if holder.rank == rank:
                return holder
        raise KeyError(rank)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready `{names, shape, dtype, requires_grad, owner, holders}`."""
        return {
            "names": list(self.tie.names),
            "shape": list(self.shape),
            "dtype": self.dtype,
            "requires_grad": self.requires_grad,
            "owner": self.owner,
            "holders": [holder.to_dict() for holder in self.holders],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnershipPlan:
    """Every tie of a model, sorted by canonical name, over ranks `0..world_size - 1` of a pipeline."""

    world_size: int
    ties: tuple[TiePlan, ...]
    scope: Scope = Scope.PIPELINE

    def __getitem__(self, name: str) -> TiePlan:
        """The tie whose canonical name is `name`; KeyError if there is none."""
        for tie in self.ties:
            if tie.name == name:
                return tie
        raise KeyError(name)

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Every (lower rank, higher rank) that exchanges a tie, ascending, without repeats."""
        return tuple(sorted({(min(t.owner, r), max(t.owner, r)) for t in self.ties for r in t.replicas}))

    @property
    def row_pairs(self) -> tuple[tuple[int, int], ...]:
        """Every (lower rank, higher rank) of which one serves the other rows, ascending."""
        return tuple(sorted({(min(t.owner, r), max(t.owner, r)) for t in self.ties for r in t.row_replicas}))

    @property
    def digest(self) -> str:
        """32 hex digits that are equal on two ranks exactly when their plans are."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def held_by(self, rank: int) -> tuple[TiePlan, ...]:
        """The ties that `rank` holds, in plan order."""
        return tuple(tie for tie in self.ties if rank in tie.ranks)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready `{world_size, scope, ties: [...]}`."""
        return {
            "world_size": self.world_size,
            "scope": self.scope.value,
            "ties": [tie.to_dict() for tie in self.ties],
        }


def elect_owner(tie: Tie, holders: Sequence[Holder], owner: OwnerChoice = "auto") -> int:
    """The rank that owns `tie`.

    `"auto"` takes the holder that `cost.elect` elects: that of the earliest stage, then the lowest rank.
    The gradient of a later stage is ready while the pipeline still drains, and the new weights are
    needed there only once the next step's first microbatch has come through, so both transfers hide.
    `"first"` and `"last"` take the holder of the tie's first or last name. A rank is itself.

    Raises ConfigError when the choice is no such word, or a rank that does not hold the tie.
    """
    return _elect(tie, holders, owner).rank


def _elect(tie: Tie, holders: Sequence[Holder], owner: OwnerChoice) -> Election:
    """As `elect_owner`, with the reason."""
    by_stage = sorted(holders, key=lambda holder: (min(holder.stages), holder.rank))
    match owner:
        case "auto":
            return elect([Candidate(rank=holder.rank, stage=min(holder.stages)) for holder in holders])
        case "first" | "last":
            name = tie.names[0 if owner == "first" else -1]
            rank = next(holder.rank for holder in by_stage if name in holder.names)
            return Election(rank=rank, reason=f"asked for, as the holder of {name!r}")
        case int() if not isinstance(owner, bool):
            ranks = sorted(holder.rank for holder in holders)
            if owner not in ranks:
                raise ConfigError(
                    f"rank {owner} cannot own {tie.name!r}: it does not hold it; choose one of the "
                    f"ranks {ranks}, or 'auto', 'first' or 'last'"
                )
            return Election(rank=owner, reason="asked for by its rank")
        case _:
            raise ConfigError(f"owner={owner!r}: choose one of {', '.join(_CHOICES)}, or a rank")


def plan_ownership(
    ties: Iterable[Tie | Sequence[str]],
    uses: Iterable[ParameterUse],
    *,
    world_size: int,
    owner: OwnerChoice | Mapping[str, OwnerChoice] = "auto",
    layout: LayoutChoice | Mapping[str, LayoutChoice] = "dense",
) -> OwnershipPlan:
    """Decide who owns and who holds every tie.

    `uses` lists the parameters of every stage of every rank (those outside ties may be left out);
    `owner` is one choice for all ties, or one per canonical name (`"auto"` where not given); so is
    `layout` (`"dense"` where not given). With `"rows"` a dense holder owns, and every replica that
    only looks rows up keeps no copy; `"auto"` does that for the ties where it is possible.
    Holders on one rank merge into one. The result does not depend on the order of `ties` or
    `uses`. Pure and local.

    Raises TieError for a name that no stage holds, a name in two ties, or partners that differ
    in shape, dtype or requires_grad, and ConfigError (a ValueError) for a rank out of range, an owner
    that holds nothing, or `"rows"` for a tie with no replica that only looks up, or with an owner
    that only looks up; the message names the parameter, its ranks and its stages.
    """
    every_use = tuple(uses)
    wanted = sorted((_as_tie(tie) for tie in ties), key=lambda tie: tie.name)
    _check_ranks(every_use, world_size)
    _check_names(wanted, every_use)
    for option, given in (("owner", owner), ("layout", layout)):
        unknown = sorted(set(given) - {tie.name for tie in wanted}) if isinstance(given, Mapping) else []
        if unknown:
            raise ConfigError(f"{option}= names {unknown}, which no tie has as its first name")
    # Of a million parameters few are in a tie: only those are sorted.
    tied = {name for tie in wanted for name in tie.names}
    tied_uses = sorted({use for use in every_use if use.name in tied}, key=_place)
    plans = []
    for tie in wanted:
        mine = [use for use in tied_uses if use.name in tie.names]
        _check_alike(tie, mine)
        holders = _merge(mine)
        choice = owner.get(tie.name, "auto") if isinstance(owner, Mapping) else owner
        kept = layout.get(tie.name, "dense") if isinstance(layout, Mapping) else layout
        elected, holders = _lay_out(tie, holders, choice, kept)
        plans.append(
            TiePlan(
                tie=tie,
                shape=mine[0].shape,
                dtype=mine[0].dtype,
                requires_grad=mine[0].requires_grad,
                owner=elected.rank,
                holders=holders,
                reason=elected.reason,
            )
        )
    return OwnershipPlan(world_size=world_size, ties=tuple(plans))


def _lay_out(
    tie: Tie, holders: tuple[Holder, ...], owner: OwnerChoice, layout: LayoutChoice
) -> tuple[Election, tuple[Holder, ...]]:
    """The owner of `tie`, and its holders with what each of them keeps."""
    if layout not in _LAYOUTS:
        raise ConfigError(f"layout={layout!r} for {tie.name!r}: choose one of {', '.join(_LAYOUTS)}")
    dense = [holder for holder in holders if holder.use is Use.DENSE]
    lookups = [holder for holder in holders if holder.use is Use.LOOKUP]
    wants_rows = layout != "dense"
    elected = _elect(tie, dense if wants_rows and dense and owner == "auto" else holders, owner)
    if wants_rows and lookups and elected.rank in [holder.rank for holder in dense]:
        rows = {holder.rank for holder in lookups}
        if owner == "auto":
            reason = "it uses all of it, and the others look up a few rows only"
            elected = dataclasses.replace(elected, reason=reason)
        return elected, tuple(
            dataclasses.replace(holder, layout=Layout.ROWS if holder.rank in rows else Layout.DENSE)
            for holder in holders
        )
    if layout == "rows":
        where = ", ".join(f"rank {h.rank}: {h.use.value} use by {', '.join(h.names)}" for h in holders)
        what = (
            f"its owner would be rank {elected.rank}, which only looks rows up; choose one that uses it all"
            if lookups and dense
            else "that needs a rank that only looks rows up and another that uses all of it"
        )
        raise ConfigError(
            f"layout='rows' for the tie {tie.names}: {what} ({where}). layout='auto' takes rows where they "
            "are possible"
        )
    return _elect(tie, holders, owner), holders


def _place(use: ParameterUse) -> tuple[int, int, str]:
    return use.rank, use.stage, use.name


def _as_tie(tie: Tie | Sequence[str]) -> Tie:
    return tie if isinstance(tie, Tie) else Tie(tie)  # type: ignore[arg-type]  # Tie checks and converts


def _check_ranks(uses: Sequence[ParameterUse], world_size: int) -> None:
    if world_size < 1:
        raise ConfigError(f"world_size={world_size}: a plan needs at least one rank")
    outside = min((use for use in uses if not 0 <= use.rank < world_size), key=_place, default=None)
    if outside is not None:
        raise ConfigError(
            f"{outside.name!r} of stage {outside.stage} is placed on rank {outside.rank}, but the ranks are "
            f"0 to {world_size - 1}"
        )


def _check_names(ties: Sequence[Tie], uses: Sequence[ParameterUse]) -> None:
    tie_of: dict[str, Tie] = {}
    known = {use.name for use in uses}
    for tie in ties:
        for name in tie.names:
            if name in tie_of:
                raise TieError(
                    f"{name!r} stands in two ties, {tie_of[name].names} and {tie.names}; put all names "
                    "of one parameter into one tie"
                )
            tie_of[name] = tie
            if name not in known:
                names = sorted(known)
                near = difflib.get_close_matches(name, names, n=3)
                hint = (
                    f"did you mean {' or '.join(map(repr, near))}?" if near else f"the names are {names[:8]}."
                )
                raise TieError(
                    f"no stage holds {name!r} of the tie {tie.names}; {hint} Stages name their parameters "
                    "as the full model does; if yours do not, as an nn.Sequential of layers, give "
                    "assign_owners names={name in the stage: name in the model}"
                )


def _check_alike(tie: Tie, uses: Sequence[ParameterUse]) -> None:
    first = uses[0]
    for use in uses[1:]:
        for what in ("shape", "dtype", "requires_grad"):
            here, there = getattr(first, what), getattr(use, what)
            if here != there:
                raise TieError(
                    f"tie {tie.names}: {what} is {here} for {first.name!r} on rank {first.rank} (stage "
                    f"{first.stage}) and {there} for {use.name!r} on rank {use.rank} (stage {use.stage}); "
                    "tied parameters are one parameter and must agree"
                )


def _merge(uses: Sequence[ParameterUse]) -> tuple[Holder, ...]:
    holders = []
    for rank in sorted({use.rank for use in uses}):
        mine = [use for use in uses if use.rank == rank]
        lookup_only = all(use.use is Use.LOOKUP for use in mine)
        holders.append(
            Holder(
                rank=rank,
                stages=tuple(sorted({use.stage for use in mine})),
                names=tuple(sorted({use.name for use in mine})),
                use=Use.LOOKUP if lookup_only else Use.DENSE,
            )
        )
    return tuple(holders)
