"""The contract of a transport, for every transport: in-memory, gloo between processes, and a view."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Concatenate, TypeVar, cast

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ranks import RankFailures, RankPool

from piper_owner.errors import (
    ExchangeError,
    InputError,
    MessageMismatchError,
    PeerTimeoutError,
    TieError,
)
from piper_owner.executor.local import run_threads
from piper_owner.transport import (
    BytesSent,
    Channel,
    Fabric,
    FabricView,
    Failure,
    GlooFabric,
    Header,
    Line,
    Phase,
    Work,
)
from piper_owner.transport.wire import HEADER_BYTES, row_ranges, rows_per_chunk

T = TypeVar("T")

PATIENT = 20.0  # no test waits this long: what is to fail at once fails in less than half of it
SHORT = 0.6  # for waits that are meant to run out


class Ranks:
    """Runs a function on N ranks of one transport."""

    def __init__(self, pool: RankPool | None, *, is_view: bool = False) -> None:
        self._pool = pool
        self._is_view = is_view

    def run(
        self,
        world_size: int,
        work: Callable[Concatenate[Fabric, ...], T],
        *args: object,
        wait: float = PATIENT,
    ) -> list[T]:
        """The results by rank; `wait` is the fabric's timeout in seconds."""
        timeout = timedelta(seconds=wait)
        if self._is_view:  # of a job that has one rank more, which does nothing
            ranks = tuple(range(world_size))

            def seen(fabric: Fabric) -> T | None:
                return work(FabricView(fabric, ranks), *args) if fabric.rank in ranks else None

            found = run_threads(world_size + 1, seen, timeout=timeout)
            return cast("list[T]", found[:world_size])
        if self._pool is None:
            return run_threads(world_size, lambda fabric: work(fabric, *args), timeout=timeout)
        return self._pool.run_within(world_size, work, args, timeout=timeout)

    def survivors(
        self,
        world_size: int,
        work: Callable[Concatenate[Fabric, ...], T | None],
        *args: object,
        wait: float = PATIENT,
    ) -> dict[int, T]:
        """The results of the ranks that did not end by `leave`."""
        try:
            results: dict[int, T | None] = dict(enumerate(self.run(world_size, work, *args, wait=wait)))
        except RankFailures as failures:
            if {failure.kind for failure in failures.failures.values()} != {"ProcessDied"}:
                raise
            results = failures.results
        return {rank: result for rank, result in results.items() if result is not None}


@pytest.fixture(params=["memory", "gloo", "view"])
def ranks(request: pytest.FixtureRequest) -> Ranks:
    pool = request.getfixturevalue("rank_pool") if request.param == "gloo" else None
    return Ranks(pool, is_view=request.param == "view")


def leave(fabric: Fabric, *ends: Channel | Any) -> None:  # noqa: ANN401 - channels and groups
    """Die as a rank does: the process ends or, when it is a thread, its ends are closed."""
    if isinstance(fabric, GlooFabric):
        os._exit(3)
    for end in ends:
        end.close()


def failing(wait: Callable[[], object]) -> tuple[str, str, float]:
    """(type, text, seconds) of the exchange error of `wait`."""
    start = time.monotonic()
    try:
        wait()
    except ExchangeError as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "no error", "", time.monotonic() - start


def signal(channel: Channel) -> Work:
    return channel.post_send(torch.zeros(1))


def await_signal(channel: Channel) -> None:
    channel.post_recv(torch.zeros(1)).wait()


def weight_header(tensor: torch.Tensor, subject: str = "embed.weight", step: int = 7) -> Header:
    return Header(
        phase=Phase.WEIGHT, subject=subject, step=step, dtype=tensor.dtype, shape=tuple(tensor.shape)
    )


# -- channels


def _many_both_ways(fabric: Fabric) -> list[list[float]]:
    channel = fabric.channel(1 - fabric.rank, "pair")
    base = 1000.0 * fabric.rank
    sizes = [1 + 37 * i % 501 for i in range(60)]
    buffers = [torch.empty(size) for size in sizes]
    works = []
    for i, size in enumerate(sizes):
        works.append(channel.post_send(torch.full((size,), base + i)))
        works.append(channel.post_recv(buffers[i]))
    for work in reversed(works):  # the order of the waits is the caller's
        work.wait()
    return [[float(buffer[0]), float(buffer[-1])] for buffer in buffers]


def test_messages_of_a_direction_arrive_in_the_order_they_were_posted(ranks: Ranks) -> None:
    zero, one = ranks.run(2, _many_both_ways)
    assert zero == [[1000.0 + i, 1000.0 + i] for i in range(60)]
    assert one == [[0.0 + i, 0.0 + i] for i in range(60)]


def _post_first(fabric: Fabric) -> float:
    large, other = fabric.channel(1 - fabric.rank, "large"), fabric.channel(1 - fabric.rank, "other")
    got = torch.zeros(2_000_000)
    if fabric.rank == 1:
        await_signal(other)  # until both of rank 0's posts have returned
    works = [large.post_send(torch.full((2_000_000,), 1.0 + fabric.rank)), large.post_recv(got)]
    if fabric.rank == 0:
        signal(other).wait()
    for work in works:
        work.wait()
        work.wait()
    return float(got.sum())


