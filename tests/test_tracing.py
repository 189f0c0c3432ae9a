"""Traces: of runs in this process and on Ray, and of dry runs."""

from __future__ import annotations

import ast
import gzip
import inspect
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray_jobs import SMALL
from tiny import one_torch_thread
from traces import actions_by_row, check_trace, flows_of, recorded_run, small

from piper_owner.cli import main
from piper_owner.dag.nodes import Sync, SyncKind, Transfer, parse_action
from piper_owner.executor.config import RunKind
from piper_owner.executor.plan import plan_run
from piper_owner.executor.rank import RankExecutor
from piper_owner.executor.recording import ClockOffset, align_clocks, trace_of_run
from piper_owner.executor.source import GPTSource
from piper_owner.simulate import simulate
from piper_owner.tracing.chrome import format_trace, to_chrome
from piper_owner.tracing.events import RankTrace, Trace, TraceEvent, timeline_of, trace_of


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


@pytest.mark.parametrize(
    "changes",
    [
        {"layout": "rows"},
        {"layout": "dense", "owner": "first"},
        {"layout": "dense", "owner": "last", "clip": 0.5},
        {"placement": "v", "schedule": "zbv"},
        {"stages": 2, "dp": 2, "scope": "global", "layout": "dense"},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_a_trace_of_a_run(changes: dict[str, object]) -> None:
    config = small(**changes)
    result = recorded_run(config, first_step=1)
    trace = trace_of_run(result.records, title="a run")
    whole = check_trace(format_trace(trace), num_ranks=config.num_ranks)
    assert whole["otherData"]["flows_left_out"] == 0
    assert trace.steps == (1, 2)
    programs = plan_run(config, RunKind.OWNER, GPTSource()).dag.programs
    for rank in trace.ranks:
        assert [event.action for event in rank.events] == [*programs[rank.rank]] * 2
    names = [e["args"]["name"] for e in whole["traceEvents"] if e["name"] == "process_name"]
    assert names[-1] == ("pipeline 1, rank 1" if config.dp > 1 else f"rank {config.devices - 1}")


def test_bytes_are_those_of_the_messages() -> None:
    config = small(layout="dense", dtype="float32", owner="first")
    result = recorded_run(config)
    table = config.vocab * config.hidden * 4
    activation = config.microbatch_size * config.sequence_length * config.hidden * 4
    for rank in result.records:
        for event in rank.trace.events:
            match event.action:
                case Transfer(kind=kind):
                    moved = event.sent_bytes if "SEND" in kind.value else event.received_bytes
                    assert moved == activation + 512
                case Sync(kind=SyncKind.SEND_GRAD):
                    assert event.sent_bytes == table + 512
                case Sync(kind=SyncKind.OWNER_STEP):
                    assert event.sent_bytes == event.received_bytes == table + 512
                case _:
                    pass
    sent = sum(
        event.sent_bytes
        for rank in result.records
        for event in rank.trace.events
        if event.step == config.steps - 1 and not isinstance(event.action, Transfer)
    )
    steps = result.runs[RunKind.OWNER].bytes_sent_per_step
    assert sent == sum(each.total for each in steps.values())


def test_a_gradient_flows_into_the_step_of_its_owner_and_the_weights_out_of_it() -> None:
    config = small(layout="dense", owner="last", steps=1)
    whole = to_chrome(trace_of_run(recorded_run(config).records, title="a run"))
    rows = actions_by_row(whole["traceEvents"])
    step = next(event for event in rows[3] if event["name"].startswith("OWNER_STEP"))
    sent = next(event for event in rows[0] if event["name"].startswith("SEND_GRAD"))
    inside = [
        (start["pid"], end["pid"])
        for start, end in flows_of(whole["traceEvents"])
        if step["ts"] <= end["ts"] < step["ts"] + step["dur"] or start["ts"] == step["ts"]
    ]
    assert (0, 3) in inside, sent
    assert (3, 0) in inside


def test_a_trace_of_a_dry_run() -> None:
    config = small(layout="dense")
    dag = plan_run(config, RunKind.OWNER, GPTSource()).dag
    timeline = simulate(dag)
    trace = trace_of(timeline, title="predicted")
    whole = check_trace(format_trace(trace), num_ranks=4)
    assert whole["otherData"] == {
        "title": "predicted", "measured": False, "clock_error_us": 0.0, "flows_left_out": 0
    }  # fmt: skip
    assert timeline_of(trace, 0).ends == timeline.ends
    assert timeline_of(trace, 0).starts == timeline.starts
    forward = next(e for e in whole["traceEvents"] if e["name"] == "1F2")
    assert forward["cat"] == "forward"
    assert forward["args"] == {"step": 1, "stage": 1, "microbatch": 2}


def test_a_message_that_the_clocks_turn_round_has_no_flow() -> None:
    def event(text: str, start: int, end: int) -> TraceEvent:
        return TraceEvent(action=parse_action(text), step=0, start_ns=start, end_ns=end)

    def trace(received: int) -> Trace:
        sender = RankTrace(rank=0, events=(event("0SEND_F0->1@1", 5000, 6000),))
        taker = RankTrace(rank=1, events=(event("1RECV_F0<-0@0", 0, received),), clock_error_ns=7000)
        return Trace(title="", ranks=(sender, taker), is_measured=True)

    whole = check_trace(format_trace(trace(4000)), num_ranks=2)
    assert (whole["otherData"]["flows_left_out"], whole["otherData"]["clock_error_us"]) == (1, 7.0)
    whole = check_trace(format_trace(trace(9000)), num_ranks=2)
    assert whole["otherData"]["flows_left_out"] == 0
    # Both ends have to be in the trace.
    alone = Trace(title="", ranks=trace(9000).ranks[:1], is_measured=True)
    assert flows_of(to_chrome(alone)["traceEvents"]) == []


def test_clocks_of_one_host_count_as_one_and_others_are_bounded() -> None:
    from datetime import timedelta

    from piper_owner.executor.local import run_threads

    clocks = run_threads(3, align_clocks, timeout=timedelta(seconds=20))
    assert all(clock.offset_ns == 0 and clock.error_ns < 10**9 for clock in clocks)
    assert ClockOffset.within(1000, 1501) == ClockOffset(offset_ns=1250, error_ns=251)
    assert ClockOffset.within(-30, 50) == ClockOffset(offset_ns=0, error_ns=50)


def test_nothing_is_recorded_where_nobody_observes() -> None:
    assert recorded_run(small(steps=1)).records  # a run that records does
    # Off, a step asks once whether anybody observes, and each action runs as it did.
    step = ast.parse(textwrap.dedent(inspect.getsource(RankExecutor.train_step)))
    loops = [node for node in ast.walk(step) if isinstance(node, ast.For)]
    assert loops
    for loop in loops:
        assert "observer" not in ast.dump(loop)
    run = inspect.getsource(RankExecutor._run)
    assert "observer" not in run


@pytest.mark.parametrize("more", [(), ("--transfer", "streamed", "--owner", "first")])
def test_plan_writes_the_trace_of_its_advice(more: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    assert main(["plan", "--preset", "gpt2", "--stages", "4", *more, "--trace", str(file)]) == 0
    whole = check_trace(file.read_text(), num_ranks=4)
    assert whole["otherData"]["measured"] is False
    assert whole["otherData"]["flows_left_out"] == 0
    for row in actions_by_row(whole["traceEvents"]).values():
        steps = [event["args"]["step"] for event in row]
        assert steps == sorted(steps)
        assert set(steps) == {1, 2}
    assert main(["plan", "--preset", "gpt2", "--stages", "4", "--trace", str(tmp_path)]) == 2


@pytest.mark.usefixtures("ray_cluster")
def test_the_command_writes_trace_and_profiles(tmp_path: Path) -> None:
    trace, profiles = tmp_path / "trace.json", tmp_path / "profiles"
    arguments = (*SMALL, "--steps", "3", "--trace-steps", "2", "--layout", "dense", "--text", __file__)
    pictures = ("--trace", str(trace), "--profile", str(profiles))
    assert main(["train", *arguments, *pictures, "--compare", "naive"]) == 0
    whole = check_trace(trace.read_text(), num_ranks=2)
    assert whole["otherData"]["flows_left_out"] == 0
    steps = {e["args"]["step"] for row in actions_by_row(whole["traceEvents"]).values() for e in row}
    assert steps == {2, 3}
    assert sorted(path.name for path in profiles.iterdir()) == ["rank0.json.gz", "rank1.json.gz"]
    for rank, row in actions_by_row(whole["traceEvents"]).items():
        profile = json.loads(gzip.decompress((profiles / f"rank{rank}.json.gz").read_bytes()))
        seen = {event.get("name") for event in profile["traceEvents"]}
        assert {event["name"] for event in row} <= seen
        assert any(str(name).startswith("aten::") for name in seen)


def test_outputs_that_cannot_be_written_end_with_2_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    wrong = (
        (("--trace", str(tmp_path)), "this is a folder"),
        (("--report", str(tmp_path / "none" / "a.html")), "does not exist"),
        (("--profile", str(file)), "this is a file"),
        (("--profile", str(tmp_path / "none" / "a")), "does not exist"),
        (("--trace-steps", "0"), "at least one"),
        (("--trace", str(file), "--json", str(file)), "file of its own"),
    )
    for arguments, words in wrong:
        assert main(["train", *arguments]) == 2
        said = capsys.readouterr().err
        assert words in said
        assert arguments[0] in said or "--json" in said
