"""The actor of one rank: a host that is reused over the runs of one command."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from torch._C._distributed_c10d import PrefixStore, TCPStore

from piper_owner.executor.config import RunKind, TrainConfig
from piper_owner.executor.randomness import draw_from
from piper_owner.executor.recording import RankRecord, Recording
from piper_owner.executor.reference import ReferenceSession
from piper_owner.executor.session import RankReport, RankSession, StepReport
from piper_owner.executor.snapshots import Holdings, Shelf, Snapshot
from piper_owner.executor.source import GPTSource, ModelSource
from piper_owner.executor.stream import token_stream
from piper_owner.runtime.cluster import LOOPBACK, node_address
from piper_owner.runtime.failures import Whereabouts
from piper_owner.transport.gloo import GlooFabric

__all__ = ["Meeting", "RankHost", "visible_index"]


def visible_index(given: Sequence[str], visible: str | None) -> int:
    """The number by which torch knows the first of the GPUs `given`, in Ray's words, in this process.

    visible: CUDA_VISIBLE_DEVICES. Ray sets it to what it gave, unless it was told to leave it alone. Pure.
    """
    shown = [each.strip() for each in (visible or "").split(",") if each.strip()]
    first = given[0] if given else "0"
    if shown:
        return shown.index(first) if first in shown else 0
    return int(first) if first.isdecimal() else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where the driver's store is; `is_local` if all ranks are on this machine."""

    host: str
    port: int
    is_local: bool


class RankHost:
    """Hosts one rank of one run after another.

    `tokens` (int32, one-dimensional) is read-only and lies in the object store, once per machine.
    Every call but `whereabouts`, `close` and `abandon` belongs to the run that `open` began.
    """

    def __init__(
        self,
        rank: int,
        config: TrainConfig,
        tokens: NDArray[np.int32],
        meeting: Meeting,
        source: ModelSource | None = None,
    ) -> None:
        self.rank = rank
        self.config = config
        self._source = GPTSource() if source is None else source
        self._meeting = meeting
        self._stream = token_stream(config, tokens)
        self._session: RankSession | ReferenceSession | None = None
        self._shelf = Shelf()

    def whereabouts(self) -> Whereabouts:
        """The process and the machine of this actor."""
        return Whereabouts(pid=os.getpid(), node=node_address())

    def open(self, run: RunKind, prefix: str) -> None:
        """Begin `run`, whose ranks meet under `prefix` of the store. Collective over them."""
        self.close()
        # The reference gets no more than a rank does: the same arithmetic, and small operations on
        # more threads than there are idle cores run many times slower.
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // self.config.num_ranks))
        if run is RunKind.REFERENCE:
            self._session = ReferenceSession(self.config, self._source, device=self._device())
        else:
            self._session = RankSession(
                self.config, run, self._fabric(prefix), self._source, self._shelf, device=self._device()
            )
        draw_from(self.config.seed, self.rank)  # building a model may draw, too

    def step(self, index: int) -> StepReport:
        """Train on the batch of step `index` (from 0). Collective."""
        return self._live().train_step(self._stream.batch(index))

    def record(self, recording: Recording) -> None:
        """Record the steps that `recording` asks for; those of the reference are not. Local."""
        session = self._live()
        if isinstance(session, RankSession):
            session.record(recording)

    def take_record(self) -> RankRecord:
        """What was recorded of the run. Collective; not for the reference."""
        session = self._live()
        assert isinstance(session, RankSession), "the reference runs no TrainingDAG"
        return session.take_record()

    def save(self, path: str, facts: dict[str, object]) -> None:
        """Save the owner run into the folder `path`. Collective."""
        session = self._live()
        assert isinstance(session, RankSession), "the reference is not kept"
        session.keeper.save(path, facts)

    def load(self, path: str) -> tuple[float, ...]:
        """Go on from the checkpoint in `path`; the losses of its steps. Collective; before the first step."""
        session = self._live()
        assert isinstance(session, RankSession), "the reference is not kept"
        return session.keeper.load(path)

    def snapshot(self) -> None:
        """Keep the state after the last step, and a copy of it at the next rank. Collective."""
        session = self._live()
        assert isinstance(session, RankSession), "no snapshots are taken of the reference"
        session.replicator.take()

    def keep_snapshots(self, step: int | None) -> None:
        """Drop all snapshots but those of `step`. Local."""
        self._shelf.keep_only(step)

    def give_copy(self, step: int) -> Snapshot:
        """The copy of the snapshot of `step` that is kept here for the rank before. Local."""
        return self._shelf.copies[step]

    def take_copy(self, snapshot: Snapshot) -> None:
        """Have `snapshot`, which another rank has kept, for one's own. Local."""
        # What Ray hands over is read-only, and lies in the object store.
        self._shelf.own[snapshot.step] = Snapshot(step=snapshot.step, data=snapshot.data.copy())

    def restore(self, step: int) -> tuple[list[float], list[float]]:
        """Go back to the snapshot of `step`, and copy it to the next rank anew. Collective.

        Gives the losses of the steps before this rank began, and its share of those since.
        """
        session = self._live()
        assert isinstance(session, RankSession), "no snapshots are taken of the reference"
        session.replicator.restore(self._shelf.own[step])
        session.replicator.take()
        return session.keeper.losses

    def check(self) -> bool:
        """Whether all replicas hold their owner's value, bit for bit. Collective."""
        session = self._live()
        return session.check() if isinstance(session, RankSession) else True

    def finish(self) -> tuple[RankReport, dict[str, torch.Tensor]]:
        """Memory by kind, and this rank's weights by full-model name (CPU); ends the run. Local."""
        session = self._live()
        result = session.report(), session.weights()
        self.close()
        return result

    def close(self) -> None:
        """End the run, if one is open. Local; closing twice is fine."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def abandon(self) -> Holdings:
        """End the run, if one is open, after a failure of any rank, and tell which snapshots are here.

        Local, and waits for nobody.
        """
        session, self._session = self._session, None
        if session is not None:
            session.abandon()
        return self._shelf.holdings

    def _live(self) -> RankSession | ReferenceSession:
        if self._session is None:
            raise RuntimeError(f"rank {self.rank} has no open run")
        return self._session

    def _device(self) -> torch.device:
        """The GPU that Ray gave this actor, or the CPU."""
        if self.config.device == "cpu":
            return torch.device("cpu")
        given = [str(each) for each in ray.get_gpu_ids()]
        index = visible_index(given, os.environ.get("CUDA_VISIBLE_DEVICES"))
        torch.cuda.set_device(index)  # for what does not say where it runs
        return torch.device(self.config.device, index)

    def _fabric(self, prefix: str) -> GlooFabric:
        timeout = timedelta(seconds=self.config.timeout_seconds)
        store = TCPStore(self._meeting.host, self._meeting.port, is_master=False, timeout=timeout)
        # The address Ray knows this machine by is one that the other machines reach.
        own = LOOPBACK if self._meeting.is_local else node_address()
        return GlooFabric(
            PrefixStore(prefix, store), self.rank, self.config.num_ranks, timeout=timeout, hostname=own
        )
