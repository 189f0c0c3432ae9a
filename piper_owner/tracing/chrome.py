"""A trace in the JSON trace event format, which Perfetto (ui.perfetto.dev) and chrome://tracing open. Pure.

The format: "Trace Event Format", the document that chrome://tracing links to. Here each rank is a process
with two threads, one for its steps and one for its actions; an action is a complete event ("X"), and a
message a flow from the event that sends it ("s") to the one that takes it in ("f").
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any, Final, assert_never

from piper_owner.dag.nodes import (
    Across,
    Action,
    BucketStep,
    Collective,
    Compute,
    Sync,
    SyncKind,
    Transfer,
    format_action,
)
from piper_owner.simulate import counterpart
from piper_owner.tracing.events import RankTrace, Trace, TraceEvent, family_of

__all__ = ["ACTIONS", "STEPS", "format_trace", "to_chrome"]

STEPS: Final = 0
"""The thread of a rank's steps."""
ACTIONS: Final = 1
"""The thread of a rank's actions."""

Record = dict[str, Any]


def format_trace(trace: Trace) -> str:
    """The file: one event a line, plain ASCII, ending in a newline."""
    whole = to_chrome(trace)
    events = ",\n".join(json.dumps(event, allow_nan=False) for event in whole.pop("traceEvents"))
    head = json.dumps(whole, allow_nan=False)
    return f'{head[:-1]}, "traceEvents": [\n{events}\n]}}\n'


def to_chrome(trace: Trace) -> Record:
    """The whole trace as one JSON object; `ts` and `dur` are microseconds from its first event.

    Flows come in pairs, matched by pair of ranks, kind and order; a message of which only one end is in
    the trace has none, nor has one that the error of the clocks would turn round
    (`otherData.flows_left_out` counts these).
    """
    begin = min((event.start_ns for rank in trace.ranks for event in rank.events), default=0)
    pids = {(rank.pipeline, rank.rank): pid for pid, rank in enumerate(_sorted(trace))}
    events = [record for rank in _sorted(trace) for record in _names(trace, rank, pids)]
    for rank in _sorted(trace):
        pid = pids[rank.pipeline, rank.rank]
        events += _steps(rank, pid, begin)
        events += (_slice(event, pid, begin, _is_skipped(rank, event)) for event in rank.events)
    flows, left_out = _flows(trace, pids, begin)
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "title": trace.title,
            "measured": trace.is_measured,
            "clock_error_us": max((rank.clock_error_ns for rank in trace.ranks), default=0) / 1000,
            "flows_left_out": left_out,
        },
        "traceEvents": events + flows,
    }


def _sorted(trace: Trace) -> list[RankTrace]:
    return sorted(trace.ranks, key=lambda rank: (rank.pipeline, rank.rank))


def _names(trace: Trace, rank: RankTrace, pids: dict[tuple[int, int], int]) -> Iterator[Record]:
    pid = pids[rank.pipeline, rank.rank]
    several = any(other.pipeline for other in trace.ranks)
    name = f"pipeline {rank.pipeline}, rank {rank.rank}" if several else f"rank {rank.rank}"
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": STEPS, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": STEPS, "args": {"sort_index": pid}}
    for thread, label in ((STEPS, "steps"), (ACTIONS, "actions")):
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": thread, "args": {"name": label}}


def _microseconds(time_ns: int, begin: int) -> float:
    return (time_ns - begin) / 1000


def _steps(rank: RankTrace, pid: int, begin: int) -> Iterator[Record]:
    spans: dict[int, list[TraceEvent]] = defaultdict(list)
    for event in rank.events:
        spans[event.step].append(event)
    for step, events in spans.items():
        start, end = events[0].start_ns, events[-1].end_ns
        yield {
            "ph": "X", "name": f"step {step + 1}", "cat": "whole step", "pid": pid, "tid": STEPS,
            "ts": _microseconds(start, begin), "dur": (end - start) / 1000, "args": {"step": step + 1},
        }  # fmt: skip


