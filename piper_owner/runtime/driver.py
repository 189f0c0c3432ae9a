"""The driver: plans the runs of one command, and has each of them led through its steps."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial

import numpy as np
from numpy.typing import NDArray

from piper_owner.errors import ConfigError
from piper_owner.executor.config import RunKind, TrainConfig
from piper_owner.executor.plan import plan_run, resolve_run
from piper_owner.executor.recording import Recording
from piper_owner.executor.results import TrainResult
from piper_owner.executor.source import GPTSource, ModelSource
from piper_owner.runtime.actor import RankHost
from piper_owner.runtime.cluster import Cluster
from piper_owner.runtime.crew import Crew
from piper_owner.runtime.keeping import Keeping, Kept
from piper_owner.runtime.leading import RunLeader
from piper_owner.runtime.progress import OnRestart, OnStep, OnStop
from piper_owner.runtime.restarts import Restarts
from piper_owner.runtime.signals import noticed
from piper_owner.runtime.store import open_store

__all__ = ["train"]


def train(
    config: TrainConfig,
    tokens: NDArray[np.int32],
    *,
    text: str,
    compare: Sequence[RunKind] = (),
    source: ModelSource | None = None,
    address: str | None = None,
    on_step: OnStep | None = None,
    on_restart: OnRestart | None = None,
    on_stop: OnStop | None = None,
    recording: Recording | None = None,
    keeping: Keeping | None = None,
    max_restarts: int = 0,
    snapshot: int | None = None,
    host_class: type[RankHost] = RankHost,
) -> TrainResult:
    """Train the owner run and then those of `compare`, each on the same data from the same seed.

    `source` is the model (None: the GPT). `tokens` is int32, one-dimensional; `text` names where they
    come from. `address` is that of a Ray cluster, None for the connected one or else a local one; see
    `Cluster`. `on_step` is called here after every step, and `on_restart` when a run that lost a rank
    begins again, `max_restarts` times at most over all runs; `snapshot` is after how many steps each to take
    a snapshot for that (None: never). `recording` is what to record of the owner run, `keeping` where to keep
    it. With `keeping` and `on_stop`, the first SIGINT, SIGTERM or SIGHUP during the owner run saves and ends
    it; `on_stop` is told the last step. `host_class` is the actor's class.

    Raises InputError before anything starts, and RunError, which carries the error of the rank
    that failed first, after everything that was started here has ended; and Stopped after a signal.
    """
    runs = [RunKind.OWNER, *(kind for kind in RunKind if kind in compare and kind is not RunKind.OWNER)]
    source = GPTSource() if source is None else source
    config = resolve_run(config, source)
    plans = {kind: plan_run(config, kind, source) for kind in runs if kind is not RunKind.REFERENCE}
    _check_snapshot(snapshot, config)
    kept = None if keeping is None else Kept(keeping, config, tokens)
    restarts = Restarts(max_restarts, on_restart)
    timeout = timedelta(seconds=config.timeout_seconds)
    # The driver hosts the store: it outlives every actor, and the port that it was given is free.
    with Cluster(config.num_ranks, address=address, timeout=timeout, gpus=config.gpu_share) as cluster:
        store = open_store(cluster.host, timeout)
        crew = Crew(config, source, cluster, store, tokens, host_class)
        lead = partial(RunLeader, crew, restarts=restarts, on_step=on_step)
        with noticed() if kept is not None and on_stop is not None else nullcontext() as stop:
            owner = lead(
                RunKind.OWNER, kept=kept, snapshot=snapshot, recording=recording, stop=stop, on_stop=on_stop
            )
            results = {RunKind.OWNER: owner.run()}
        for kind in runs[1:]:
            results[kind] = lead(kind, snapshot=None if kind is RunKind.REFERENCE else snapshot).run()
    return TrainResult(
        config=config,
        text=text,
        ownership=plans[RunKind.OWNER].ownership,
        runs=results,
        replicas_equal=owner.replicas_equal,
        records=owner.records,
        restarts=tuple(restarts.made),
    )


def _check_snapshot(snapshot: int | None, config: TrainConfig) -> None:
    if snapshot is not None and config.num_ranks == 1:
        raise ConfigError(
            "--snapshot with one worker: there is no other one to keep a copy; use --checkpoint DIR alone"
        )
