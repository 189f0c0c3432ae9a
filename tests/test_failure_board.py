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

from piper_owner.runtime.store import open_store
from piper_owner.transport.base import Failure
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
