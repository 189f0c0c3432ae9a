"""What a file in the trace event format must keep, and runs to see it in."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from piper_owner.dag.nodes import RECVS, SENDS, Sync, SyncKind, Transfer, parse_action
from piper_owner.executor.config import RunKind, TrainConfig
from piper_owner.executor.local import train_in_process
from piper_owner.executor.recording import Recording
from piper_owner.executor.results import TrainResult
from piper_owner.executor.stream import token_stream
from piper_owner.tracing.chrome import ACTIONS

__all__ = ["Record", "actions_by_row", "check_trace", "flows_of", "recorded_run", "small"]

Record = dict[str, Any]


def small(**changes: Any) -> TrainConfig:  # noqa: ANN401 - fields of a config
    """A run of milliseconds."""
    sizes: dict[str, Any] = {
        "vocab": 300, "hidden": 16, "heads": 2, "layers": 4, "sequence_length": 8, "microbatch_size": 1,
        "microbatches": 4, "steps": 3, "timeout_seconds": 20,
    }  # fmt: skip
    return TrainConfig(**{**sizes, **changes})


def recorded_run(config: TrainConfig, *, first_step: int = 0, compare: Sequence[RunKind] = ()) -> TrainResult:
    """Train in this process, and record."""
    tokens = np.random.default_rng(0).integers(0, config.vocab, 3000).astype(np.int32)
    recording = Recording(first_step=first_step)
    stream = token_stream(config, tokens)
    return train_in_process(config, stream, compare=tuple(compare), recording=recording)


def actions_by_row(events: Sequence[Record]) -> dict[int, list[Record]]:
    """The actions of each rank, in the order of the file."""
    rows: dict[int, list[Record]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X" and event["tid"] == ACTIONS:
            rows[event["pid"]].append(event)
    return rows


def flows_of(events: Sequence[Record]) -> list[tuple[Record, Record]]:
    """Both ends of each message; each start has one end, and each end one start."""
    ends: dict[str, dict[int, Record]] = {"s": {}, "f": {}}
    for event in events:
        if event["ph"] in ends:
            assert event["id"] not in ends[event["ph"]], "an id has one start and one end"
            ends[event["ph"]][event["id"]] = event
    assert ends["s"].keys() == ends["f"].keys()
    return [(start, ends["f"][each]) for each, start in ends["s"].items()]


def check_trace(text: str, *, num_ranks: int) -> Record:
    """Check the file, and give it back: names parse, rows ascend without overlap, flows match."""
    whole: Record = json.loads(text)
    events: list[Record] = whole["traceEvents"]
    assert {event["ph"] for event in events} <= {"M", "X", "s", "f"}
    named = {event["pid"] for event in events if event["ph"] == "M" and event["name"] == "process_name"}
    rows = actions_by_row(events)
    assert named == rows.keys() == set(range(num_ranks))
    for row in rows.values():
        for event in row:
            assert repr(parse_action(event["name"])) == event["name"]
            assert event["dur"] >= 0
            assert event["ts"] >= 0
            assert event["args"]["step"] >= 1
        for before, after in itertools.pairwise(row):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-6, (before, after)
    flows = flows_of(events)
    for start, end in flows:
        assert start["ts"] <= end["ts"]
        assert _is_inside(start, rows), start
        assert _is_inside(end, rows), end
    done = [e for row in rows.values() for e in row if "done_by_pipeline" not in e["args"]]
    sends = [event for event in done if _kind(event["name"]) in SENDS]
    recvs = [event for event in done if _kind(event["name"]) in RECVS]
    assert len(sends) == len(recvs) == len(flows) + whole["otherData"]["flows_left_out"]
    return whole


def _is_inside(flow: Record, rows: dict[int, list[Record]]) -> bool:
    return any(e["ts"] - 1e-6 <= flow["ts"] <= e["ts"] + e["dur"] + 1e-6 for e in rows[flow["pid"]])


def _kind(name: str) -> object:
    action = parse_action(name)
    return action.kind if isinstance(action, Transfer | Sync) else SyncKind.OWNER_STEP