def test_posts_do_not_block_channels_are_apart_and_waiting_twice_is_waiting_once(ranks: Ranks) -> None:
    assert ranks.run(2, _post_first) == [4_000_000.0, 2_000_000.0]


def _reopen(fabric: Fabric) -> list[float]:
    got = []
    for i in range(3):
        if i and fabric.rank == i % 2:
            threading.Event().wait(0.3)  # the other end is then opened while this one's old address stands
        channel = fabric.channel(1 - fabric.rank, "again")
        buffer = torch.zeros(3)
        receive = channel.post_recv(buffer)
        channel.post_send(torch.full((3,), float(10 * fabric.rank + i))).wait()
        receive.wait()
        channel.close()
        channel.close()
        got.append(float(buffer[2]))
    return got


def test_a_purpose_can_be_opened_again_after_it_was_closed(ranks: Ranks) -> None:
    assert ranks.run(2, _reopen) == [[10.0, 11.0, 12.0], [0.0, 1.0, 2.0]]


def _only_zero_and_three(fabric: Fabric) -> float:
    if fabric.rank in (1, 2):
        return -1.0
    channel = fabric.channel(3 - fabric.rank, "tied")
    buffer = torch.zeros(5)
    works = [channel.post_send(torch.full((5,), 1.0 + fabric.rank)), channel.post_recv(buffer)]
    for work in works:
        work.wait()
    return float(buffer.sum())


def test_a_pair_works_while_the_other_ranks_take_no_part(ranks: Ranks) -> None:
    assert ranks.run(4, _only_zero_and_three) == [20.0, -1.0, -1.0, 5.0]


def _overlapping(fabric: Fabric) -> dict[int, float]:
    pairs = [(0, 1), (0, 3), (1, 3)]
    peers = [low + high - fabric.rank for low, high in pairs if fabric.rank in (low, high)]
    channels = {peer: fabric.channel(peer, "tied") for peer in peers}
    buffers = {peer: torch.zeros(1000) for peer in peers}
    works = [channels[peer].post_recv(buffers[peer]) for peer in peers]
    works += [channels[peer].post_send(torch.full((1000,), 10.0 * fabric.rank + peer)) for peer in peers]
    for work in works:
        work.wait()
    return {peer: float(buffer[999]) for peer, buffer in buffers.items()}


def test_pairs_that_share_ranks_do_not_disturb_each_other(ranks: Ranks) -> None:
    assert ranks.run(4, _overlapping) == [{1: 10.0, 3: 30.0}, {0: 1.0, 3: 31.0}, {}, {0: 3.0, 1: 13.0}]


@pytest.mark.parametrize("late", [0, 1])
def test_a_late_rank_is_waited_for(ranks: Ranks, late: int) -> None:
    assert ranks.run(2, _come_late, late) == [2.0, 1.0]


def _come_late(fabric: Fabric, late: int) -> float:
    if fabric.rank == late:
        threading.Event().wait(1.0)
    channel = fabric.channel(1 - fabric.rank, "pair")
    buffer = torch.zeros(1)
    works = [channel.post_send(torch.ones(1) + fabric.rank), channel.post_recv(buffer)]
    for work in works:
        work.wait()
    return float(buffer)


# -- waits that fail


def _alone(fabric: Fabric, first: int) -> tuple[str, str, float] | None:
    if fabric.rank != first:
        return None

    def use() -> None:
        channel = fabric.channel(1 - fabric.rank, "weights")
        channel.post_recv(torch.zeros(1)).wait()

    return failing(use)


@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_that_never_opens_its_end_is_an_error_within_the_timeout(ranks: Ranks, first: int) -> None:
    (result,) = ranks.survivors(2, _alone, first, wait=SHORT).values()
    kind, text, seconds = result
    assert kind == "PeerTimeoutError"
    assert f"rank {first}" in text
    assert f"rank {1 - first}" in text
    assert f"{SHORT:g} s" in text
    assert SHORT * 0.5 < seconds < SHORT + 3


def _unanswered(fabric: Fabric, what: str) -> tuple[str, str, float]:
    channel, other = fabric.channel(1 - fabric.rank, "pair"), fabric.channel(1 - fabric.rank, "other")
    if fabric.rank == 1:
        # This wait is for a message that does not come either, but its end is closed first.
        return failing(lambda: await_signal(channel) if what == "recv" else hold(other))
    post = channel.post_recv if what == "recv" else channel.post_send
    work = post(torch.zeros(4))
    channel.timeout = fabric.timeout
    result = failing(work.wait)
    work.wait()  # a second wait neither raises nor hangs
    if what == "send":
        other.close()
    return result


def hold(channel: Channel) -> None:
    """Wait until the peer closes."""
    channel.timeout = timedelta(seconds=PATIENT)
    channel.post_recv(torch.zeros(4)).wait()


@pytest.mark.parametrize("what", ["send", "recv"])
def test_a_wait_that_runs_out_of_time_names_ranks_and_seconds(ranks: Ranks, what: str) -> None:
    zero, one = ranks.run(2, _unanswered, what, wait=SHORT)
    # With two receives either rank may be the first whose time is up; the other then has lost it.
    timed_out = zero if zero[0] == "PeerTimeoutError" else one
    assert timed_out[0] == "PeerTimeoutError"
    assert f"waited {SHORT:g} s for rank" in timed_out[1]
    assert "rank 0" in timed_out[1]
    assert "rank 1" in timed_out[1]
    assert timed_out[2] < SHORT + 3
    assert {zero[0], one[0]} <= {"PeerTimeoutError", "PeerLostError"}


