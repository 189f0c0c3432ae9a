"""The store of a run: where it listens, and what is left of it when its host stops."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from datetime import timedelta
from multiprocessing.connection import Connection

import pytest
from torch._C._distributed_c10d import TCPStore

from piper_owner.errors import MessageMismatchError, PeerLostError
from piper_owner.runtime.store import open_store
from piper_owner.transport import Boards, MemoryNetwork
from piper_owner.transport.base import Board, Failure, cause
from piper_owner.transport.gloo import FailureBoard

HOST = "127.0.0.1"
TIMEOUT = timedelta(seconds=20)


def test_the_store_listens_at_its_own_address_only() -> None:
    store = open_store(HOST, TIMEOUT)
    client = TCPStore(HOST, store.port, is_master=False, timeout=TIMEOUT)
    client.set("key", "value")
    assert store.get("key") == b"value"
    with pytest.raises(ConnectionRefusedError):  # another address of this machine
        socket.create_connection(("127.0.0.2", store.port), timeout=5.0)


def a_board() -> Board:
    return MemoryNetwork(4, timeout=TIMEOUT).board


def wait_of(rank: int, *awaited: int) -> Failure:
    return Failure(rank=rank, where="", error="waited", awaited=awaited)


def own_of(rank: int) -> Failure:
    return Failure(rank=rank, where="1B0 of step 2", error="KeyError: 'x'")


@pytest.mark.parametrize("is_stored", [False, True])
def test_a_failure_of_its_own_counts_before_an_earlier_wait(is_stored: bool) -> None:
    board = FailureBoard(open_store(HOST, TIMEOUT)) if is_stored else a_board()
    assert board.first() is None
    board.report(wait_of(2, 0))
    board.report(wait_of(2, 1))  # of a rank's waits the first stays
    assert board.first() is None
    assert board.wait_of(2) == wait_of(2, 0)
    assert board.wait_of(0) is None
    board.report(own_of(0))
    board.report(own_of(1))
    assert board.first() == own_of(0)
    assert cause(board, 2, (0,)) == "; rank 0 failed first, at 1B0 of step 2: KeyError: 'x'"


@pytest.mark.parametrize(
    ("waits", "reader", "words"),
    [
        ([], (0, 1), "rank 1 has reported nothing"),
        ([], (0, 1, 2), "ranks 1, 2 have reported nothing"),
        ([(0, 2), (2, 1)], (0, 2), "rank 2 waited for rank 1; rank 1 has reported nothing"),
        # A group in which rank 1 does not come: that rank 2 waits in it too says nothing.
        ([(2, 0, 1)], (0, 1, 2), "rank 1 has reported nothing"),
        ([(2, 0, 1), (1, 3)], (0, 1, 2), "rank 1 waited for rank 3; rank 3 has reported nothing"),
        (
            [(2, 0), (0, 2)],
            (0, 2),
            "rank 2 waited for rank 0; they wait for one another: a message between them was lost, or never "
            "sent",
        ),
        (
            [(rank, rank + 1) for rank in range(9)],
            (0, 1),
            "rank 1 waited for rank 2; ...; rank 7 waited for rank 8; rank 8 waited for rank 9; rank 9 has "
            "reported nothing",
        ),
    ],
)
def test_the_cause_is_at_the_end_of_the_waits(
    waits: list[tuple[int, ...]], reader: tuple[int, ...], words: str
) -> None:
    board = a_board()
    for rank, *awaited in waits:
        board.report(wait_of(rank, *awaited))
    assert cause(board, reader[0], reader[1:]) == f"; {words}"


def test_an_error_is_reported_unless_it_came_of_a_wait() -> None:
    board = a_board()
    error = PeerLostError("rank 0 lost rank 1")
    error.awaited = (1,)
    board.report_error(0, "step 3", error)
    assert board.first() is None
    board.report_error(0, "step 3", MessageMismatchError("wrong\nmore"))
    assert board.first() == Failure(rank=0, where="step 3", error="MessageMismatchError: wrong")


def test_of_several_boards_waits_are_of_the_first() -> None:
    one, two = a_board(), a_board()
    both = Boards(one, two)
    both.report(wait_of(1, 0))
    assert one.wait_of(1) == both.wait_of(1) == wait_of(1, 0)
    assert two.wait_of(1) is None
    both.report(own_of(3))
    assert one.first() == two.first() == both.first() == own_of(3)


def test_who_reads_a_failure_on_one_board_writes_it_on_the_others() -> None:
    one, two = a_board(), a_board()
    two.report(own_of(3))
    assert one.first() is None
    assert Boards(one, two).first() == own_of(3)
    assert one.first() == own_of(3)


def host_store(pipe: Connection) -> None:
    """Serve a store until the pipe closes."""
    store = open_store(HOST, TIMEOUT)
    pipe.send(store.port)
    pipe.poll(60.0)


def test_a_board_whose_host_stops_answers_nothing_and_holds_nobody() -> None:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    host = context.Process(target=host_store, args=(theirs,), daemon=True)
    host.start()
    try:
        assert pipe.poll(60.0)
        board = FailureBoard(TCPStore(HOST, pipe.recv(), is_master=False, timeout=TIMEOUT))
        failure = Failure(rank=1, where="step 3", error="ArithmeticError: a fault")
        board.report(failure)
        assert board.first() == failure
        assert host.pid is not None
        os.kill(host.pid, signal.SIGSTOP)
        start = time.monotonic()
        assert board.first() is None
        board.report(failure)
        assert time.monotonic() - start < 9.0  # two questions of three seconds each
    finally:
        host.kill()
        host.join(10.0)
