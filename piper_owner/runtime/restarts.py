"""How often the runs of one command may begin again, and how often they did; without ray."""

from __future__ import annotations

from piper_owner.errors import RunError
from piper_owner.executor.results import Restart
from piper_owner.runtime.progress import OnRestart

__all__ = ["Restarts"]


class Restarts:
    """The restarts of one command: at most `most` over all of its runs. `on_restart` is told of each."""

    def __init__(self, most: int, on_restart: OnRestart | None) -> None:
        self.most = most
        self.made: list[Restart] = []
        self._on_restart = on_restart

    def refuse_more(self, failure: RunError) -> None:
        """Raise `failure`, saying so, if there have been as many as there may be."""
        if len(self.made) < self.most:
            return
        if self.most:
            times = "once" if self.most == 1 else f"{self.most} times"
            failure.args = (f"{failure}; it was restarted {times} before this (--max-restarts {self.most})",)
        raise failure

    def note(self, restart: Restart) -> None:
        """Count one more, and tell of it."""
        self.made.append(restart)
        if self._on_restart is not None:
            self._on_restart(restart)