def _impatient_peer(fabric: Fabric) -> list[tuple[str, str, float]]:
    channel = fabric.channel(1 - fabric.rank, "pair")
    if fabric.rank == 1:
        return [failing(lambda: await_signal(channel))]
    if isinstance(fabric, GlooFabric):
        channel.timeout = timedelta(seconds=SHORT)
    first = failing(lambda: await_signal(channel))
    return [
        first,
        failing(lambda: channel.post_recv(torch.zeros(4)).wait()),
        failing(lambda: signal(channel)),
    ]


def test_a_wait_that_fails_ends_the_line_for_both(rank_pool: RankPool) -> None:
    # Two timeouts need two processes.
    zero, one = Ranks(rank_pool).run(2, _impatient_peer)
    assert [kind for kind, _, _ in zero] == ["PeerTimeoutError", "PeerLostError", "PeerLostError"]
    assert one[0][0] == "PeerLostError"
    assert one[0][2] < PATIENT / 2


def _closed_with_work_pending(fabric: Fabric) -> list[tuple[str, str, float]]:
    channel, other = fabric.channel(1 - fabric.rank, "pair"), fabric.channel(1 - fabric.rank, "other")
    if fabric.rank == 0:
        pending = [channel.post_recv(torch.zeros(4)), channel.post_recv(torch.zeros(4))]
        channel.close()
        result = [failing(work.wait) for work in pending]
        result += [failing(lambda: signal(channel)), failing(lambda: channel.post_recv(torch.zeros(1)))]
        await_signal(other)  # holds on to the works until rank 1 has failed
        return result
    result = [failing(lambda: await_signal(channel))]
    signal(other).wait()
    return result


def test_closing_with_work_pending_fails_both_ends_at_once(ranks: Ranks) -> None:
    zero, one = ranks.run(2, _closed_with_work_pending)
    assert [kind for kind, _, _ in [*zero, *one]] == ["PeerLostError"] * 5
    assert all(seconds < PATIENT / 2 for _, _, seconds in [*zero, *one])
    assert all("rank 0 lost rank 1" in text for _, text, _ in zero)
    assert "rank 1 lost rank 0" in one[0][1]


def _peer_dies(fabric: Fabric, what: str, reports: bool) -> tuple[str, str, float] | None:
    channel, other = fabric.channel(1 - fabric.rank, "tied"), fabric.channel(1 - fabric.rank, "other")
    if fabric.rank == 1:
        await_signal(other)
        if reports:
            fabric.board.report(Failure(rank=1, where="1B3 of step 7", error="ValueError: lr is NaN"))
        leave(fabric, channel, other)
        return None
    line = Line(channel, chunk_bytes=64)
    tensor = torch.zeros(1000)
    header = weight_header(tensor)
    if what == "send":
        line.send(header, tensor)
    signal(other).wait()
    return failing(line.flush if what == "send" else lambda: line.receive(header))


@pytest.mark.parametrize(
    ("what", "reports"),
    [
        ("send", True),
        ("recv", False),
        pytest.param("send", False, marks=pytest.mark.slow),
        pytest.param("recv", True, marks=pytest.mark.slow),
    ],
)
def test_a_peer_that_dies_is_an_error_at_once(ranks: Ranks, what: str, reports: bool) -> None:
    kind, text, seconds = ranks.survivors(2, _peer_dies, what, reports)[0]
    assert kind == "PeerLostError"
    assert seconds < PATIENT / 2
    direction = "from rank 0 to rank 1" if what == "send" else "from rank 1 to rank 0"
    assert text.startswith(f"weights of 'embed.weight' {direction}, step 7: rank 0 lost rank 1 (")
    cause = "rank 1 failed first, at 1B3 of step 7: ValueError: lr is NaN"
    assert text.endswith(cause if reports else "; rank 1 has reported nothing")


def _third_rank(fabric: Fabric) -> tuple[str, str, float] | None:
    """0 waits for 1, 2 waits for 0; 1 dies."""
    if fabric.rank == 1:
        channel = fabric.channel(0, "pair")
        fabric.board.report(Failure(rank=1, where="1F0 of step 0", error="MemoryError: no more"))
        fabric.board.report(Failure(rank=1, where="the end", error="a second report"))
        leave(fabric, channel)
        return None
    if fabric.rank == 2:
        to_zero = fabric.channel(0, "pair")
        return failing(lambda: await_signal(to_zero))
    to_one, to_two = fabric.channel(1, "pair"), fabric.channel(2, "pair")
    result = failing(lambda: await_signal(to_one))
    to_two.close()
    return result


def test_a_third_rank_names_the_cause_too(ranks: Ranks) -> None:
    results = ranks.survivors(3, _third_rank)
    assert sorted(results) == [0, 2]
    for rank, peer in ((0, 1), (2, 0)):
        kind, text, seconds = results[rank]
        assert kind == "PeerLostError"
        assert f"rank {rank} lost rank {peer}" in text
        assert text.endswith("; rank 1 failed first, at 1F0 of step 0: MemoryError: no more")
        assert seconds < PATIENT / 2


