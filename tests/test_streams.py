"""Streams of a device, as the CPU checks them: a missing event is an error, a present one is not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
from owners import Rank, errors
from torch import nn

from piper_owner import rows
from piper_owner.errors import ConfigError, RowsError
from piper_owner.rows import RowsTable
from piper_owner.streams import (
    CheckedStreams,
    StreamOrderError,
    accelerator,
    checked_streams,
    is_capturing,
    streams_of,
)
from piper_owner.transport import Fabric

SECOND = timedelta(seconds=1)
CPU = torch.device("cpu")


@pytest.fixture
def streams() -> Iterator[CheckedStreams]:
    with checked_streams() as made:
        yield made


def test_the_cpu_has_streams_only_while_they_are_checked() -> None:
    assert streams_of(CPU) is None
    with checked_streams() as made:
        assert streams_of(CPU) is made
        assert streams_of(torch.device("meta")) is None
        seen = []
        other = threading.Thread(target=lambda: seen.append(streams_of(CPU)))
        other.start()
        other.join()
        assert seen == [None], "another rank of the process is not concerned"
    assert streams_of(CPU) is None
    assert not is_capturing()


def test_a_read_before_its_event_names_both_streams_and_the_tensor(streams: CheckedStreams) -> None:
    copy, table = streams.side("copy"), torch.zeros(4, 3)
    streams.name(table, "embed.weight")
    streams.record_stream(table, copy)
    with (
        pytest.raises(
            StreamOrderError,
            match=r"reads embed.weight \(float32 \(4, 3\)\).*default stream may still write it \(aten.zeros",
        ) as info,
        streams.on(copy),
    ):
        table.clone()
    assert "on the copy stream" in str(info.value)


def test_an_event_orders_a_read_behind_a_write(streams: CheckedStreams) -> None:
    copy, table = streams.side("copy"), torch.zeros(4, 3)
    streams.record_stream(table, copy)
    copy.wait_event(streams.current().record())
    with streams.on(copy):
        other = table + 1
        done = copy.record()
    streams.record_stream(other, streams.current())
    with pytest.raises(StreamOrderError, match="copy stream may still write it"):
        other.add_(1)
    streams.current().wait_event(done)
    assert float(other.add_(1).sum()) == 24.0


def test_an_event_covers_nothing_that_comes_behind_it(streams: CheckedStreams) -> None:
    copy, table = streams.side("copy"), torch.zeros(4)
    streams.record_stream(table, copy)
    early = streams.current().record()
    table.add_(1)
    copy.wait_event(early)
    with streams.on(copy), pytest.raises(StreamOrderError, match=r"default stream.*aten.add_"):
        table.clone()


def test_a_write_waits_for_reads(streams: CheckedStreams) -> None:
    copy, table = streams.side("copy"), torch.zeros(4)
    streams.record_stream(table, copy)
    copy.wait_event(streams.current().record())
    with streams.on(copy):
        table.clone()
        done = copy.record()
    table.clone()  # two reads need no order
    with pytest.raises(StreamOrderError, match=r"writes .*copy stream may still read it \(aten.clone"):
        table.zero_()
    streams.current().wait_event(done)
    table.zero_()


def test_bytes_of_one_tensor_are_apart(streams: CheckedStreams) -> None:
    copy, table = streams.side("copy"), torch.zeros(6, 2)
    streams.record_stream(table, copy)
    copy.wait_event(streams.current().record())
    table[3:].add_(1)
    with streams.on(copy):
        table[:3].clone()
        with pytest.raises(StreamOrderError, match="default stream may still write"):
            table[2:4].clone()


def test_events_pass_order_on(streams: CheckedStreams) -> None:
    one, two, table = streams.side("one"), streams.side("two"), torch.zeros(4)
    for stream in (one, two):
        streams.record_stream(table, stream)
    one.wait_event(streams.current().record())
    two.wait_event(one.record())
    with streams.on(two):
        table.clone()


def test_the_host_waits_for_what_it_reads_and_fills(streams: CheckedStreams) -> None:
    copy, table, staged = streams.side("copy"), torch.ones(4), streams.host_buffer(16).view(torch.float32)
    streams.record_stream(table, copy)
    copy.wait_event(streams.current().record())
    with streams.on(copy):
        staged.copy_(table)
        done = copy.record()
    with pytest.raises(StreamOrderError, match="host thread MainThread reads a host buffer"):
        streams.host_reads(staged, "send")
    done.synchronize(SECOND)
    streams.host_reads(staged, "send")
    with streams.on(copy):  # what the host has read before it started this is read
        table.copy_(staged)
        done = copy.record()
    with pytest.raises(StreamOrderError, match=r"receive on the host .* copy stream may still read it"):
        streams.host_writes(staged, "receive")
    done.synchronize(SECOND)
    streams.host_writes(staged, "receive")


def test_memory_of_another_stream_is_recorded_before_its_use(streams: CheckedStreams) -> None:
    copy, table = streams.side("copy"), torch.ones(4)
    copy.wait_event(streams.current().record())
    with (
        streams.on(copy),
        pytest.raises(StreamOrderError, match="made on the default stream, without record_stream"),
    ):
        table.clone()


def test_another_thread_knows_only_what_it_is_given(streams: CheckedStreams) -> None:
    table = torch.ones(4)
    streams.record_stream(table, streams.side("copy"))
    event = streams.current().record()
    found: list[str] = []

    def work(*, waits: bool) -> None:
        copy = streams.side("copy")
        if waits:
            copy.wait_event(event)
        with streams.on(copy):
            try:
                table.clone()
            except StreamOrderError as error:
                found.append(str(error))

    for waits in (False, True):
        thread = threading.Thread(target=work, kwargs={"waits": waits})
        thread.start()
        thread.join()
    assert len(found) == 1
    assert "default stream may still write" in found[0]


def test_training_on_one_stream_is_let_be_and_host_syncs_are_counted(streams: CheckedStreams) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        optimizer = kind(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    streams.host_syncs.clear()
    total = torch.ones(3).sum()
    assert streams.host_syncs == []
    assert float(total) == 3.0
    assert streams.host_syncs == ["aten._local_scalar_dense.default"]


@pytest.mark.parametrize("call", ["step", "finalize_grads"])
def test_a_step_is_refused_while_a_graph_is_captured(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "is_capturing", lambda: True)

    def work(fabric: Fabric) -> None:
        rank = Rank(fabric)
        rank.backward()
        getattr(rank.opt, call)()

    for number, error in enumerate(errors(2, work)):
        assert isinstance(error, ConfigError)
        assert f"rank {number}: a step" in str(error)
        assert "make_graphed_callables" in str(error)


def test_a_lookup_of_rows_is_refused_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    embed = nn.Embedding(8, 2)
    table = RowsTable([embed], nn.Parameter(torch.ones(8, 2)), what="tie t on rank 0", device=CPU)
    ids = torch.tensor([1, 3])
    wanted, _ = table.request(ids)
    table.fill(iter([(0, 2, torch.ones(len(wanted), 2))]))
    assert embed(ids).tolist() == [[1.0, 1.0]] * 2
    monkeypatch.setattr(rows, "is_capturing", lambda: True)
    with pytest.raises(RowsError, match=r"tie t on rank 0: .* while a CUDA graph is captured"):
        embed(ids)
