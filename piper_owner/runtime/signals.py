"""Hold signals back while Ray starts or stops."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["undisturbed"]

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