_HELD: list[Channel] = []
"""The ends of a rank that has stopped: nobody closes them."""


def _in_a_row(fabric: Fabric) -> tuple[str, str, float] | None:
    """3 waits for 2, which waits for 1, which waits a short time for 0, which does nothing."""
    below = fabric.channel(fabric.rank - 1, "pair") if fabric.rank > 0 else None
    above = fabric.channel(fabric.rank + 1, "pair") if fabric.rank < 3 else None
    if below is None:
        assert above is not None
        _HELD.append(above)
        return None
    if fabric.rank == 1:
        below.timeout = timedelta(seconds=SHORT)
    result = failing(lambda: await_signal(below))
    if above is not None:
        above.close()
    return result


def test_ranks_that_wait_in_a_row_name_the_last_one(ranks: Ranks) -> None:
    results = ranks.survivors(4, _in_a_row)
    assert sorted(results) == [1, 2, 3]
    for kind, text, seconds in results.values():
        assert kind in ("PeerTimeoutError", "PeerLostError")
        assert text.endswith("; rank 0 has reported nothing"), text
        assert seconds < PATIENT / 2
    assert "; rank 2 waited for rank 1; rank 1 waited for rank 0; " in results[3][1]


def _opens_too_late(fabric: Fabric) -> tuple[str, str, float] | None:
    other = fabric.channel(1 - fabric.rank, "other")
    if fabric.rank == 1:
        fabric.board.report(Failure(rank=1, where="start-up", error="TieError: shapes differ"))
        signal(other).wait()
        return None
    await_signal(other)
    return failing(lambda: fabric.channel(1, "tied").post_recv(torch.zeros(1)).wait())


def test_an_end_that_is_never_opened_names_the_cause(ranks: Ranks) -> None:
    kind, text, _ = ranks.survivors(2, _opens_too_late, wait=SHORT)[0]
    assert kind == "PeerTimeoutError"
    assert text.endswith("; rank 1 failed first, at start-up: TieError: shapes differ")


# -- groups


def _reduce(fabric: Fabric) -> list[bytes]:
    ranks = tuple(range(fabric.world_size))
    group = fabric.group(ranks, "sum")
    alone = fabric.group((fabric.rank,), "alone")
    assert group.ranks == ranks
    results = []
    for dtype in (torch.float32, torch.float64, torch.int64):
        for size in (0, 1, 7, 5000):
            generator = torch.Generator().manual_seed(100 * size + fabric.rank)
            tensor = (torch.randn(size, generator=generator, dtype=torch.float64) * 100).to(dtype)
            before = tensor.clone()
            alone.all_reduce(tensor)
            assert torch.equal(tensor, before)
            group.all_reduce(tensor)
            results.append(tensor.numpy().tobytes())
    group.close()
    group.close()
    assert failing(lambda: group.all_reduce(torch.ones(1)))[0] == "PeerLostError"
    return results


def test_all_reduce_sums_to_the_same_bits_on_every_rank(ranks: Ranks) -> None:
    first, *rest = ranks.run(3, _reduce)
    assert all(other == first for other in rest)
    randoms = [torch.Generator().manual_seed(500_000 + rank) for rank in range(3)]
    total = sum(torch.randn(5000, generator=g, dtype=torch.float64) * 100 for g in randoms)
    assert isinstance(total, torch.Tensor)
    got = torch.frombuffer(bytearray(first[7]), dtype=torch.float64)
    torch.testing.assert_close(got, total, rtol=0, atol=1e-11)
    assert len(first[11]) == 5000 * 8


def _reduce_and_broadcast(fabric: Fabric) -> list[tuple[list[float], list[float]]]:
    group = fabric.group(tuple(range(fabric.world_size)), "roots")
    results = []
    for root in group.ranks:
        summed = torch.full((3,), 2.0**fabric.rank, dtype=torch.float64)
        group.reduce(summed, root)
        given = torch.tensor([-0.0, float(fabric.rank)], dtype=torch.float64)
        group.broadcast(given, root)
        results.append(
            (summed.tolist() if fabric.rank == root else [], [*given.tolist(), given[0].signbit().item()])
        )
    group.close()
    assert failing(lambda: group.reduce(torch.ones(1), 0))[0] == "PeerLostError"
    assert failing(lambda: group.broadcast(torch.ones(1), 0))[0] == "PeerLostError"
    return results


@pytest.mark.parametrize("size", [1, 2, 3])
def test_reduce_and_broadcast_to_and_from_any_rank(ranks: Ranks, size: int) -> None:
    for rank, found in enumerate(ranks.run(size, _reduce_and_broadcast)):
        for root, (summed, received) in enumerate(found):
            assert summed == ([2.0**size - 1] * 3 if rank == root else [])
            assert received == [-0.0, float(root), True]


def _reduce_and_die(fabric: Fabric, dying: int) -> tuple[str, str, float] | None:
    group = fabric.group((0, 1, 2), "norm")
    group.all_reduce(torch.ones(3))
    if fabric.rank == dying:
        fabric.board.report(Failure(rank=dying, where="CLIP", error="KeyboardInterrupt: "))
        leave(fabric, group)
        return None
    return failing(lambda: group.all_reduce(torch.ones(3)))


