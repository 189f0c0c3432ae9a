"""A Ray cluster for one command: connect or start, reserve a place per rank, leave nothing behind."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, Self

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from piper_owner.errors import ConfigError, ResourceError, RunError
from piper_owner.executor.devices import check_gpus, check_local_gpus
from piper_owner.runtime.address import check_address
from piper_owner.runtime.signals import undisturbed

__all__ = ["LOOPBACK", "Cluster", "count_cpus", "count_gpus", "node_address"]

LOOPBACK: Final = "127.0.0.1"
# The path of a Unix socket has at most 103 bytes, and Ray and we add about 87 to the folder.
_MAX_FOLDER: Final = 16
_RELEASE: Final = timedelta(seconds=10)
_REMOVAL: Final = timedelta(seconds=3)


class Cluster:
    """One reserved CPU for each of `devices` actors, and `gpus` GPUs, 1 or a part of one.

    Uses the Ray that this process is connected to, else connects to `address` ("HOST:PORT" or
    "auto"), else starts a local Ray with as many logical CPUs as devices. `close` (or leaving the
    `with` block) ends our actors and gives the reservation back; it ends Ray itself only if it was
    started here, and the connection only if it was made here.

    Raises ConfigError for an address where nobody listens and for a cluster with too few GPUs,
    ResourceError when the reservation is not made within `timeout`, and RunError when a local Ray
    does not start; nothing is left running then.
    """

    def __init__(
        self, devices: int, *, address: str | None = None, timeout: timedelta, gpus: float = 0.0
    ) -> None:
        self.devices, self.gpus = devices, gpus
        self._actors: list[ActorHandle[Any]] = []
        self._group: PlacementGroup | None = None
        self._folder: str | None = None
        self._connected_here = False
        try:
            if address is None and not ray.is_initialized():
                check_local_gpus(devices, gpus)
            self._connect(address)
            check_gpus(devices, gpus, available=int(count_gpus()[0]) if gpus else 0, where="the Ray cluster")
            self._reserve(timeout)
        except BaseException:
            self.close()
            raise

    @property
    def host(self) -> str:
        """The address at which the actors reach this process."""
        return LOOPBACK if self.is_local else node_address()

    @property
    def is_local(self) -> bool:
        """Whether this is a Ray of our own on this machine alone."""
        return self._folder is not None

    def start(self, actor_class: type, index: int, *args: object) -> ActorHandle[Any]:
        """Start `actor_class(*args)` on place `index` (0 to devices - 1). Does not wait for it."""
        if self._group is None:
            raise RuntimeError("the cluster is closed")
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
        remote: Any = ray.remote(actor_class)  # Ray types it by the arguments of one given class
        # Ray shows an actor with a GPU that one alone, and leaves the rest of its environment as it is.
        resources = {"num_gpus": self.gpus} if self.gpus else {}
        options = remote.options(num_cpus=1, max_restarts=0, scheduling_strategy=strategy, **resources)
        actor: ActorHandle[Any] = options.remote(*args)
        self._actors.append(actor)
        return actor

    def end(self, actor: ActorHandle[Any]) -> None:
        """End one actor, alive or not, at once; its place is free then."""
        self._actors.remove(actor)
        _in_time(lambda: ray.kill(actor, no_restart=True))

    def close(self) -> None:
        """End what was started here. Closing twice is fine."""
        with undisturbed():
            if ray.is_initialized():
                # A Ray of our own ends whole, and so does everything in it. To release things one by
                # one would hang where a signal to the whole process group ended its raylet first.
                if not self.is_local:
                    self._release()
                if self._connected_here:
                    ray.shutdown()
            self._actors.clear()
            self._group = None
            self._connected_here = False
            if self._folder is not None:
                _remove_folder(self._folder)
                self._folder = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _connect(self, address: str | None) -> None:
        if ray.is_initialized():
            return
        quiet: dict[str, Any] = {
            "log_to_driver": False,
            "configure_logging": False,
            "logging_level": logging.ERROR,
        }
        if address is not None:
            check_address(address)
            self._connected_here = True
            try:
                ray.init(address=address, **quiet)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise ConfigError(f"--address {address}: cannot join this Ray cluster: {error}") from error
            return
        self._connected_here = True
        # A folder of our own: nothing of a run stays in it, and nobody else's rights matter. Ray opens the
        # one that it is given to every user of the machine, so that is one inside, out of their reach.
        self._folder = tempfile.mkdtemp(prefix="piper-owner-", dir=_short_folder())
        try:
            with undisturbed():
                ray.init(
                    address="local",
                    num_cpus=self.devices,
                    include_dashboard=False,
                    _temp_dir=os.path.join(self._folder, "r"),
                    **quiet,
                )
        except (OSError, RuntimeError, ValueError) as error:
            raise RunError(f"a local Ray did not start: {error}") from error

    def _reserve(self, timeout: timedelta) -> None:
        bundle = {"CPU": 1.0, **({"GPU": self.gpus} if self.gpus else {})}
        self._group = placement_group([bundle] * self.devices, strategy="PACK")
        deadline = time.monotonic() + timeout.total_seconds()
        # In short waits, because Ray does not see an interrupt during one.
        while not self._group.wait(timeout_seconds=min(1.0, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                raise self._unreserved(timeout)

    def _unreserved(self, timeout: timedelta) -> ResourceError:
        total, free = count_cpus()
        has = f"it has {total:g}, and {free:g} are free"
        wanted = f"{self.devices} CPUs, one per device,"
        if self.gpus:
            wanted += f" with {self.gpus:g} GPU{'s' * (self.gpus != 1)} each,"
            total, free = count_gpus()
            has += f", and {total:g} GPUs, of which {free:g} are free"
        return ResourceError(
            f"asked the Ray cluster for {wanted} and did not get them "
            f"within {timeout.total_seconds():g} s: {has}; use "
            "fewer --devices, wait until other jobs end, or leave --address out to start a local Ray"
        )

    def _release(self) -> None:
        """End our actors and give the reservation back, or give up after a while."""
        actors, group = tuple(self._actors), self._group

        def release() -> None:
            for actor in actors:
                ray.kill(actor, no_restart=True)
            if group is not None:
                remove_placement_group(group)

        _in_time(release)


def _in_time(work: Callable[[], None]) -> None:
    """Do `work`, or give up after a while.

    Ray's own calls take no timeout, and block where this machine's raylet is gone.
    """

    def tidy() -> None:
        # A cluster that is gone cannot be tidied, and took everything with it.
        with suppress(ray.exceptions.RayError, ConnectionError):
            work()

    thread = threading.Thread(target=tidy, name="release of the cluster", daemon=True)
    thread.start()
    thread.join(_RELEASE.total_seconds())


def _remove_folder(folder: str) -> None:
    """Remove it for good: Ray's processes may still write their last log lines while they end."""
    deadline = time.monotonic() + _REMOVAL.total_seconds()
    shutil.rmtree(folder, ignore_errors=True)
    while os.path.exists(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
        shutil.rmtree(folder, ignore_errors=True)


def _short_folder() -> str | None:
    """Where temporary folders go; None for the usual place, unless Ray's socket names get too long there."""
    usual = tempfile.gettempdir()
    return None if len(usual) <= _MAX_FOLDER or not os.access("/tmp", os.W_OK) else "/tmp"


def node_address() -> str:
    """The address at which the other machines of the cluster reach this one."""
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return address


def count_cpus() -> tuple[float, float]:
    """The cluster's logical CPUs: all, and the free ones."""
    return _count("CPU")


def count_gpus() -> tuple[float, float]:
    """The cluster's GPUs: all, and the free ones."""
    return _count("GPU")


def _count(resource: str) -> tuple[float, float]:
    total: float = ray.cluster_resources().get(resource, 0)  # type: ignore[no-untyped-call]
    free: float = ray.available_resources().get(resource, 0)  # type: ignore[no-untyped-call]
    return total, free
