"""The closed set of actions that a rank of a TrainingDAG performs.

Six families, each a frozen dataclass whose kind is an enum; code that dispatches on them is a
`match` that ends in `assert_never`. The `repr` of an action is its text form, and
`parse_action` gives the action back:

    2F0  3B1  3I1  3W1                       forward, backward, backward-input, backward-weight
    0SEND_F2->1@3   1RECV_F2<-0@2            activation of microbatch 2 from stage 0 to stage 1;
                                             after the @ stands the peer's rank
    1SEND_B2->0@2   0RECV_B2<-1@3            the gradient of that activation, going back
    STEP[stage0]                             a rank steps a bucket of its own
    SEND_GRAD[w]->0   RECV_GRAD[w]<-3        a replica's gradient goes to the owner of tie `w`
    OWNER_STEP[w]                            the owner steps the only copy
    SEND_WEIGHT[w]->3 RECV_WEIGHT[w]<-0      the new weights come back
    ALL_REDUCE[w]{0,3}   CLIP{0,1,2,3}       collectives over the ranks named
    DP_ALL_REDUCE[stage0]                    the same rank of all pipelines averages a bucket's gradient
    DP_REDUCE[w]   DP_BROADCAST[w]           the lead pipeline gets a tie's gradient, and gives its weights

Bucket names may hold any character; those other than letters, digits and `._-@/~` are written
as `%XX` of their UTF-8 bytes.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Final, assert_never
from urllib.parse import quote, unquote

from piper_owner.errors import DagParseError

__all__ = [
    "Across",
    "AcrossKind",
    "Action",
    "BucketStep",
    "Collective",
    "CollectiveKind",
    "Compute",
    "ComputeKind",
    "Sync",
    "SyncKind",
    "Transfer",
    "TransferKind",
    "format_action",
    "parse_action",
]


class ComputeKind(enum.Enum):
    """What a rank computes for one microbatch of one stage."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"


class TransferKind(enum.Enum):
    """A message of the pipeline itself: activations forward, their gradients back."""

    SEND_ACTIVATION = "SEND_F"
    RECV_ACTIVATION = "RECV_F"
    SEND_INPUT_GRAD = "SEND_B"
    RECV_INPUT_GRAD = "RECV_B"


class SyncKind(enum.Enum):
    """What a holder of a tie does once in a step, beside its peer if it has one.

    A replica that keeps rows only fetches them, SEND_IDS then RECV_ROWS; its owner serves it,
    RECV_IDS then SEND_ROWS.
    """

    SEND_IDS = "SEND_IDS"
    RECV_IDS = "RECV_IDS"
    SEND_ROWS = "SEND_ROWS"
    RECV_ROWS = "RECV_ROWS"
    SEND_GRAD = "SEND_GRAD"
    RECV_GRAD = "RECV_GRAD"
    OWNER_STEP = "OWNER_STEP"
    SEND_WEIGHT = "SEND_WEIGHT"
    RECV_WEIGHT = "RECV_WEIGHT"


class CollectiveKind(enum.Enum):
    """An operation that several ranks perform together."""

    ALL_REDUCE = "ALL_REDUCE"
    CLIP = "CLIP"


class AcrossKind(enum.Enum):
    """What the same ranks of several equal pipelines do together, for one bucket.

    DP_ALL_REDUCE gives the mean gradient to each of them; DP_REDUCE gives it to the lead pipeline, which
    steps for all, and DP_BROADCAST brings the new weights back.
    """

    ALL_REDUCE_GRAD = "DP_ALL_REDUCE"
    REDUCE_GRAD = "DP_REDUCE"
    BROADCAST_WEIGHT = "DP_BROADCAST"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Compute:
    """One forward or (part of a) backward of `stage` for `microbatch`."""

    kind: ComputeKind
    stage: int
    microbatch: int

    def __repr__(self) -> str:
        return format_action(self)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Transfer:
    """One pipeline message between `stage`, on this rank, and `peer_stage`, on rank `peer`."""

    kind: TransferKind
    stage: int
    microbatch: int
    peer_stage: int
    peer: int

    def __repr__(self) -> str:
        return format_action(self)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class BucketStep:
    """The optimizer step of one bucket that this rank alone holds."""

    bucket: str

    def __repr__(self) -> str:
        return format_action(self)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Sync:
    """One node of the tied sync; `peer` is None for the owner's step and a rank elsewhere."""

    kind: SyncKind
    bucket: str
    peer: int | None = None

    def __post_init__(self) -> None:
        if (self.peer is None) != (self.kind is SyncKind.OWNER_STEP):
            raise DagParseError(
                f"{self.kind.value}[{self.bucket}] has peer {self.peer}: the owner's step takes no "
                "peer and every other sync node takes one"
            )

    def __repr__(self) -> str:
        return format_action(self)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Collective:
    """One operation over `ranks` (ascending); `bucket` is None for the gradient clip."""

    kind: CollectiveKind
    ranks: tuple[int, ...]
    bucket: str | None = None

    def __post_init__(self) -> None:
        if not self.ranks or list(self.ranks) != sorted(set(self.ranks)):
            raise DagParseError(f"the ranks of a collective ascend without repeats: {self.ranks}")
        if (self.bucket is None) != (self.kind is CollectiveKind.CLIP):
            raise DagParseError(
                f"{self.kind.value} has bucket {self.bucket!r}: an all-reduce names the bucket it "
                "reduces and a clip names none"
            )

    def __repr__(self) -> str:
        return format_action(self)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Across:
    """One operation of this rank with the same rank of the other pipelines."""

    kind: AcrossKind
    bucket: str

    def __repr__(self) -> str:
        return format_action(self)