@pytest.mark.parametrize(
    "dying", [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(2, marks=pytest.mark.slow)]
)
def test_a_member_that_dies_fails_all_reduce_on_every_other_at_once(ranks: Ranks, dying: int) -> None:
    results = ranks.survivors(3, _reduce_and_die, dying)
    assert sorted(results) == sorted({0, 1, 2} - {dying})
    for rank, (kind, text, seconds) in results.items():
        assert kind == "PeerLostError", text
        assert f"rank {rank} lost ranks {', '.join(str(r) for r in range(3) if r != rank)}" in text
        assert text.endswith(f"rank {dying} failed first, at CLIP: KeyboardInterrupt: ")
        assert seconds < PATIENT / 2


def _reduce_alone(fabric: Fabric) -> tuple[str, str, float] | None:
    group = fabric.group((0, 1), "sum")
    other = fabric.channel(1 - fabric.rank, "other")
    if fabric.rank == 1:
        failing(lambda: hold(other))  # stays, so that rank 0 does not lose it
        return None
    result = failing(lambda: group.all_reduce(torch.ones(1)))
    other.close()
    return result


def test_all_reduce_that_runs_out_of_time_names_ranks_and_seconds(rank_pool: RankPool, ranks: Ranks) -> None:
    kind, text, seconds = ranks.survivors(2, _reduce_alone, wait=SHORT)[0]
    assert kind in ("PeerTimeoutError", "PeerLostError")
    assert "rank 0" in text
    assert "for rank 1, which" in text or "lost rank 1 (" in text
    assert seconds < SHORT + 3


# -- messages


def _tensors() -> list[torch.Tensor]:
    """Every kind of tensor that a message may carry."""
    base = torch.arange(7 * 6, dtype=torch.float32).reshape(7, 6)
    random = torch.Generator().manual_seed(1)
    special = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-45])
    return [
        torch.tensor(3.5),
        torch.tensor(7),
        torch.tensor([True, False, True]),
        special,
        special.to(torch.bfloat16),
        special.to(torch.float16),
        torch.arange(1000, dtype=torch.float64),
        base.t(),
        base[::2, 1::3],
        base[3:3],
        torch.zeros(0),
        torch.zeros(0, 5),
        torch.zeros(5, 0),
        torch.zeros(2, 0, 3),
        torch.arange(2**8).reshape((2,) * 8).to(torch.int16),
        torch.randn(3, 5, 7, generator=random),
        torch.randn(1, 4000, generator=random),
        torch.randn(4000, 1, generator=random),
        torch.randint(-128, 127, (33, 65), generator=random).to(torch.int8),
        torch.nn.Parameter(base.clone()),
        base.expand(3, 7, 6),
    ]


def _subjects() -> list[str]:
    return ["embed.weight", "", "x" * 2000, "\u00fcber.gewicht.\u91cd\u307f", "\u91cd" * 500, "a" * 70_000]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _round_trip(fabric: Fabric, chunk_bytes: int) -> list[str]:
    line = Line(fabric.channel(1 - fabric.rank, "tied"), chunk_bytes=chunk_bytes)
    wrong = []
    for number, tensor in enumerate(_tensors()):
        header = weight_header(tensor, step=number)
        if fabric.rank == 0:
            line.send(header, tensor)
            line.send(header, None)
            line.send(header, tensor, copy=True)
            continue
        got = line.receive(header).tensor()
        nothing = line.receive(header)
        again = line.receive(replace(header, dtype=torch.float32, shape=()), any_tensor=True)
        parts = [rows.clone() for _, _, rows in again.chunks()]
        joined = torch.cat(parts).reshape(tensor.shape) if parts else torch.empty_like(tensor)
        for value in (got, joined):
            if value is None or value.dtype != tensor.dtype or value.shape != tensor.shape:
                wrong.append(f"{number}: {value}")
            elif bits(value) != bits(tensor):
                wrong.append(f"{number}: {value} for {tensor}")
        if nothing.present or nothing.tensor() is not None or list(nothing.chunks()):
            wrong.append(f"{number}: something for nothing")
    line.flush()
    for number, subject in enumerate(_subjects()):
        header = weight_header(torch.ones(2), subject=subject, step=number)
        if fabric.rank == 0:
            line.send(header, torch.ones(2))
        else:
            got = line.receive(header).tensor()
            if got is None or not torch.equal(got, torch.ones(2)):
                wrong.append(subject)
    line.flush()
    line.close()
    return wrong


@pytest.mark.parametrize("chunk_bytes", [1, 1000, 10**9])
def test_every_kind_of_tensor_and_name_arrives_as_it_was_sent(ranks: Ranks, chunk_bytes: int) -> None:
    assert ranks.run(2, _round_trip, chunk_bytes) == [[], []]


