"""The way of tensors of a device through memory of the host, on a CPU that counts as one.

Every operation is checked for its order on the streams, and the numbers are those of the direct way.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from owners import Weights
from ranks import RankPool
from staged import staged
from tiny import ADAM, Mix, Pipeline, Trained, one_torch_thread, row_batch
from torch import Tensor, nn

from piper_owner.assignment import assign_over
from piper_owner.errors import ExchangeError
from piper_owner.executor.local import run_threads
from piper_owner.optimizer_wrap import OwnerOptimizer
from piper_owner.streams import CheckedStreams, StreamOrderError
from piper_owner.streams.checked import _CheckedEvent, _CheckedStream
from piper_owner.transport import Fabric, Header, Line, Phase
from piper_owner.transport.early import EarlyReceiver

T = TypeVar("T")

TIMEOUT = timedelta(seconds=20)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


def header_of(tensor: Tensor, subject: str = "w", phase: Phase = Phase.WEIGHT) -> Header:
    return Header(phase=phase, subject=subject, step=0, dtype=tensor.dtype, shape=tuple(tensor.shape))


def values(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# -- one line


def _many_kinds(fabric: Fabric) -> list[Any]:
    """Rank 0 sends, rank 1 receives in each way there is; both check their order."""
    with staged(fabric) as (there, _):
        line = Line(there.channel(1 - fabric.rank, "tied"), chunk_bytes=100)
        tensors = [
            values(1, 450, 7),
            values(2, 5),
            values(3),
            values(4, 0, 3),
            values(5, 333, 2, 3, dtype=torch.bfloat16),
            values(6, 3, 200).t(),
        ]
        found: list[Any] = []
        for number, tensor in enumerate(tensors):
            header = header_of(tensor, f"w{number}")
            if fabric.rank == 0:
                for _ in range(3):
                    line.send(header, tensor)
                line.flush()
                tensor.zero_()  # that is allowed now
                continue
            whole = line.receive(header).tensor()
            assert whole is not None
            found.append(torch.equal(whole, tensor))
            place = torch.full_like(tensor, 7.0, memory_format=torch.contiguous_format)
            line.receive(header).into(place)
            found.append(torch.equal(place, tensor))
            rows = [part.neg_().clone() for _, _, part in line.receive(header).chunks()]
            negated = torch.cat([part.reshape(-1) for part in rows]) if rows else tensor.reshape(-1)
            found.append(torch.equal(negated, -tensor.contiguous().reshape(-1)))
        found.append(line.staging_bytes)
        line.close()
        return found


def test_messages_arrive_whole_by_every_way_of_receiving_them() -> None:
    sender, receiver = run_threads(2, _many_kinds, timeout=TIMEOUT)
    assert all(receiver[:-1])
    # The largest chunk has 64 rows of 7 floats: two of those, at the receiver on host and device.
    assert sender[-1] <= 2 * 64 * 7 * 4 < 450 * 7 * 4
    assert receiver[-1] <= 4 * 64 * 7 * 4


def _both_ways(fabric: Fabric) -> bool:
    """Both send a table before either receives: with two chunks of room nobody may wait for that."""
    with staged(fabric) as (there, _):
        line = Line(there.channel(1 - fabric.rank, "tied"), chunk_bytes=64)
        mine, theirs = values(fabric.rank, 500, 4), values(1 - fabric.rank, 500, 4)
        header = header_of(mine)
        line.send(header, mine)
        line.send(header, mine, copy=True)
        mine_too = line.open(header)
        for start, stop in mine_too.header.ranges():
            mine_too.put(mine[start:stop])
        got = [line.receive(header).tensor() for _ in range(3)]
        line.flush()
        line.close()
        return all(each is not None and torch.equal(each, theirs) for each in got)


def test_a_send_does_not_wait_for_room(rank_pool: RankPool) -> None:
    assert run_threads(2, _both_ways, timeout=TIMEOUT) == [True, True]
    assert rank_pool.run(2, _both_ways) == [True, True]


def _backlog(fabric: Fabric, ends: str) -> tuple[str, str, float]:
    """Rank 0 has more to send than there is room for, and rank 1 does not take it."""
    with staged(fabric) as (there, _):
        line = Line(there.channel(1 - fabric.rank, "tied"), chunk_bytes=64)
        other = fabric.channel(1 - fabric.rank, "signal")
        if fabric.rank == 1:
            if ends == "closes":
                line.close()
            with suppress(ExchangeError):  # it may be out of time as well
                other.post_recv(torch.zeros(1)).wait()
            return "", "", 0.0
        tensor = values(1, 500, 4)
        start = time.monotonic()
        try:
            line.send(header_of(tensor), tensor)
            line.flush()
        except ExchangeError as error:
            line.close()
            with suppress(ExchangeError):
                other.post_send(torch.zeros(1)).wait()
            found = type(error).__name__, str(error), time.monotonic() - start
            deadline = time.monotonic() + 10
            while any("sends to rank" in each.name for each in threading.enumerate()):
                assert time.monotonic() < deadline, "the thread of the sends is still there"
            return found
        return "no error", "", 0.0


@pytest.mark.parametrize(("ends", "kind"), [("closes", "PeerLostError"), ("waits", "PeerTimeoutError")])
def test_a_backlog_that_nobody_takes_ends_in_an_error_that_names_it(
    ends: str, kind: str, rank_pool: RankPool
) -> None:
    timeout = timedelta(seconds=1.5 if ends == "waits" else 20.0)
    ways = [run_threads(2, partial(_backlog, ends=ends), timeout=timeout)]
    if ends == "closes":
        ways.append(rank_pool.run(2, _backlog, ends))
    for (error, text, seconds), _ in ways:
        assert error == kind
        assert "weights of 'w' from rank 0 to rank 1, step 0" in text
        assert seconds < 10


def _early(fabric: Fabric) -> list[bool]:
    with staged(fabric) as (there, streams):
        line = Line(there.channel(1 - fabric.rank, "tied"), chunk_bytes=64)
        tensors = [values(1, 333, 4), values(2, 5), values(3, 0, 3)]
        headers = [header_of(each, f"w{i}", Phase.GRAD) for i, each in enumerate(tensors)]
        if fabric.rank == 0:
            for header, tensor in zip(headers, tensors, strict=True):
                line.send(header, tensor)
            line.flush()
            line.close()
            return []
        early = EarlyReceiver(line, headers, {header.subject: streams for header in headers})
        found = []
        for header, tensor in zip(headers, tensors, strict=True):
            message = early.take(header)
            assert message is not None
            rows = [part.clone() for _, _, part in message.chunks()]
            whole = torch.cat([each.reshape(-1) for each in rows]) if rows else tensor.reshape(-1)
            found.append(torch.equal(whole, tensor.reshape(-1)))
        line.close()
        return found


def test_early_messages_land_on_the_device(rank_pool: RankPool) -> None:
    assert run_threads(2, _early, timeout=TIMEOUT)[1] == [True] * 3
    assert rank_pool.run(2, _early)[1] == [True] * 3


# -- the exchange: the same bits as without streams

ROWS, COLUMNS = 333, 6
NAMES = ("embed.weight", "head.weight", "other.weight")


def _grads(rank: int, step: int) -> Tensor:
    return values(10 * step + rank + 1, ROWS, COLUMNS, dtype=torch.float64)


def _weights(rank: int) -> Weights:
    return Weights({NAMES[rank]: values(5, ROWS, COLUMNS), f"own{rank}.weight": values(rank, 4)})


def _dense(
    fabric: Fabric,
    *,
    kind: type[torch.optim.Optimizer] = torch.optim.SGD,
    way: str = "streamed",
    owner: str = "last",
    chunk_bytes: int = 64 * COLUMNS * 8,
    dtype: torch.dtype = torch.float64,
    **options: Any,  # noqa: ANN401 - the options of any optimizer
) -> list[Tensor]:
    """Three steps; the tied weight after each. Every rank that there is holds it."""
    rank, world = fabric.rank, fabric.world_size
    module = _weights(rank).to(dtype)
    own = assign_over(fabric, module, [NAMES[:world]], owner=owner, chunk_bytes=chunk_bytes)  # type: ignore[arg-type]
    opt = OwnerOptimizer(module.parameters(), kind, ownership=own, lr=0.1, **options)
    weight = module.get_parameter(NAMES[rank])
    found = []
    for step in range(3):
        if way == "early":
            opt.begin_exchange()
        if not (step == 1 and rank == 0):  # once a share is None
            (weight * _grads(rank, step).to(dtype)).sum().backward()
        if way == "early":
            opt.send_early({NAMES[0]})
        if way == "clipped":
            opt.clip_grad_norm_(0.5)
        if way == "finalized":
            opt.finalize_grads()
        opt.step()
        assert own.check()
        opt.zero_grad()
        found.append(weight.detach().clone())
    own.close()
    return found


def _on_device(fabric: Fabric, work: Callable[..., T], /, **options: Any) -> T:  # noqa: ANN401
    with staged(fabric) as (there, _):
        return work(there, **options)


def device_ranks(world: int, work: Callable[..., T], **options: Any) -> list[T]:  # noqa: ANN401
    return run_threads(world, lambda fabric: _on_device(fabric, work, **options), timeout=TIMEOUT)


def assert_same_bits(one: list[list[Tensor]], two: list[list[Tensor]]) -> None:
    assert len(one) == len(two)
    for mine, theirs in zip(one, two, strict=True):
        assert len(mine) == len(theirs) > 0
        for a, b in zip(mine, theirs, strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)


DENSE: list[tuple[int, dict[str, Any]]] = [
    (2, {}),
    (2, {"kind": torch.optim.AdamW, "owner": "first"}),
    (2, {"kind": torch.optim.Adam, "chunk_bytes": 1}),
    (2, {"kind": torch.optim.AdamW, "chunk_bytes": 10**9}),
    (3, {"kind": torch.optim.AdamW}),
    (2, {"kind": torch.optim.Adafactor}),
    (2, {"way": "early", "kind": torch.optim.AdamW}),
    (3, {"way": "early", "owner": "first"}),
    (2, {"way": "clipped"}),
    (3, {"way": "finalized", "kind": torch.optim.AdamW}),
    (2, {"dtype": torch.bfloat16, "master_dtype": torch.float32, "grad_dtype": torch.float32}),
]


def _name(case: object) -> str:
    if isinstance(case, dict):
        return "-".join(getattr(value, "__name__", str(value)) for value in case.values()) or "plain"
    return str(case)


@pytest.mark.parametrize(("world", "options"), DENSE, ids=_name)
def test_dense_steps_have_the_bits_of_the_direct_way(world: int, options: dict[str, Any]) -> None:
    direct = run_threads(world, partial(_dense, **options), timeout=TIMEOUT)
    there = device_ranks(world, _dense, **options)
    assert_same_bits(there, direct)


def _mixed(fabric: Fabric, /, **options: Any) -> list[Tensor]:  # noqa: ANN401
    return _on_device(fabric, _dense, **options) if fabric.rank == 0 else _dense(fabric, **options)


@pytest.mark.parametrize("owner", ["first", "last"])
def test_one_end_may_be_on_a_device_and_the_other_not(owner: str, rank_pool: RankPool) -> None:
    direct = run_threads(2, partial(_dense, owner=owner), timeout=TIMEOUT)
    assert_same_bits(rank_pool.run(2, _mixed, owner=owner), direct)
    assert_same_bits(rank_pool.run(2, _on_device, _dense, owner=owner, way="early"), direct)


def _crossed(fabric: Fabric) -> list[Tensor]:
    """Each of two ranks owns one of two ties, and each sends the other a gradient first."""
    rank = fabric.rank
    module = Weights({f"{'ab'[i]}{rank}.weight": values(i, ROWS, COLUMNS) for i in range(2)})
    ties = [(f"{letter}0.weight", f"{letter}1.weight") for letter in "ab"]
    own = assign_over(
        fabric, module, ties, owner={"a0.weight": 0, "b0.weight": 1}, chunk_bytes=64 * COLUMNS * 8
    )
    opt = OwnerOptimizer(module.parameters(), torch.optim.AdamW, ownership=own, lr=0.1)
    for step in range(2):
        for index, parameter in enumerate(module.parameters()):
            (parameter * _grads(rank, 5 * step + index)).sum().backward()
        opt.step()
        assert own.check()
        opt.zero_grad()
    own.close()
    return [parameter.detach().clone() for parameter in module.parameters()]


def test_two_owners_that_send_each_other_more_than_there_is_room_for(rank_pool: RankPool) -> None:
    direct = run_threads(2, _crossed, timeout=TIMEOUT)
    assert_same_bits(device_ranks(2, _crossed), direct)
    assert_same_bits(rank_pool.run(2, _on_device, _crossed), direct)


class _Head(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.head = nn.Linear(COLUMNS, rows, bias=False, dtype=torch.float64)


class _Embedding(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, COLUMNS, padding_idx=3, dtype=torch.float64)


def _rows(fabric: Fabric, *, next_step: bool = False, early: bool = False) -> list[Tensor]:
    """Rank 0 looks rows up, rank 1 has the table. The table after each step, or what was looked up."""
    module: nn.Module = _Embedding(ROWS) if fabric.rank == 0 else _Head(ROWS)
    with torch.no_grad():
        next(module.parameters()).copy_(values(9, ROWS, COLUMNS))
    own = assign_over(fabric, module, [NAMES[:2]], layout="rows", chunk_bytes=64 * COLUMNS * 8)
    opt = OwnerOptimizer(module.parameters(), torch.optim.AdamW, ownership=own, lr=0.1)
    found = []
    batches = [torch.arange(0, ROWS, step + 1) for step in range(4)]
    for step, ids in enumerate(batches[:3]):
        if step == 0 or not next_step:
            opt.prefetch(ids)
        if early:
            opt.begin_exchange()
        if isinstance(module, _Embedding):
            out = module.embed(ids)
            found.append(out.detach().clone())
            (out * _grads(0, step)[: len(ids)]).sum().backward()
        else:
            assert isinstance(module, _Head)
            (module.head.weight * _grads(1, step)).sum().backward()
        if early:
            opt.send_early({NAMES[0]})
        if next_step:
            opt.prefetch(batches[step + 1], next_step=True)
        opt.step()
        opt.zero_grad()
        if fabric.rank == 1:
            assert isinstance(module, _Head)
            found.append(module.head.weight.detach().clone())
        assert own.check()
    own.close()
    return found


@pytest.mark.parametrize("options", [{}, {"next_step": True}, {"early": True}], ids=_name)
def test_rows_have_the_bits_of_the_direct_way(options: dict[str, Any], rank_pool: RankPool) -> None:
    direct = run_threads(2, partial(_rows, **options), timeout=TIMEOUT)
    assert_same_bits(device_ranks(2, _rows, **options), direct)
    assert_same_bits(rank_pool.run(2, _on_device, _rows, **options), direct)


@pytest.mark.parametrize("clip", [None, 0.1])
def test_the_executor_on_a_device(clip: float | None) -> None:
    pipeline = Pipeline(
        build=lambda stage: Mix(stage, [("a0.weight", "b1.weight", "a2.weight")[stage]]),
        placement=(0, 1, 2),
        ties=[("a0.weight", "a2.weight")],
        microbatches=4,
        optimizer=ADAM,
        chunk_bytes=1,
        clip=clip,
    )
    batches = [row_batch(4, seed) for seed in range(3)]
    dag = pipeline.dag()

    def work(fabric: Fabric) -> Trained:
        with staged(fabric) as (there, _):
            return pipeline.train(there, dag, batches, check=True)

    there = run_threads(3, work, timeout=TIMEOUT)
    for mine, theirs in zip(there, pipeline.run(batches), strict=True):
        assert mine.losses == theirs.losses
        assert_same_bits([list(w.values()) for w in mine.weights], [list(w.values()) for w in theirs.weights])


# -- every wait is needed: the check finds the one that is left out


Callsite = tuple[str, int, str]


class _Waits:
    """Counts where the transport orders streams, by file, line and method, and leaves one place out."""

    METHODS = (
        ("wait_event", _CheckedStream),
        ("synchronize", _CheckedEvent),
        ("record_stream", CheckedStreams),
    )

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: set[Callsite] = set()
        self.left_out: Callsite | None = None
        for name, kind in self.METHODS:
            monkeypatch.setattr(kind, name, self._around(name, getattr(kind, name)))

    def _around(self, name: str, inner: Callable[..., None]) -> Callable[..., None]:
        def call(*args: object) -> None:
            frame = sys._getframe(1)
            site = (Path(frame.f_code.co_filename).name, frame.f_lineno, name)
            self.found.add(site)
            if site != self.left_out:
                inner(*args)

        return call


def _scenarios() -> None:
    for way in ("streamed", "early"):
        device_ranks(2, _dense, way=way)  # SGD: AdamW reads its step counter, for which the host waits


def test_no_wait_of_the_transport_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = _Waits(monkeypatch)
    _scenarios()
    sites = sorted(waits.found)
    assert {file for file, _, _ in sites} == {"staging.py", "messages.py", "early.py"}
    assert len(sites) >= 12
    unnoticed = []
    for waits.left_out in sites:
        try:
            _scenarios()
        except StreamOrderError:
            continue
        unnoticed.append(waits.left_out)
    assert unnoticed == []


def _syncs(fabric: Fabric, *, way: str) -> list[str]:
    with staged(fabric) as (there, streams):
        module = _weights(fabric.rank)
        own = assign_over(there, module, [NAMES[:2]], chunk_bytes=64 * COLUMNS * 8)
        opt = OwnerOptimizer(module.parameters(), torch.optim.SGD, ownership=own, lr=0.1, momentum=0.9)
        streams.host_syncs.clear()
        for step in range(2):
            if way == "early":
                opt.begin_exchange()
            (module.get_parameter(NAMES[fabric.rank]) * _grads(fabric.rank, step)).sum().backward()
            if way == "early":
                opt.send_early({NAMES[0]})
            if way == "finalized":
                opt.finalize_grads()
            opt.step()
            opt.zero_grad()
        found = list(streams.host_syncs)
        own.close()
        return found


@pytest.mark.parametrize("way", ["streamed", "early", "finalized"])
def test_the_host_waits_for_no_value_of_the_device_in_a_step(way: str) -> None:
    assert run_threads(2, partial(_syncs, way=way), timeout=TIMEOUT) == [[], []]
