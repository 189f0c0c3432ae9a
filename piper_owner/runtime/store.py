"""The store at which the ranks of a run meet."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

__all__ = ["open_store"]


def open_store(host: str, timeout: timedelta) -> TCPStore:
    """A store served from here, at a free port of `host`, an address of this machine, and of no other.

    A TCPStore left to itself listens on every interface. `timeout` bounds each wait for a key.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.bind(address)
        listener.listen()
        port = listener.getsockname()[1]
        return TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=listener.detach(),  # the store closes it
        )