_EXPECTED = Header(phase=Phase.GRAD, subject="embed.weight", step=7, dtype=torch.float32, shape=(2, 3))
_UNLIKE: dict[str, Header] = {
    "dtype is bfloat16, expected float32": replace(_EXPECTED, dtype=torch.bfloat16),
    "shape is (3, 2), expected (2, 3)": replace(_EXPECTED, shape=(3, 2)),
    "shape is (5, 3), expected (2, 3)": replace(_EXPECTED, shape=(5, 3)),
    "shape is (6,), expected (2, 3)": replace(_EXPECTED, shape=(6,)),
    "step is 8, expected 7": replace(_EXPECTED, step=8),
    "subject is 'norm.weight', expected 'embed.weight'": replace(_EXPECTED, subject="norm.weight"),
    "phase is weights, expected gradient": replace(_EXPECTED, phase=Phase.WEIGHT),
    "microbatch is 1, expected 0": replace(_EXPECTED, microbatch=1),
}


def _unlike(fabric: Fabric) -> list[tuple[str, str, float]]:
    results, lines = [], []
    for number, header in enumerate(_UNLIKE.values()):
        line = Line(fabric.channel(1 - fabric.rank, f"tied{number}"), chunk_bytes=1000)
        lines.append(line)
        if fabric.rank == 0:
            line.send(header, torch.ones(header.shape, dtype=header.dtype))
            results.append(failing(line.flush))
        else:
            results.append(failing(lambda line=line: line.receive(_EXPECTED)))  # type: ignore[misc]
    for line in lines:  # not before: receiving the wrong message has to close the line by itself
        line.close()
    return results


def test_a_message_unlike_the_expected_one_is_an_error_on_both_sides(ranks: Ranks) -> None:
    senders, receivers = ranks.run(2, _unlike)
    for (what, header), sender, receiver in zip(_UNLIKE.items(), senders, receivers, strict=True):
        assert receiver[0] == "MessageMismatchError"
        assert receiver[1].startswith("gradient of 'embed.weight' from rank 0 to rank 1, step 7: ")
        assert what in receiver[1]
        assert sender[0] == "PeerLostError"
        where = f"{header.phase.value} of {header.subject!r} from rank 0 to rank 1, step {header.step}"
        assert sender[1].startswith(f"{where}: rank 0 lost rank 1")
        assert max(sender[2], receiver[2]) < PATIENT / 2


def test_what_no_message_can_carry_is_refused_with_advice() -> None:
    with pytest.raises(TieError, match=r"weights of 'embed.weight' cannot be sent.*complex64.*Convert it"):
        weight_header(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(TieError, match=r"9 dimensions, a message at most 8. Flatten"):
        weight_header(torch.zeros((1,) * 9))
    with pytest.raises(InputError, match=r"activation of 'stage 1' cannot be sent.*complex128"):
        Header(phase=Phase.ACTIVATION, subject="stage 1", step=0, dtype=torch.complex128, shape=(1,))


def _sends_what_it_did_not_announce(fabric: Fabric) -> list[str]:
    line = Line(fabric.channel(1 - fabric.rank, "tied"), chunk_bytes=1000)
    header = weight_header(torch.zeros(2, 3))
    if fabric.rank == 1:
        got = line.receive(header).tensor()
        assert got is not None
        return [str(float(got.sum()))]
    wrong = [torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.float64), torch.zeros(6)]
    texts = []
    for tensor in wrong:
        with pytest.raises(MessageMismatchError) as info:
            line.send(header, tensor)
        texts.append(str(info.value))
    line.send(header, torch.ones(2, 3))  # nothing of the others was sent
    line.flush()
    return texts


def test_a_tensor_unlike_its_header_is_refused_before_anything_is_sent(ranks: Ranks) -> None:
    texts, (received,) = ranks.run(2, _sends_what_it_did_not_announce)
    assert received == "6.0"
    assert "step 7: the tensor to send has dtype float32 and shape (3, 2)" in texts[0]
    assert "the message was to have dtype float32 and shape (2, 3)" in texts[1]


def _write_after_send(fabric: Fabric) -> list[float]:
    line, other = (
        Line(fabric.channel(1 - fabric.rank, name), chunk_bytes=4096) for name in ("tied", "other")
    )
    values = [torch.ones(100, 50), torch.ones(50, 100).t(), torch.ones(())]
    headers = [weight_header(value) for value in values]
    go = weight_header(torch.ones(1), subject="go")
    if fabric.rank == 0:
        for header, value in zip(headers, values, strict=True):
            line.send(header, value, copy=True)
            value.fill_(9.0)
        other.send(go, torch.ones(1))  # only now does rank 1 look for them
        other.flush()
        line.flush()
        line.send(headers[0], torch.ones(100, 50))
        kept = torch.full((100, 50), 2.0)
        line.send(headers[0], kept)
        line.flush()
        kept.fill_(9.0)  # after a flush it is the sender's again
        other.send(go, torch.ones(1))
        other.flush()
        return []
    other.receive(go).tensor()
    got = [line.receive(header).tensor() for header in [*headers, headers[0], headers[0]]]
    other.receive(go).tensor()
    return [float(value.double().mean()) for value in got if value is not None]


def test_a_sender_may_write_after_a_copy_and_after_a_flush(ranks: Ranks) -> None:
    assert ranks.run(2, _write_after_send)[1] == [1.0, 1.0, 1.0, 1.0, 2.0]


