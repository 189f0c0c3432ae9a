"""Two processes that the checks run in, so that one that crashes or hangs takes no other with it."""

from __future__ import annotations

import gc
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import torch
from torch._C._distributed_c10d import FileStore, PrefixStore

from piper_owner.gpu_check.sizes import Sizes
from piper_owner.transport.base import Fabric
from piper_owner.transport.gloo import GlooFabric

__all__ = ["Crew", "CrewError", "Rank"]

_HOST: Final = "127.0.0.1"
_START: Final = 180.0
_END: Final = 10.0
_TIMEOUT: Final = timedelta(seconds=60)


class CrewError(Exception):
    """What failed in the processes, with the words of each."""


@dataclass(frozen=True, slots=True)
class Rank:
    """What a check's function gets: its rank, the lines to the others, the device and the sizes.

    `folder` is shared, and lasts as long as the crew.
    """

    fabric: Fabric
    device: torch.device
    sizes: Sizes
    folder: Path

    @property
    def rank(self) -> int:
        """The number of this process."""
        return self.fabric.rank

    @property
    def is_cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"


@dataclass(frozen=True, slots=True)
class _Call:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    rank: int
    world_size: int
    store: str


class _Worker:
    def __init__(self, folder: Path, device: str, sizes: Sizes) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe: Connection
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(
            target=_serve, args=(theirs, str(folder), device, sizes), daemon=True
        )
        self.process.start()
        theirs.close()
        self.is_ready = False

    def kill(self) -> None:
        """Kill the process, by its own id, and wait for its end."""
        self.process.kill()
        self.process.join(_END)
        self.pipe.close()


class Crew:
    """Runs functions on one rank or two, on `device` ("cuda:0", "cpu"); both share a GPU."""

    def __init__(self, device: str, sizes: Sizes) -> None:
        self._device, self._sizes = device, sizes
        self._folder = tempfile.TemporaryDirectory(prefix="piper-owner-gpu-")
        self._workers: dict[int, _Worker] = {}
        self._num_calls = 0

    def start(self, num: int) -> None:
        """Have `num` processes, which import torch meanwhile."""
        for rank in range(num):
            if rank not in self._workers:
                self._workers[rank] = _Worker(Path(self._folder.name), self._device, self._sizes)

    def run(self, num: int, function: Callable[..., Any], *args: Any, limit: float) -> list[Any]:  # noqa: ANN401
        """`function(Rank, *args)` on `num` ranks; what each returned. It is one of a module.

        Raises CrewError unless all have returned within `limit` seconds. Then none of these processes
        is used again: a GPU that was misused answers no other question either.
        """
        self.start(num)
        self._await_start(num)
        self._num_calls += 1
        for rank in range(num):
            store = str(Path(self._folder.name) / f"store{self._num_calls}")
            self._workers[rank].pipe.send(_Call(function, args, rank, num, store))
        deadline = time.monotonic() + limit
        answers = [self._answer(rank, deadline) for rank in range(num)]
        wrong = [f"rank {rank}: {text}" for rank, (is_done, text) in enumerate(answers) if not is_done]
        if wrong:
            for rank in range(num):
                self._workers.pop(rank).kill()
            raise CrewError("\n".join(wrong))
        return [result for _, result in answers]

    def _await_start(self, num: int) -> None:
        for rank in range(num):
            worker = self._workers[rank]
            if not worker.is_ready:
                is_ready, text = self._answer(rank, time.monotonic() + _START)
                if not is_ready:
                    self._workers.pop(rank).kill()
                    raise CrewError(f"rank {rank} did not start: {text}")
                worker.is_ready = True

    def _answer(self, rank: int, deadline: float) -> tuple[bool, Any]:
        worker = self._workers[rank]
        try:
            if worker.pipe.poll(max(0.0, deadline - time.monotonic())):
                answer: tuple[bool, Any] = worker.pipe.recv()
                return answer
        except (EOFError, OSError):
            worker.process.join(_END)
            return False, f"the process has ended with exit code {worker.process.exitcode}"
        return False, "no answer in time"

    def close(self) -> None:
        """End the processes and remove their folder. Twice is fine."""
        for worker in self._workers.values():
            worker.kill()
        self._workers.clear()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _serve(pipe: Connection, folder: str, device: str, sizes: Sizes) -> None:
    """The life of a process: it ends when the crew does."""
    if device == "cpu":
        torch.set_num_threads(1)
    pipe.send((True, None))
    while True:
        try:
            call: _Call = pipe.recv()
        except (EOFError, OSError):
            return
        pipe.send(_perform(call, Path(folder), torch.device(device), sizes))
        gc.collect()  # the frames of an error hold connections
        if device != "cpu":
            torch.cuda.empty_cache()


def _perform(call: _Call, folder: Path, device: torch.device, sizes: Sizes) -> tuple[bool, Any]:
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        store = PrefixStore("check", FileStore(call.store, call.world_size))
        fabric = GlooFabric(store, call.rank, call.world_size, timeout=_TIMEOUT, hostname=_HOST)
        return True, call.function(Rank(fabric, device, sizes, folder), *call.args)
    except BaseException as error:  # the check that failed says so
        return False, "".join(traceback.format_exception_only(error)).strip() + "\n" + traceback.format_exc()
