"""Keeps one rank of a run in a checkpoint, with the losses so far, and takes it up again."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from torch import nn

from piper_owner.checkpoint.holding import Holding, held_by
from piper_owner.checkpoint.loading import Loader
from piper_owner.checkpoint.saving import Saver
from piper_owner.checkpoint.team import Team
from piper_owner.dag.text import format_dag
from piper_owner.errors import CheckpointError
from piper_owner.executor.config import TrainConfig
from piper_owner.executor.randomness import set_random_states, states_from_text, states_to_text
from piper_owner.executor.rank import RankExecutor
from piper_owner.ownership import OwnershipPlan
from piper_owner.transport.agreement import Agreement
from piper_owner.transport.base import Fabric

__all__ = ["Keeper", "check_same_run", "joined_losses", "kept_losses", "run_facts"]

_MATTERS: Final = (
    *("model", "vocab", "hidden", "layers", "heads", "optimizer", "lr", "clip", "dtype", "seed"),
    "sequence_length",
)


def run_facts(config: TrainConfig, tokens: str) -> dict[str, Any]:
    """What two runs must have in common for one to go on where the other stopped; `tokens` is a digest."""
    facts = {name: getattr(config, name) for name in _MATTERS}
    return {**facts, "sequences": config.all_microbatches * config.microbatch_size, "tokens": tokens}


def check_same_run(path: Path, kept: Mapping[str, Any], facts: Mapping[str, Any], steps: int) -> None:
    """Raise CheckpointError unless a run with `facts` can go on from the checkpoint in `path`. Pure."""
    found = kept.get("run")
    if not isinstance(found, dict):
        raise CheckpointError(f"--checkpoint {path}: piper-owner train has not written it")
    unlike = sorted(name for name, value in facts.items() if found.get(name) != value)
    if unlike:
        what = ", ".join(f"{name} ({found.get(name)!r} there, {facts[name]!r} here)" for name in unlike)
        raise CheckpointError(
            f"--checkpoint {path}: --resume goes on with the same model, data and optimizer, and these "
            f"differ: {what}; stages, devices, schedule, owner and layout may"
        )
    done = len(kept_losses(kept))
    if done > steps:
        raise CheckpointError(
            f"--checkpoint {path}: it is of step {done}, behind the last one of --steps {steps}; give "
            "more steps"
        )


def kept_losses(kept: Mapping[str, Any]) -> tuple[float, ...]:
    """The losses of the steps before a checkpoint, from what was kept with it."""
    losses = kept.get("losses")
    if not isinstance(losses, list) or not all(isinstance(loss, float) for loss in losses):
        raise CheckpointError("the checkpoint has no list of losses; piper-owner train has not written it")
    return tuple(losses)


def joined_losses(before: Sequence[float], shares: Iterable[Sequence[float]]) -> tuple[float, ...]:
    """The losses of the batches: those `before`, and the sums of what the ranks had of each since then."""
    return (*before, *(math.fsum(each) for each in zip(*shares, strict=True)))


class Keeper:
    """Saves and loads what `executor` and its `modules` have. `save`, `load`, `together` are collective."""

    def __init__(
        self, executor: RankExecutor, modules: Sequence[nn.Module], plan: OwnershipPlan, fabric: Fabric
    ) -> None:
        self._executor, self._modules, self._plan = executor, modules, plan
        self._fabric = fabric
        self._team: Team | None = None
        self._agreement: Agreement | None = None
        self._losses: list[float] = []
        self._before: tuple[float, ...] = ()

    @property
    def losses(self) -> tuple[list[float], list[float]]:
        """The losses of the steps before this rank began, and its share of those since. Local."""
        return list(self._before), list(self._losses)

    def go_on(self, losses: Sequence[Sequence[float]]) -> None:
        """Go on from what `losses` gave. Local."""
        self._before, self._losses = tuple(losses[0]), list(losses[1])

    def together(self, work: Callable[[], str]) -> None:
        """Do `work` on every rank; an error on one is raised on all, when all have done it. Collective."""
        self._ranks().everyone(work)

    def note(self, loss: float) -> None:
        """This rank's share of the loss of a step that was taken. Local."""
        self._losses.append(loss)

    def save(self, path: str, facts: Mapping[str, Any]) -> None:
        """Save after the last step; see `checkpoint.save`."""
        team = self._ranks()
        told = team.everyone(lambda: json.dumps([self._losses, states_to_text()]))
        answers = [json.loads(text) for text in told]
        extra = {
            "run": dict(facts),
            "losses": list(joined_losses(self._before, (losses for losses, _ in answers))),
            "random": {"program": self._program(), "states": [states for _, states in answers]},
        }
        self._executor.flush()
        saver = Saver(Path(path), self._executor.step, extra)
        saver.plan(team, self._holding, check=self._executor.check)
        saver.write(team)

    def load(self, path: str) -> tuple[float, ...]:
        """Go on from the checkpoint in `path`, and give the losses of its steps; see `checkpoint.load`."""
        loader = Loader(Path(path))
        loader.read(self._ranks(), self._holding, strict=True)
        loader.fill()
        for optimizer, state in zip(self._holding().optimizers, loader.state_dicts(), strict=True):
            optimizer.load_state_dict(state)
        self._before = kept_losses(loader.index.extra)
        self._executor.resume(loader.index.step)
        self._draw_on(loader.index.extra.get("random"))
        return self._before

    def _program(self) -> str:
        """A digest of what all ranks do: two jobs with the same one draw the same random values in a step."""
        text = f"{self._fabric.world_size}\n{format_dag(self._executor.dag)}"
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def _draw_on(self, kept: object) -> None:
        """Draw random values from where a job of the same program was; another one draws others."""
        if not isinstance(kept, dict) or kept.get("program") != self._program():
            return
        states = kept.get("states")
        if isinstance(states, list) and len(states) == self._fabric.world_size:
            set_random_states(states_from_text(states[self._fabric.rank]) or {})

    def close(self) -> None:
        """Give the lines up. Local; twice is fine."""
        if self._agreement is not None:
            self._agreement.close()

    def _ranks(self) -> Team:
        if self._team is None:
            self._agreement = Agreement.over(self._fabric, "checkpoint")
            self._team = Team(self._agreement)
        return self._team

    def _holding(self) -> Holding:
        executor = self._executor
        found = (bucket.optimizer for bucket in executor.buckets.values())
        return held_by(
            self._modules,
            self._plan.ties,
            [tie.name for tie in self._plan.ties if tie.owner == executor.rank],
            optimizers=[optimizer for optimizer in found if optimizer is not None],
            follows=self._fabric.rank != executor.rank,
        )
