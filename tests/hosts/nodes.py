"""A Ray cluster of two nodes on two hosts, each a network namespace of this machine."""

from __future__ import annotations

import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ray_jobs import kill_session, plain_environment, processes_of, wait_until

from piper_owner.bench.two_hosts import TwoHosts, two_hosts

# Each host has all ports to itself.
_PORT = 6379
_START_SECONDS = 90


@dataclass
class TwoNodes:
    """The cluster: its head on host 0 and another node on host 1, with `cpus` CPUs each.

    settings: the environment of whoever joins: a token of the cluster's own, whatever the user's home has.
    sessions: of each host's processes.
    """

    pair: TwoHosts
    cpus: int
    undo: ExitStack
    settings: dict[str, str] = field(
        default_factory=lambda: {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    )
    sessions: list[int] = field(default_factory=list)

    @property
    def address(self) -> str:
        """What the command's --address takes."""
        return f"{self.pair.hosts[0].address}:{_PORT}"

    @property
    def inside(self) -> Sequence[str]:
        """Put before a command, it runs on host 0."""
        return self.pair.hosts[0].command

    def workers(self, doing: str) -> list[int]:
        """How many processes of each host have a title that begins with `doing`, such as "ray::Host.step"."""
        return [
            sum(title.startswith(doing) for title in processes_of(session).values())
            for session in self.sessions
        ]

    def stop(self, host: int) -> None:
        """End every process of the node of `host` at once, as a power cut does."""
        kill_session(self.sessions[host])

    def start(self, host: int) -> None:
        """Start the node of `host`, or start it anew."""
        options = (
            ("--head", f"--port={_PORT}", "--include-dashboard=false")
            if host == 0
            else (f"--address={self.address}",)
        )
        words = (f"--num-cpus={self.cpus}", f"--node-ip-address={self.pair.hosts[host].address}", *options)
        node = _node(self.pair.hosts[host].command, words, self.settings)
        self.sessions[host:] = [self.undo.enter_context(node)]


@contextmanager
def two_nodes(*, cpus: int = 1) -> Iterator[TwoNodes]:
    """The cluster over 1 Gbit/s; nothing of it is left at the end.

    Raises ResourceError where the hosts cannot be made.
    """
    with ExitStack() as undo:
        nodes = TwoNodes(pair=undo.enter_context(two_hosts(rate="1gbit")), cpus=cpus, undo=undo)
        nodes.start(0)
        nodes.start(1)
        yield nodes


@contextmanager
def _node(inside: Sequence[str], options: Sequence[str], settings: Mapping[str, str]) -> Iterator[int]:
    """`ray start`, from when it says that it runs; the session that all its processes are in."""
    folder = Path(tempfile.mkdtemp(prefix="n-", dir="/tmp"))
    words = [*inside, sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
    said = folder / "said"
    with said.open("wb") as out:
        process = subprocess.Popen(
            [*words, "--disable-usage-stats", f"--temp-dir={folder}", *options],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**plain_environment(), "TMPDIR": str(folder), **settings},
            start_new_session=True,
        )
    try:
        assert wait_until(
            lambda: process.poll() is not None or "Ray runtime started" in said.read_text(), _START_SECONDS
        ), said.read_text()
        assert process.poll() is None, said.read_text()
        yield process.pid
    finally:
        kill_session(process.pid)
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)