def _stage(fabric: Fabric) -> list[Any]:
    line = Line(fabric.channel(1 - fabric.rank, "tied"), chunk_bytes=64 * 4 * 10)
    tensor = torch.arange(64.0 * 45).reshape(45, 64)
    header = weight_header(tensor)
    if fabric.rank == 0:
        line.send(header, tensor)
        out = line.open(header)
        for start, stop in out.header.ranges():
            out.put(tensor[start:stop])
        line.flush()
        return [line.staging_bytes]
    kept: list[torch.Tensor] = []
    facts: list[Any] = []
    for start, stop, rows in line.receive(header).chunks():
        if not torch.equal(rows, tensor[start:stop]):
            facts.append(("wrong rows", start))
        rows.neg_()  # it is the receiver's to write to
        kept.append(rows)
        facts.append((start, stop, tuple(rows.shape)))
    facts.append(len({rows.data_ptr() for rows in kept}))
    facts.append(line.staging_bytes)
    again = [stop for _, stop, _ in line.receive(header).chunks()]
    facts.append((again, line.staging_bytes))
    line.close()
    facts.append(line.staging_bytes)
    return facts


def test_chunks_stream_through_two_buffers(ranks: Ranks) -> None:
    sender, facts = ranks.run(2, _stage)
    assert sender == [0]
    size = 2 * 10 * 64 * 4
    spans = [(start, min(45, start + 10), (min(10, 45 - start), 64)) for start in range(0, 45, 10)]
    assert facts == [*spans, 2, size, ([10, 20, 30, 40, 45], size), 0]


def _count(fabric: Fabric) -> tuple[BytesSent, int, BytesSent]:
    line = Line(fabric.channel(1 - fabric.rank, "tied"), chunk_bytes=256)
    tensor = torch.zeros(130, 3)
    for phase in Phase:
        header = replace(weight_header(tensor), phase=phase)
        if fabric.rank == 0:
            line.send(header, tensor)
            line.send(header, None)
        else:
            line.receive(header).tensor()
            line.receive(header)
    line.flush()
    return line.sent, line.messages, line.received


def test_bytes_are_counted_by_kind_on_both_sides(ranks: Ranks) -> None:
    (sent, messages, rest), received = ranks.run(2, _count)
    size, headers = 130 * 3 * 4, 2 * len(Phase) * HEADER_BYTES
    assert sent == BytesSent(
        ids=3 * size, rows=size, grads=size, weights=size, other=(len(Phase) - 6) * size + headers
    )
    assert sent.total == len(Phase) * size + headers == sum(sent.to_dict().values())
    assert messages == 2 * len(Phase)
    assert rest == BytesSent()
    assert received == (BytesSent(), 0, sent)


def _default_dtype(fabric: Fabric) -> list[str]:
    line = Line(fabric.channel(1 - fabric.rank, "tied"), chunk_bytes=100)
    tensor = torch.ones(100, dtype=torch.float32)
    header = weight_header(tensor)
    if fabric.rank == 0:
        line.send(header, tensor)
        line.send(header, tensor)
        line.flush()
        return []
    whole = line.receive(header).tensor()
    assert whole is not None
    return [str(whole.dtype), *sorted({str(rows.dtype) for _, _, rows in line.receive(header).chunks()})]


def test_buffers_have_the_dtype_of_the_parameter_not_the_default_one(ranks: Ranks) -> None:
    assert ranks.run(2, _with_float64_default, _default_dtype)[1] == ["torch.float32"] * 2


def _with_float64_default(fabric: Fabric, work: Callable[[Fabric], list[str]]) -> list[str]:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # of all threads
    try:
        return work(fabric)
    finally:
        torch.set_default_dtype(torch.float32 if default is torch.float64 else default)


# -- nothing is left behind


def _usage() -> dict[str, int]:
    gc.collect()
    status = Path("/proc/self/status").read_text()
    return {
        "threads": int(status.split("Threads:")[1].split()[0]),
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "kilobytes": int(status.split("VmRSS:")[1].split()[0]),
        "objects": len(gc.get_objects()),
    }


def _open_and_close(fabric: Fabric, cycles: int, messages: int) -> dict[str, int]:
    tensor = torch.zeros(50, 64)
    header = weight_header(tensor)

    def cycle(number: int) -> None:
        line = Line(fabric.channel(1 - fabric.rank, "tied"), chunk_bytes=64 * 4 * 10)
        for _ in range(messages):
            if (number + fabric.rank) % 2:
                line.send(header, tensor)
                line.flush()
            else:
                line.receive(header).tensor()
        line.close()

    group = fabric.group((0, 1), "turn")
    for number in range(10):
        cycle(number)
    group.all_reduce(torch.ones(1))
    before = _usage()
    for number in range(cycles):
        cycle(number)
    group.all_reduce(torch.ones(1))
    after = _usage()
    group.all_reduce(torch.ones(1))
    return {what: after[what] - before[what] for what in before}


@pytest.mark.parametrize(("cycles", "messages"), [(40, 25), pytest.param(200, 5, marks=pytest.mark.slow)])
def test_opening_and_closing_leaves_nothing_behind(ranks: Ranks, cycles: int, messages: int) -> None:
    for growth in ranks.run(2, _open_and_close, cycles, messages):
        assert abs(growth["threads"]) <= 1, growth
        assert abs(growth["files"]) <= 2, growth
        assert growth["kilobytes"] < 8192, growth
        assert growth["objects"] < 12 * cycles, growth  # other tests' threads share this process