def _slice(event: TraceEvent, pid: int, begin: int, skipped: bool) -> Record:
    arguments = {"step": event.step + 1, **_arguments(event.action)}
    if skipped:
        arguments["done_by_pipeline"] = 0
    if event.sent_bytes:
        arguments["sent_bytes"] = event.sent_bytes
    if event.received_bytes:
        arguments["received_bytes"] = event.received_bytes
    category = family_of(event.action).value.replace(", ", " ")  # a comma would make it two
    return {
        "ph": "X", "name": format_action(event.action), "cat": category, "pid": pid, "tid": ACTIONS,
        "ts": _microseconds(event.start_ns, begin), "dur": (event.end_ns - event.start_ns) / 1000,
        "args": arguments,
    }  # fmt: skip


def _arguments(action: Action) -> Record:
    match action:
        case Compute(stage=stage, microbatch=microbatch):
            return {"stage": stage, "microbatch": microbatch}
        case Transfer(stage=stage, microbatch=microbatch, peer_stage=other, peer=peer):
            return {"stage": stage, "microbatch": microbatch, "peer_stage": other, "peer": peer}
        case Sync(bucket=bucket, peer=peer):
            return {"bucket": bucket} | ({} if peer is None else {"peer": peer})
        case BucketStep(bucket=bucket) | Across(bucket=bucket):
            return {"bucket": bucket}
        case Collective(ranks=ranks, bucket=name):
            return {"ranks": list(ranks)} | ({} if name is None else {"bucket": name})
        case _:
            assert_never(action)


def _is_skipped(rank: RankTrace, event: TraceEvent) -> bool:
    return rank.follows and isinstance(event.action, Sync)


def _flows(trace: Trace, pids: dict[tuple[int, int], int], begin: int) -> tuple[list[Record], int]:
    """Both ends of every message, and how many would run backwards."""
    sent: dict[tuple[int, int, int, Action], deque[tuple[int, TraceEvent]]] = defaultdict(deque)
    carriers = {
        (rank.pipeline, rank.rank, event.step, event.action.bucket): event
        for rank in trace.ranks
        for event in rank.events
        if trace.is_measured and isinstance(event.action, Sync) and event.action.kind is SyncKind.OWNER_STEP
    }

    def carrier(rank: RankTrace, event: TraceEvent) -> TraceEvent:
        match event.action:
            case Sync(kind=SyncKind.RECV_GRAD | SyncKind.SEND_WEIGHT, bucket=bucket):
                return carriers.get((rank.pipeline, rank.rank, event.step, bucket), event)
            case _:
                return event

    for rank in _sorted(trace):
        for event in rank.events:
            taken = None if _is_skipped(rank, event) else counterpart(event.action, rank.rank)
            if taken is not None:
                peer, recv = taken
                key = (rank.pipeline, peer, event.step, recv)
                sent[key].append((pids[rank.pipeline, rank.rank], carrier(rank, event)))
    flows: list[Record] = []
    left_out = 0
    for rank in _sorted(trace):
        for event in rank.events:
            waiting = sent.get((rank.pipeline, rank.rank, event.step, event.action))
            if not waiting:
                continue
            source, send = waiting.popleft()
            recv_event = carrier(rank, event)
            # Within the event, whose end is not part of it.
            end = max(recv_event.start_ns, recv_event.end_ns - 1, send.start_ns)
            if end > recv_event.end_ns:
                left_out += 1
                continue
            common = {"name": "message", "cat": "message", "id": len(flows) // 2 + 1, "tid": ACTIONS}
            flows.append(common | {"ph": "s", "pid": source, "ts": _microseconds(send.start_ns, begin)})
            target = pids[rank.pipeline, rank.rank]
            flows.append(common | {"ph": "f", "bp": "e", "pid": target, "ts": _microseconds(end, begin)})
    return flows, left_out
