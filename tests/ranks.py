"""A pool of real rank processes: tests that need gloo share them, and may kill or wedge them."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore

from piper_owner.transport import Fabric, GlooFabric

__all__ = ["RankFailure", "RankFailures", "RankPool"]

HOST: Final = "127.0.0.1"
START_SECONDS: Final = 120.0  # importing torch on a machine that is busy with the other tests
END_SECONDS: Final = 5.0

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """How one rank of a call ended, if not with a result.

    `error` is the exception itself, or None when it does not pickle or the process has ended;
    `kind` is its type's name, or "ProcessDied" or "ProcessWedged".
    """

    rank: int
    kind: str
    text: str
    error: BaseException | None = None
    trace: str = ""


class RankFailures(Exception):
    """What failed in a call, by rank, and the results of the ranks that did not."""

    def __init__(self, failures: Mapping[int, RankFailure], results: Mapping[int, Any]) -> None:
        super().__init__(
            "\n".join(f"rank {rank}: {f.kind}: {f.text}\n{f.trace}" for rank, f in sorted(failures.items()))
        )
        self.failures = dict(failures)
        self.results = dict(results)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """What a rank is asked to do."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rank: int
    world_size: int
    timeout: timedelta
    port: int
    prefix: str


@dataclass(frozen=True, slots=True)
class _Done:
    """What it answers: a pickled result."""

    result: bytes


class _Worker:
    """One process, used for one call after another."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process: SpawnProcess = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.is_ready = False

    def await_start(self) -> None:
        """Block until torch is imported, so that no call's time limit pays for it."""
        if not self.is_ready:
            if not self.pipe.poll(START_SECONDS):
                self.kill()
                raise TimeoutError(f"a rank process did not start within {START_SECONDS:g} s")
            self.pipe.recv_bytes()
            self.is_ready = True

    def kill(self) -> None:
        """Kill the process, by its own id, and wait for its end."""
        self.process.kill()
        self.process.join(END_SECONDS)
        self.pipe.close()
        self.process.close()


class RankPool:
    """Runs functions on 1 to N ranks, each a process of its own, over gloo."""

    def __init__(self) -> None:
        self._store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        self._workers: list[_Worker] = []
        self._num_calls = 0

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes that live now."""
        return tuple(worker.process.pid or 0 for worker in self._workers)

    def run(
        self,
        world_size: int,
        function: Callable[Concatenate[Fabric, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[T]:
        """`run_within` with a fabric timeout of 20 s and a limit of 60 s."""
        return self.run_within(world_size, function, args, kwargs, timeout=timedelta(seconds=20), limit=60.0)

    def run_within(
        self,
        world_size: int,
        function: Callable[Concatenate[Fabric, ...], T],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: timedelta,
        limit: float = 60.0,
    ) -> list[T]:
        """Call `function(fabric, *args, **kwargs)` on every rank; the results by rank.

        `function` is one of a module; `timeout` is the fabric's. After `limit` seconds the ranks
        that have not answered are killed. Raises RankFailures unless all return.
        """
        for worker in [w for w in self._workers if not w.process.is_alive()]:
            self._workers.remove(worker)
            worker.kill()
        while len(self._workers) < world_size:
            self._workers.append(_Worker())
        ranks = dict(enumerate(self._workers[:world_size]))
        for worker in ranks.values():
            worker.await_start()
        self._num_calls += 1
        failures: dict[int, RankFailure] = {}
        results: dict[int, T] = {}
        for rank, worker in ranks.items():
            call = _Call(
                function=function,
                args=args,
                kwargs=dict(kwargs or {}),
                rank=rank,
                world_size=world_size,
                timeout=timeout,
                port=self._store.port,
                prefix=f"call{self._num_calls}",
            )
            worker.pipe.send_bytes(pickle.dumps(call))
        deadline = time.monotonic() + limit
        waiting = {worker.pipe: rank for rank, worker in ranks.items()}
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                answer = self._answer(rank, pipe)
                if isinstance(answer, RankFailure):
                    failures[rank] = answer
                else:
                    results[rank] = pickle.loads(answer.result)
        for rank in waiting.values():
            failures[rank] = self._discard(rank, "ProcessWedged", f"no answer within {limit:g} s")
        self._workers = [worker for worker in self._workers if worker.is_ready]
        if failures:
            raise RankFailures(failures, results)
        return [results[rank] for rank in range(world_size)]

    def _answer(self, rank: int, pipe: Connection) -> RankFailure | _Done:
        try:
            answer: RankFailure | _Done = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            worker = self._workers[rank]
            worker.process.join(END_SECONDS)
            return self._discard(rank, "ProcessDied", f"exit code {worker.process.exitcode}")
        return answer

    def _discard(self, rank: int, kind: str, text: str) -> RankFailure:
        worker = self._workers[rank]
        worker.kill()
        worker.is_ready = False  # run_within drops it
        return RankFailure(rank=rank, kind=kind, text=text)

    def close(self) -> None:
        """End every process."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.kill()  # they have nothing to lose, and take a second to end by themselves


def _serve(pipe: Connection) -> None:
    """The life of a rank process: it ends when the pool does, or the process of the pool."""
    torch.set_num_threads(1)
    stores: dict[int, TCPStore] = {}
    pipe.send_bytes(b"ready")
    while True:
        try:
            request = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        answer = _perform(request, stores)
        gc.collect()  # the frames of an error hold connections
        pipe.send_bytes(pickle.dumps(answer))


def _perform(request: bytes, stores: dict[int, TCPStore]) -> RankFailure | _Done:
    rank = -1
    try:
        call: _Call = pickle.loads(request)
        rank = call.rank
        if call.port not in stores:
            stores[call.port] = TCPStore(HOST, call.port, is_master=False, timeout=timedelta(seconds=30))
        fabric = GlooFabric(
            PrefixStore(call.prefix, stores[call.port]),
            rank,
            call.world_size,
            timeout=call.timeout,
            hostname=HOST,
        )
        return _Done(pickle.dumps(call.function(fabric, *call.args, **call.kwargs)))
    except BaseException as error:  # the test decides what it means
        return RankFailure(
            rank=rank,
            kind=type(error).__name__,
            text=str(error),
            error=_picklable(error),
            trace="".join(traceback.format_exception(error)),
        )


def _picklable(error: BaseException) -> BaseException | None:
    try:
        copy: BaseException = pickle.loads(pickle.dumps(error))
    except Exception:
        return None
    return copy
