"""The actors of one command: started where they are missing, called together, ended when they fail."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, Final

import numpy as np
import ray
from numpy.typing import NDArray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from torch._C._distributed_c10d import PrefixStore, TCPStore

from piper_owner.executor.config import TrainConfig
from piper_owner.executor.snapshots import Holdings, Recovery, peer_of
from piper_owner.executor.source import ModelSource
from piper_owner.runtime.actor import Meeting, RankHost
from piper_owner.runtime.cluster import Cluster
from piper_owner.runtime.failures import Call, Whereabouts, gather
from piper_owner.transport.base import Board
from piper_owner.transport.gloo import FailureBoard

__all__ = ["Crew"]

_IDLE: Final = timedelta(seconds=5)


class Crew:
    """One actor for each rank of `config`, from `man` on."""

    def __init__(
        self,
        config: TrainConfig,
        source: ModelSource,
        cluster: Cluster,
        store: TCPStore,
        tokens: NDArray[np.int32],
        host_class: type[RankHost],
    ) -> None:
        self.config = config
        self._source = source
        self._cluster = cluster
        self._store = store
        self._host_class = host_class
        self._meeting = Meeting(host=cluster.host, port=store.port, is_local=cluster.is_local)
        self._shared = ray.put(tokens)
        self._actors: dict[int, ActorHandle[Any]] = {}
        self._where: dict[int, Whereabouts] = {}
        # A wait of ours must outlast a rank's own, whose error names the cause.
        self._timeout = timedelta(seconds=2 * config.timeout_seconds + 60)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank."""
        return tuple(range(self.config.num_ranks))

    def board(self, prefix: str) -> Board:
        """The board of the ranks that meet under `prefix` of the store."""
        return FailureBoard(PrefixStore(prefix, self._store))

    def man(self, step: int) -> tuple[int, ...]:
        """Start the actors that are missing, in `step` of a run, and wait for them; the ranks of those.

        Raises RankFailure if one of them does not come up.
        """
        missing = tuple(rank for rank in self.ranks if rank not in self._actors)
        for rank in missing:
            self._actors[rank] = self._cluster.start(
                self._host_class, rank, rank, self.config, self._shared, self._meeting, self._source
            )
        self._where |= self.all("start of the actors", self.board("start"), "whereabouts", step=step)
        return missing

    def release(self, failed: Iterable[int], *, patience: timedelta = _IDLE) -> dict[int, Holdings]:
        """End the run on every actor, and end those of the ranks `failed`; what the others have, by rank.

        The others are done as soon as they see that their peers are gone. Those that are not within
        `patience`, or are gone too, are ended as well.
        """
        found: dict[int, Holdings] = {}
        for rank in failed:
            self._end(rank)
        calls: dict[Any, int] = {actor.abandon.remote(): rank for rank, actor in self._actors.items()}
        ready: list[Any] = []
        late: list[Any] = []
        if calls:
            ready, late = ray.wait(list(calls), num_returns=len(calls), timeout=patience.total_seconds())
        for each in ready:
            try:
                found[calls[each]] = ray.get(each)
            except RayError:
                late.append(each)
        for each in late:
            self._end(calls[each])
        return found

    def hand_over(self, recovery: Recovery, step: int) -> None:
        """Give the ranks that have no snapshot of their own the copy that another one has kept."""
        made: dict[int, Any] = {}
        for rank in recovery.from_peer:
            peer = self._actors[peer_of(rank, len(self.ranks))]
            copy: Any = peer.give_copy.remote(recovery.step)
            made[rank] = self._actors[rank].take_copy.remote(copy)
        call = Call(what="hand-over of the snapshots", step=step, references=made)
        self.gather(self.board("start"), call)

    def _end(self, rank: int) -> None:
        self._where.pop(rank, None)
        actor = self._actors.pop(rank, None)
        if actor is not None:
            self._cluster.end(actor)

    def all(
        self,
        what: str,
        board: Board,
        method: str,
        *args: object,
        step: int,
        ranks: Sequence[int] | None = None,
    ) -> dict[int, Any]:
        """Call `method` on `ranks` (None: all) and wait for their results. Raises RankFailure."""
        return self.gather(board, self.call(what, method, *args, step=step, ranks=ranks))

    def call(
        self, what: str, method: str, *args: object, step: int, ranks: Sequence[int] | None = None
    ) -> Call:
        """Call `method` on `ranks` (None: all), after what they were called for before."""
        chosen = self.ranks if ranks is None else ranks
        made = {rank: getattr(self._actors[rank], method).remote(*args) for rank in chosen}
        return Call(what=what, step=step, references=made)

    def gather(self, board: Board, call: Call, later: Iterable[Call] = ()) -> dict[int, Any]:
        """Wait for the results of `call`; `later` are those made after it. Raises RankFailure."""
        return gather(call, tuple(later), timeout=self._timeout, board=board, where=self._where)