Action = Compute | Transfer | BucketStep | Sync | Collective | Across

SENDS: Final = frozenset(
    {
        TransferKind.SEND_ACTIVATION,
        TransferKind.SEND_INPUT_GRAD,
        SyncKind.SEND_IDS,
        SyncKind.SEND_ROWS,
        SyncKind.SEND_GRAD,
        SyncKind.SEND_WEIGHT,
    }
)
RECVS: Final = frozenset(
    {
        TransferKind.RECV_ACTIVATION,
        TransferKind.RECV_INPUT_GRAD,
        SyncKind.RECV_IDS,
        SyncKind.RECV_ROWS,
        SyncKind.RECV_GRAD,
        SyncKind.RECV_WEIGHT,
    }
)
FETCHES: Final = frozenset({SyncKind.SEND_IDS, SyncKind.RECV_IDS, SyncKind.SEND_ROWS, SyncKind.RECV_ROWS})
"""The sync of ids and rows: on a line of its own, before the first use."""

_NAME = r"\[(?P<bucket>[A-Za-z0-9._\-@/%~]+)\]"
_PATTERNS: Final = tuple(
    re.compile(pattern)
    for pattern in (
        r"(?P<stage>\d+)(?P<compute>[FBIW])(?P<microbatch>\d+)",
        r"(?P<stage>\d+)(?P<transfer>(?:SEND|RECV)_[FB])(?P<microbatch>\d+)(?P<arrow>->|<-)(?P<peer_stage>\d+)@(?P<peer>\d+)",
        r"STEP" + _NAME,
        r"OWNER_STEP" + _NAME,
        r"(?P<sync>(?:SEND|RECV)_(?:IDS|ROWS|GRAD|WEIGHT))" + _NAME + r"(?P<arrow>->|<-)(?P<peer>\d+)",
        r"(?P<collective>ALL_REDUCE|CLIP)(?:" + _NAME + r")?\{(?P<ranks>\d+(?:,\d+)*)\}",
        r"(?P<across>DP_(?:ALL_REDUCE|REDUCE|BROADCAST))" + _NAME,
    )
)


def _quote(bucket: str) -> str:
    return quote(bucket, safe="._-@/")


def _arrow(kind: TransferKind | SyncKind) -> str:
    return "->" if kind in SENDS else "<-"


def format_action(action: Action) -> str:
    """The text form of `action`: one word, no spaces."""
    match action:
        case Compute(kind=kind, stage=stage, microbatch=microbatch):
            return f"{stage}{kind.value}{microbatch}"
        case Transfer(kind=move, stage=stage, microbatch=microbatch, peer_stage=other, peer=peer):
            return f"{stage}{move.value}{microbatch}{_arrow(move)}{other}@{peer}"
        case BucketStep(bucket=bucket):
            return f"STEP[{_quote(bucket)}]"
        case Sync(kind=sync, bucket=bucket, peer=rank):
            tail = "" if rank is None else f"{_arrow(sync)}{rank}"
            return f"{sync.value}[{_quote(bucket)}]{tail}"
        case Across(kind=across, bucket=bucket):
            return f"{across.value}[{_quote(bucket)}]"
        case Collective(kind=collective, ranks=ranks, bucket=name):
            middle = "" if name is None else f"[{_quote(name)}]"
            return f"{collective.value}{middle}{{{','.join(map(str, ranks))}}}"
        case _:
            assert_never(action)


def parse_action(text: str) -> Action:
    """The action whose text form is `text`.

    Raises DagParseError, quoting `text`, when there is none.
    """
    for index, pattern in enumerate(_PATTERNS):
        found = pattern.fullmatch(text)
        if found is not None:
            action = _build(index, found.groupdict())
            if format_action(action) != text:
                break
            return action
    raise DagParseError(
        f"{text!r} is no action; actions look like 2F0, 0SEND_F2->1@3, STEP[stage0], "
        "SEND_GRAD[embed.weight]->0, ALL_REDUCE[embed.weight]{0,3} or CLIP{0,1}"
    )


def _build(index: int, part: dict[str, str]) -> Action:
    name = unquote(part["bucket"]) if part.get("bucket") else None
    match index:
        case 0:
            return Compute(
                kind=ComputeKind(part["compute"]),
                stage=int(part["stage"]),
                microbatch=int(part["microbatch"]),
            )
        case 1:
            return Transfer(
                kind=TransferKind(part["transfer"]),
                stage=int(part["stage"]),
                microbatch=int(part["microbatch"]),
                peer_stage=int(part["peer_stage"]),
                peer=int(part["peer"]),
            )
        case 2:
            return BucketStep(bucket=str(name))
        case 3:
            return Sync(kind=SyncKind.OWNER_STEP, bucket=str(name))
        case 4:
            return Sync(kind=SyncKind(part["sync"]), bucket=str(name), peer=int(part["peer"]))
        case 5:
            ranks = tuple(map(int, part["ranks"].split(",")))
            return Collective(kind=CollectiveKind(part["collective"]), ranks=ranks, bucket=name)
        case _:
            return Across(kind=AcrossKind(part["across"]), bucket=str(name))