# -- the header and its chunks


def _names() -> st.SearchStrategy[str]:
    return st.text(max_size=40) | st.text(min_size=300, max_size=600)


@st.composite
def headers(draw: st.DrawFn) -> Header:
    return Header(
        phase=draw(st.sampled_from(Phase)),
        subject=draw(_names()),
        step=draw(st.integers(0, 2**63 - 1)),
        dtype=draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool])),
        shape=tuple(draw(st.lists(st.integers(0, 2**40), max_size=8))),
        microbatch=draw(st.integers(0, 2**40)),
        chunk_rows=draw(st.integers(1, 2**40)),
        present=draw(st.booleans()),
    )


@settings(max_examples=200, deadline=None)
@given(headers())
def test_a_header_arrives_as_it_was_sent(header: Header) -> None:
    raw = header.encode()
    assert raw.shape == (HEADER_BYTES,)
    got = Header.decode(raw, "here")
    got.check(header, "here")
    assert replace(got, subject=header.subject) == header
    assert header.subject.startswith(got.subject[:50]) or "\ufffd" in got.subject


@settings(max_examples=200, deadline=None)
@given(headers(), st.integers(0, HEADER_BYTES - 1), st.integers(1, 255))
def test_a_damaged_header_is_detected(header: Header, place: int, change: int) -> None:
    raw = header.encode()
    raw[place] ^= change
    with pytest.raises(MessageMismatchError, match=r"^here: the bytes that arrived are no message header"):
        Header.decode(raw, "here")


def test_bytes_that_are_no_header_are_detected() -> None:
    for raw in (torch.zeros(HEADER_BYTES, dtype=torch.uint8), torch.zeros(3, dtype=torch.uint8)):
        with pytest.raises(MessageMismatchError):
            Header.decode(raw, "here")


@settings(max_examples=100, deadline=None)
@given(_names(), _names())
@example("x" * 1000 + "a", "x" * 1000 + "b")
def test_names_that_differ_anywhere_are_told_apart(one: str, two: str) -> None:
    header = weight_header(torch.zeros(1), subject=one)
    got = Header.decode(header.encode(), "here")
    if one == two:
        got.check(header, "here")
    else:
        with pytest.raises(MessageMismatchError, match="subject is"):
            got.check(replace(header, subject=two), "here")


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 300), max_size=4),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 10**6),
)
def test_chunks_cover_every_row_once_in_order_and_end_on_multiples_of_64(
    shape: list[int], itemsize: int, chunk_bytes: int
) -> None:
    rows = shape[0] if shape else 1
    columns = torch.Size(shape[1:]).numel()
    chunk_rows = rows_per_chunk(tuple(shape), itemsize, chunk_bytes)
    ranges = list(row_ranges(rows, chunk_rows))
    assert [row for start, stop in ranges for row in range(start, stop)] == list(range(rows))
    for start, stop in ranges[:-1]:
        assert (stop - start) * columns % 64 == 0
    if len(ranges) > 1:
        unit = next(n for n in range(1, 65) if n * max(1, columns) % 64 == 0)
        smallest = unit * columns * itemsize
        chunk = chunk_rows * columns * itemsize
        assert chunk <= max(chunk_bytes, smallest)
        assert chunk + smallest > chunk_bytes or chunk == smallest


# -- the pool itself


def _end(fabric: Fabric, *hows: str) -> int:
    match hows[fabric.rank]:
        case "dies":
            os._exit(9)
        case "hangs":
            threading.Event().wait()
        case "raises":
            raise PeerTimeoutError("on purpose")
        case "raises what does not pickle":
            raise _Unpicklable(lambda: None)
    return os.getpid()


class _Unpicklable(Exception):
    pass


def test_the_pool_reports_how_a_rank_ended_and_replaces_it(rank_pool: RankPool) -> None:
    second = timedelta(seconds=1)
    before = rank_pool.run_within(2, _end, ("returns", "returns"), timeout=second)
    with pytest.raises(RankFailures, match="on purpose") as info:
        rank_pool.run_within(2, _end, ("raises", "returns"), timeout=second)
    assert isinstance(info.value.failures[0].error, PeerTimeoutError)
    assert info.value.results == {1: before[1]}
    with pytest.raises(RankFailures) as info:
        rank_pool.run_within(2, _end, ("returns", "raises what does not pickle"), timeout=second)
    assert [(f.rank, f.kind, f.error) for f in info.value.failures.values()] == [(1, "_Unpicklable", None)]
    assert rank_pool.run_within(2, _end, ("returns", "returns"), timeout=second) == before
    with pytest.raises(RankFailures) as info:
        rank_pool.run_within(2, _end, ("dies", "hangs"), timeout=second, limit=1.0)
    assert {f.rank: f.kind for f in info.value.failures.values()} == {0: "ProcessDied", 1: "ProcessWedged"}
    assert not set(before) & set(rank_pool.pids)
    assert all(not Path(f"/proc/{pid}").exists() for pid in before)
    assert not set(before) & set(rank_pool.run_within(2, _end, ("returns", "returns"), timeout=second))
