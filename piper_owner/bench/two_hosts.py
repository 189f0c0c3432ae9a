"""Two hosts on this machine: network namespaces, and between them a link that leads nowhere else."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from piper_owner.bench.config import Host
from piper_owner.errors import ResourceError

__all__ = ["TwoHosts", "two_hosts"]

_INTERFACE: Final = "link0"
_TIMEOUT_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoHosts:
    """The two hosts, while they are there.

    hosts: how a command is run on each (`host.command` before its own words), its address and interface.
    names: of the two network namespaces.
    """

    hosts: tuple[Host, Host]
    names: tuple[str, str]

    def set_link(self, host: int, *, up: bool) -> None:
        """Take the link of `host` (0 or 1) down, so that nothing gets through either way, or up again.

        A peer sees no closed connection, only silence. Raises ResourceError if the kernel refuses.
        """
        _command("ip", "-n", self.names[host], "link", "set", _INTERFACE, "up" if up else "down")


@contextmanager
def two_hosts(*, rate: str = "1gbit", burst: str = "1mb") -> Iterator[TwoHosts]:
    """Two network namespaces and a veth pair whose ends are shaped with `tc tbf`; gone when the block ends.

    `rate` and `burst` (what passes at once after a pause) are as tc writes them. Each namespace has a
    loopback of its own. Processes that still run inside are left alone, and lose the link.

    Raises ResourceError where this machine cannot make them: they need root, `ip` and `tc`.
    """
    if os.geteuid() != 0:
        raise ResourceError("network namespaces need root; run it as root")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise ResourceError(f"there is no {tool!r} here; install iproute2")
    run = f"piper-owner-{os.getpid()}-{secrets.token_hex(3)}"
    names = (f"{run}-0", f"{run}-1")
    with ExitStack() as undo:
        undo.callback(_remove, names)
        for name in names:
            _command("ip", "netns", "add", name)
        # One end is made in each namespace, so that the machine's own network never sees them.
        _command("ip", "link", "add", _INTERFACE, "netns", names[0], "type", "veth",
                 "peer", "name", _INTERFACE, "netns", names[1])  # fmt: skip
        for place, name in enumerate(names):
            _shape(name, _address(place), rate, burst)
        first, second = (
            Host(command=("ip", "netns", "exec", name), address=_address(place), interface=_INTERFACE)
            for place, name in enumerate(names)
        )
        yield TwoHosts(hosts=(first, second), names=names)


def _shape(name: str, address: str, rate: str, burst: str) -> None:
    """Give one end of the link its address and its rate."""
    inside = ("-n", name)
    # No IPv6 addresses: the kernel would announce them, and that would be counted.
    _command("ip", *inside, "link", "set", _INTERFACE, "addrgenmode", "none")
    _command("ip", *inside, "address", "add", f"{address}/30", "dev", _INTERFACE)
    _command("ip", *inside, "link", "set", "lo", "up")
    _command("ip", *inside, "link", "set", _INTERFACE, "up")
    _command("tc", *inside, "qdisc", "add", "dev", _INTERFACE, "root", "tbf", "rate", rate,
             "burst", burst, "latency", "50ms")  # fmt: skip


def _address(place: int) -> str:
    """Of one end of the link, in the range of RFC 2544 for benchmarks of networks."""
    return f"198.18.0.{place + 1}"


def _command(*words: str) -> None:
    """Run `words`; ResourceError with what they said when they fail."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS)
    if done.returncode:
        raise ResourceError(f"{' '.join(words)}: {done.stderr.strip() or f'status {done.returncode}'}")


def _remove(names: Sequence[str]) -> None:
    """Remove the namespaces, and with them the link; a second Ctrl+C waits for that."""
    if threading.current_thread() is not threading.main_thread():
        _delete(names)
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        _delete(names)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _delete(names: Sequence[str]) -> None:
    for name in names:
        if Path("/run/netns", name).exists() or Path("/var/run/netns", name).exists():
            subprocess.run(["ip", "netns", "delete", name], timeout=_TIMEOUT_SECONDS)
