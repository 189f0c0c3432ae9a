"""Hold signals back while Ray starts or stops, and while a run has a step to save."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

__all__ = ["Stop", "Stopped", "noticed", "undisturbed"]

_HELD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Deliver SIGINT, SIGTERM and SIGHUP that arrive inside only at the end, to the handlers of before.

    An interrupt in the middle of Ray's start leaves agents of it running for half a minute. Ray
    also replaces the SIGTERM handler; the program's own comes back here. Does nothing outside the
    main thread, which alone may set handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []

    def hold(number: int, _frame: FrameType | None) -> None:
        arrived.append(number)

    before = {number: signal.signal(number, hold) for number in _HELD}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None: the handler was not set from Python, and cannot be set back from it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if arrived:
            signal.raise_signal(arrived[0])


@dataclass(slots=True)
class Stop:
    """Whether the user wants the run to end: the `number` of the signal that said so, or None."""

    number: int | None = None


class Stopped(Exception):
    """A run has ended because of signal `number`, when `step` steps of it stood.

    `is_kept`: whether a checkpoint holds them. `failure` is what kept a rank from saving, if something did.
    """

    def __init__(self, number: int, *, step: int, is_kept: bool, failure: str = "") -> None:
        super().__init__(f"ended by signal {number} after step {step}")
        self.number, self.step, self.is_kept, self.failure = number, step, is_kept, failure


@contextmanager
def noticed() -> Iterator[Stop]:
    """Let the first SIGINT, SIGTERM or SIGHUP inside only be noticed; the next one acts as before.

    Does nothing outside the main thread, which alone may set handlers.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def put_back() -> None:
        for number, handler in before.items():
            # None: the handler was not set from Python, and cannot be set back from it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def notice(number: int, _frame: FrameType | None) -> None:
        stop.number = number
        put_back()

    taken = [number for number in _HELD if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.getsignal(number) for number in taken}
    try:
        for number in taken:
            signal.signal(number, notice)
        yield stop
    finally:
        put_back()
