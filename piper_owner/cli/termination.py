"""Ends the command in order when it is told to end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

__all__ = ["orderly_termination"]


@contextmanager
def orderly_termination() -> Iterator[None]:
    """Make SIGTERM, and a terminal that closes, end the process as Ctrl+C does: through every `finally`."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, end)}
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup has it ignored
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
