"""The ranks that save or load together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Final

from piper_owner.errors import CheckpointError
from piper_owner.transport.agreement import Agreement

__all__ = ["SaveHandle", "Team"]

_LONGEST: Final = timedelta(hours=1)


class Team:
    """All ranks of all pipelines of `agreement`, counted through; one process alone for None."""

    def __init__(self, agreement: Agreement | None) -> None:
        self._agreement = Agreement(None, 0) if agreement is None else agreement
        of_pipeline = 1 if self._agreement.group is None else len(self._agreement.group.ranks)
        self.rank = self._agreement.index * of_pipeline + self._agreement.rank
        """This rank among all."""

    def everyone(self, work: Callable[[], str]) -> list[str]:
        """`work()` of every rank, in order; an error on one is raised on all. Collective."""
        return [text for pipeline in self._agreement.everyone(work) for text in pipeline]

    def once(self, work: Callable[[], None]) -> None:
        """Let the first rank alone do `work`, and the others wait for it; its error is raised on all."""

        def do() -> str:
            if self.rank == 0:
                work()
            return ""

        self.everyone(do)

    def in_background(self, work: Callable[[Team], None]) -> SaveHandle:
        """Do `work` with the same ranks in a thread, over lines of its own. Collective.

        It begins when the one before it on these ranks has ended.
        """
        self.settle()
        second = self._agreement.again("checkpoint")
        handle = SaveHandle(lambda: work(Team(second)))
        self._agreement.background = handle.thread
        handle.thread.start()
        return handle

    def settle(self) -> None:
        """Wait until what was begun `in_background` has ended; its error is its handle's. Local."""
        thread, self._agreement.background = self._agreement.background, None
        if thread is not None:
            thread.join(_LONGEST.total_seconds())
            if thread.is_alive():
                raise CheckpointError(
                    f"the save before has not ended within {_LONGEST}: the file system does not answer, "
                    f"or another "
                    "rank is gone"
                )


class SaveHandle:
    """A save that goes on while the job trains."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="checkpoint")

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # raised in `wait`, in the caller's thread
            self._error = error

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not. Local."""
        return not self.thread.is_alive()

    def wait(self, timeout: timedelta = _LONGEST) -> None:
        """Wait until all ranks have written, and the checkpoint is in place. Local.

        Raises what went wrong, the same on every rank; CheckpointError when `timeout` passes.
        """
        self.thread.join(timeout.total_seconds())
        if self.thread.is_alive():
            raise CheckpointError(f"the save has not ended within {timeout.total_seconds():g} s")
        if self._error is not None:
            raise self._error
