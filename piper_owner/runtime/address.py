"""Whether the address of a Ray cluster can be one; without ray."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Final

from piper_owner.errors import ConfigError

__all__ = ["check_address"]

_TIMEOUT: Final = timedelta(seconds=10)


def check_address(address: str) -> None:
    """Raise ConfigError unless `address` is "auto", or a HOST:PORT where somebody listens.

    Ray itself goes on trying for ever where nobody does, and can hardly be interrupted then.
    """
    if address == "auto":
        return
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or "://" in address:
        raise ConfigError(
            f"--address {address}: give the HOST:PORT that `ray start --head` printed, or auto for the "
            "cluster that runs on this machine"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_TIMEOUT.total_seconds()).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"--address {address}: nobody answers there ({error}); start Ray with `ray start --head`, or "
            "leave --address out to start a local Ray"
        ) from error
