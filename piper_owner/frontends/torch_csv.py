"""Schedules that torch.distributed.pipelining saves as CSV (`_dump_csv`). Needs no torch.

A row is a rank, a cell one action in temporal order, an empty cell a pause:

    0F0  0B0  0I0  0W0        forward, full backward, backward of the input and of the weights
    (0F1;1B0)OVERLAP_F_B      these together; here one after the other
    0SEND_F0  1RECV_F0        the activation of microbatch 0 leaves stage 0 and comes to stage 1
    1SEND_B0  0RECV_B0        its gradient, going back
    0UNSHARD  0RESHARD  0REDUCE_GRAD    of one rank alone, left out here

The format is that of `_Action.__repr__` and `from_str` in torch 2.13. A file either has no sends
and recvs at all ("compute_only") or all of them ("compute_comms").
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from typing import Final

from piper_owner.dag.graph import TrainingDAG
from piper_owner.dag.nodes import Action, Compute, ComputeKind, Transfer, TransferKind
from piper_owner.errors import DagParseError

__all__ = ["looks_like_torch_csv", "parse_torch_csv"]

_ACTION: Final = re.compile(
    r"(?P<stage>\d{1,9})"
    r"(?:(?P<compute>[FBIW])(?P<microbatch>\d{1,9})|(?P<transfer>(?:SEND|RECV)_[FB])(?P<moved>\d{1,9})"
    r"|(?P<local>UNSHARD|RESHARD|REDUCE_GRAD)\d{0,9})"
)
_OVERLAP: Final = re.compile(r"\((?P<parts>[^()]*)\)OVERLAP_F_B")
_FORMS: Final = "actions look like 0F0, 1B2, 0SEND_F1, 1UNSHARD or (0F1;1B0)OVERLAP_F_B"
_SPARSE: Final = 4
_PLAIN: Final = 100_000


def looks_like_torch_csv(text: str) -> bool:
    """Whether the first cell that is not empty starts as an action of such a file does."""
    return re.match(r'[\s,"]*(\d+\s*[A-Z]|\(\s*\d+[A-Z])', text) is not None


def parse_torch_csv(text: str) -> TrainingDAG:
    """The schedule as a TrainingDAG of a chain of stages without buckets. Pure and local.

    The rank of a stage is the one that computes it. Whether the schedule is complete and in order
    is for the rules to say.

    Raises DagParseError, naming rank and cell, for what is no action, for a stage that two ranks
    compute or none does, and for a message to or from a stage that is not there.
    """
    rows = [list(_cells(rank, row)) for rank, row in enumerate(_rows(text))]
    placement = _placement(rows)
    computes = sum(found["compute"] is not None for row in rows for _, found in row)
    microbatches = 1 + max(int(found["microbatch"] or 0) for row in rows for _, found in row)
    if len(placement) * microbatches > _SPARSE * computes + _PLAIN:
        raise DagParseError(
            f"it names microbatch {microbatches - 1}, but has {computes} computes for its {len(placement)} "
            "stages: nearly all are missing; number microbatches from 0"
        )
    return TrainingDAG(
        placement=placement,
        num_ranks=len(rows),
        num_microbatches=microbatches,
        stage_edges=tuple((stage, stage + 1) for stage in range(len(placement) - 1)),
        buckets=(),
        programs=tuple(tuple(_actions(rank, row, placement)) for rank, row in enumerate(rows)),
    )


_Cell = tuple[int, re.Match[str]]


def _rows(text: str) -> list[list[str]]:
    try:
        rows = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except csv.Error as error:
        raise DagParseError(f"this is no CSV: {error}") from None
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    return rows


def _cells(rank: int, row: list[str]) -> Iterator[_Cell]:
    """Each action of a row, with the number of its cell."""
    for column, cell in enumerate(row):
        text = cell.strip()
        overlap = _OVERLAP.fullmatch(text)
        for part in [text] if overlap is None else overlap["parts"].split(";"):
            found = _ACTION.fullmatch(part.strip())
            if found is not None:
                yield column, found
            elif part.strip():
                raise DagParseError(
                    f"rank {rank}, cell {column}: {part.strip()[:40]!a} is no action; {_FORMS}"
                )


def _placement(rows: list[list[_Cell]]) -> tuple[int, ...]:
    ranks: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for column, found in row:
            if found["compute"] is not None:
                first = ranks.setdefault(int(found["stage"]), rank)
                if first != rank:
                    raise DagParseError(
                        f"rank {rank}, cell {column}: {found[0]} computes stage {found['stage']}, which rank "
                        f"{first} computes too; a stage stands on one rank"
                    )
    if not ranks:
        raise DagParseError(f"it computes nothing; {_FORMS}")
    missing = next(stage for stage in range(len(ranks) + 1) if stage not in ranks)
    if missing < len(ranks):
        raise DagParseError(
            f"no rank computes stage {missing}, but rank {ranks[max(ranks)]} computes stage {max(ranks)}; "
            "stages are numbered from 0 without gaps"
        )
    return tuple(ranks[stage] for stage in range(len(ranks)))


def _actions(rank: int, row: list[_Cell], placement: tuple[int, ...]) -> Iterator[Action]:
    for column, found in row:
        stage = int(found["stage"])
        if found["compute"] is not None:
            yield Compute(
                kind=ComputeKind(found["compute"]), stage=stage, microbatch=int(found["microbatch"])
            )
        elif found["transfer"] is not None:
            move = TransferKind(found["transfer"])
            later = move in (TransferKind.SEND_ACTIVATION, TransferKind.RECV_INPUT_GRAD)
            other = stage + 1 if later else stage - 1
            if not (0 <= other < len(placement) and stage < len(placement)):
                raise DagParseError(
                    f"rank {rank}, cell {column}: {found[0]} goes to or comes from stage {other}, but the "
                    f"stages are 0 to {len(placement) - 1}"
                )
            yield Transfer(
                kind=move,
                stage=stage,
                microbatch=int(found["moved"]),
                peer_stage=other,
                peer=placement[other],
            )
