"""The text form of a TrainingDAG: readable, diffable, and parsed back exactly.

    training_dag ranks=2 microbatches=1
    placement 0 1
    edges 0->1
    bucket stage0 stages=0
    bucket embed.weight stages=0,1 owner=0
    rank 0
      0F0 0SEND_F0->1@1 ...
    rank 1
      1RECV_F0<-0@0 1F0 ...

Where several pipelines run side by side, the first line ends in `pipelines=2`. Indented lines
continue the program of the rank above them; how they wrap has no meaning.
"""

from __future__ import annotations

import re
import textwrap
from typing import Final
from urllib.parse import quote, unquote

from piper_owner.dag.graph import Bucket, TrainingDAG
from piper_owner.dag.nodes import Action, format_action, parse_action
from piper_owner.errors import DagParseError

__all__ = ["format_dag", "parse_dag"]

_WIDTH: Final = 100
_HEADER: Final = re.compile(r"training_dag ranks=(\d+) microbatches=(\d+)(?: pipelines=(\d+))?")
_BUCKET: Final = re.compile(r"bucket (\S+) stages=(\d+(?:,\d+)*)(?: owner=(\d+)(?: rows=(\d+(?:,\d+)*))?)?")


def format_dag(dag: TrainingDAG) -> str:
    """The text form of `dag`, ending in a newline."""
    lines = [
        f"training_dag ranks={dag.num_ranks} microbatches={dag.num_microbatches}"
        + (f" pipelines={dag.num_pipelines}" if dag.num_pipelines > 1 else ""),
        " ".join(["placement", *map(str, dag.placement)]),
        " ".join(["edges", *(f"{early}->{late}" for early, late in dag.stage_edges)]),
    ]
    for bucket in dag.buckets:
        owner = "" if bucket.owner is None else f" owner={bucket.owner}"
        owner += f" rows={','.join(map(str, bucket.row_ranks))}" if bucket.row_ranks else ""
        name = quote(bucket.name, safe="._-@/")
        lines.append(f"bucket {name} stages={','.join(map(str, bucket.stages))}{owner}")
    for rank, program in enumerate(dag.programs):
        lines.append(f"rank {rank}")
        words = " ".join(map(format_action, program))
        lines.extend(
            textwrap.wrap(
                words,
                _WIDTH,
                initial_indent="  ",
                subsequent_indent="  ",
                break_long_words=False,
                break_on_hyphens=False,
            )
        )
    return "\n".join(lines) + "\n"


def parse_dag(text: str) -> TrainingDAG:
    """The TrainingDAG whose text form is `text`.

    Raises DagParseError, quoting the line, when it does not parse, and DagError when its parts
    do not fit together.
    """
    placement: tuple[int, ...] | None = None
    header: tuple[int, int, int] | None = None
    edges: tuple[tuple[int, int], ...] = ()
    buckets: list[Bucket] = []
    programs: list[list[Action]] = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            if line.startswith("  ") and programs:
                programs[-1].extend(map(parse_action, line.split()))
                continue
            word, _, rest = line.partition(" ")
            match word:
                case "training_dag":
                    header = _numbers_of(_HEADER, line)
                case "placement":
                    placement = tuple(map(int, rest.split()))
                case "edges":
                    edges = tuple(map(_parse_edge, rest.split()))
                case "bucket":
                    buckets.append(_parse_bucket(line))
                case "rank":
                    if int(rest) != len(programs):
                        raise DagParseError(f"rank {len(programs)} comes next")
                    programs.append([])
                case "" if not line.strip():
                    pass
                case _:
                    raise DagParseError("it starts with none of training_dag, placement, edges, bucket, rank")
        except ValueError as error:
            raise DagParseError(f"line {number}, {line.strip()!r}: {error}") from error
    if header is None or placement is None:
        raise DagParseError("the text of a TrainingDAG has a 'training_dag ...' and a 'placement ...' line")
    return TrainingDAG(
        placement=placement,
        num_ranks=header[0],
        num_microbatches=header[1],
        num_pipelines=header[2],
        stage_edges=edges,
        buckets=tuple(buckets),
        programs=tuple(map(tuple, programs)),
    )


def _numbers_of(pattern: re.Pattern[str], line: str) -> tuple[int, int, int]:
    found = pattern.fullmatch(line)
    if found is None:
        raise DagParseError("write it as 'training_dag ranks=2 microbatches=4'")
    return int(found[1]), int(found[2]), int(found[3] or 1)


def _parse_edge(word: str) -> tuple[int, int]:
    early, arrow, late = word.partition("->")
    if not arrow:
        raise DagParseError(f"{word!r} is no stage edge such as 0->1")
    return int(early), int(late)


def _parse_bucket(line: str) -> Bucket:
    found = _BUCKET.fullmatch(line)
    if found is None:
        raise DagParseError("write it as 'bucket NAME stages=0,3 owner=0', without owner= for a plain bucket")
    return Bucket(
        name=unquote(found[1]),
        stages=tuple(map(int, found[2].split(","))),
        owner=None if found[3] is None else int(found[3]),
        row_ranks=() if found[4] is None else tuple(map(int, found[4].split(","))),
    )
