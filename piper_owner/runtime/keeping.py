"""Where the owner run of one command is kept on disk, and what it goes on from; without ray."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from piper_owner.checkpoint import has_checkpoint, read_index
from piper_owner.errors import CheckpointError
from piper_owner.executor.config import TrainConfig
from piper_owner.executor.keeping import check_same_run, kept_losses, run_facts

__all__ = ["Keeping", "Kept"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """Where the owner run is kept: every `every` steps (None: only at its end), and whether it goes on from
    the checkpoint that is there."""

    path: Path
    every: int | None = None
    resume: bool = False

    def is_due(self, step: int, steps: int) -> bool:
        """Whether to save after `step` of `steps`, counted from 1."""
        return step == steps or (self.every is not None and step % self.every == 0)


class Kept:
    """The checkpoint of one command: what it goes on from, and what is kept with it.

    Raises CheckpointError where a checkpoint is in the way, is missing, or is of another run.
    """

    def __init__(self, keeping: Keeping, config: TrainConfig, tokens: NDArray[np.int32]) -> None:
        self.keeping = keeping
        self.path = str(keeping.path.absolute())
        digest = hashlib.blake2b(np.ascontiguousarray(tokens).data, digest_size=16).hexdigest()
        self.facts: dict[str, Any] = run_facts(config, digest)
        self._steps = config.steps
        if keeping.resume:
            self.losses()
        elif has_checkpoint(keeping.path):
            raise CheckpointError(
                f"--checkpoint {keeping.path}: there is a checkpoint already, of step "
                f"{read_index(keeping.path).step}; --resume goes on from it, or give another folder"
            )

    @property
    def is_there(self) -> bool:
        """Whether there is a checkpoint now: one to go on from, or one that this command has saved."""
        return has_checkpoint(self.keeping.path)

    def losses(self) -> tuple[float, ...]:
        """The losses of the steps before the checkpoint. Raises CheckpointError unless it is of this run."""
        index = read_index(self.keeping.path)
        check_same_run(self.keeping.path, index.extra, self.facts, self._steps)
        return kept_losses(index.extra)
