"""One rank of one run of the GPT: what an actor, or a thread, holds and is asked to do."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from piper_owner.data.batches import Batch
from piper_owner.errors import ConfigError
from piper_owner.executor.config import RunKind, TrainConfig
from piper_owner.executor.devices import finish_work, rank_device
from piper_owner.executor.keeping import Keeper
from piper_owner.executor.metering import MemoryMeter, StepMemory
from piper_owner.executor.optimizers import optimizer_factory
from piper_owner.executor.plan import plan_run
from piper_owner.executor.rank import RankExecutor
from piper_owner.executor.recording import RankRecord, Recorder, Recording, StepObserver, align_clocks
from piper_owner.executor.replicating import Replicator
from piper_owner.executor.snapshots import Shelf
from piper_owner.executor.source import GPTSource, ModelSource
from piper_owner.models.gpt import lm_loss
from piper_owner.ownership import Scope
from piper_owner.rows import RowsParameter
from piper_owner.transport.base import Fabric
from piper_owner.transport.messages import BytesSent
from piper_owner.transport.view import pipeline_views

__all__ = ["RankReport", "RankSession", "StepReport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One step on one rank: its share of the batch's loss, wall seconds, tied bytes sent."""

    loss: float
    seconds: float
    bytes_sent: BytesSent


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """Measured bytes on one rank: of the tied parameters, and of all optimizer state.

    `tied_grads` is the largest gradient that the rank had for them when its backwards were done;
    the others are as they are now. A tie whose uses on the rank are one Parameter counts once.
    """

    tied_weights: int = 0
    tied_grads: int = 0
    tied_optimizer: int = 0
    optimizer_state: int = 0


class RankSession:
    """One rank of `run`, which is not the reference, among those of all pipelines.

    Every method but `report`, `weights` and `abandon` is collective. `device` is where its stages run; None:
    the first one of the config's kind.

    Raises ConfigError when the ranks have not planned the same run.
    """

    def __init__(
        self,
        config: TrainConfig,
        run: RunKind,
        fabric: Fabric,
        source: ModelSource | None = None,
        shelf: Shelf | None = None,
        *,
        device: torch.device | None = None,
    ) -> None:
        source = GPTSource() if source is None else source
        plan = plan_run(config, run, source)
        self._config = config = plan.config
        if fabric.world_size != config.num_ranks:
            raise ConfigError(
                f"the run has {config.num_ranks} ranks (--devices {config.devices}, --dp {config.dp}), and "
                f"the job {fabric.world_size}; start one worker for each rank"
            )
        _agree(plan.digest, fabric)
        pipeline, side = pipeline_views(fabric, config.dp)
        self._plan = plan.ownership
        self._first = 0 if side is None else side.rank * config.microbatches
        self._fabric = fabric
        self._recording: Recording | None = None
        self._recorder: Recorder | None = None
        self._meter: MemoryMeter | None = None
        self._num_tokens = config.tokens_per_step
        self._check_every = config.check_every if run is RunKind.OWNER else 0  # other copies may differ
        self._device = rank_device(config) if device is None else device
        stages = plan.dag.stages_of(pipeline.rank)
        self._modules = source.build_stages(config, stages, device=str(self._device))
        self._executor = RankExecutor(
            plan.dag,
            plan.ownership,
            rank=pipeline.rank,
            stages=self._modules,
            optimizer=optimizer_factory(config.optimizer, config.learning_rate),
            loss=self._loss,
            fabric=pipeline,
            side=side,
            ports=plan.ports,
            chunk_bytes=config.chunk_bytes,
            clip=config.clip,
            copies=run is not RunKind.OWNER,
            device=self._device,
        )
        self.keeper = Keeper(self._executor, tuple(self._modules.values()), plan.ownership, fabric)
        """Saves and loads this run, which is to be that of the owner."""
        self.replicator = Replicator(
            self._executor,
            tuple(self._modules.values()),
            self.keeper,
            fabric,
            Shelf() if shelf is None else shelf,
            chunk_bytes=config.chunk_bytes,
        )
        """Takes snapshots, on the shelf that was given, and takes the run back to one."""

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        # Gradients are averaged over the pipelines: so that the mean is that of all tokens, wherever
        # they are, each pipeline counts as many times as there are pipelines.
        return lm_loss(logits, labels, num_tokens=self._num_tokens) * self._config.dp

    def train_step(self, batch: Batch) -> StepReport:
        """One optimizer step; every rank is given the same batch, and its pipeline trains on its part.

        Under `check_every` of the config, `check` follows where it is due, and is not in the seconds.
        """
        if self._recording is not None and self._executor.step >= self._recording.first_step:
            self._observe(self._recording)
        start = time.perf_counter()
        self._num_tokens = batch.num_tokens
        mine = slice(self._first, self._first + self._config.microbatches)
        ids, labels = torch.from_numpy(batch.ids[mine]), torch.from_numpy(batch.labels[mine])
        loss = self._executor.train_step(ids.unbind(0), labels.unbind(0))
        finish_work(self._device)
        seconds = time.perf_counter() - start
        sent = self._executor.take_tied_bytes_sent()
        self.keeper.note(loss / self._config.dp)
        if self._check_every and self._executor.step % self._check_every == 0:
            self.check()
        return StepReport(loss=loss / self._config.dp, seconds=seconds, bytes_sent=sent)

    def measured_step(self, batch: Batch) -> StepMemory:
        """`train_step`, and the memory that it takes. It is slower, and not for recorded steps."""
        if self._meter is None:
            self._meter = MemoryMeter(self._executor, self._modules)
        with self._meter.step() as found:
            self.train_step(batch)
        return found[0]

    def observe(self, observer: StepObserver | None) -> None:
        """Run each action of the steps from now on in `observer.around`; None ends it. Local.

        For tests that plant faults, and tools of one's own; without one a step pays nothing. `record` has
        an observer of its own.
        """
        self._executor.observer = observer

    def record(self, recording: Recording) -> None:
        """Record the steps that `recording` asks for. Local; before the first of them."""
        self._recording = recording

    def _observe(self, recording: Recording) -> None:
        if self._recorder is None:
            self._recorder = Recorder(self._executor.moved_bytes, profile=recording.profile)
            self._executor.observer = self._recorder
            self._recorder.start()

    def take_record(self) -> RankRecord:
        """What was recorded, with the times of rank 0; ends the recording. Collective.

        Raises RuntimeError when no step was.
        """
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            raise RuntimeError("no step was recorded; call record before the last step")
        self._executor.observer = self._recording = None
        # A message that torch's profiler saw begin and not end would report to it when it is gone.
        self._executor.flush()
        recorder.stop()
        clock = align_clocks(self._fabric)
        pipeline, rank = divmod(self._fabric.rank, self._config.devices)
        follows = self._config.scope == Scope.GLOBAL.value and pipeline > 0
        return recorder.finish(rank=rank, pipeline=pipeline, clock=clock, follows=follows)

    def check(self) -> bool:
        """Whether every replica is bit for bit the owner's value; raises ReplicaMismatchError if not."""
        return self._executor.check()

    def report(self) -> RankReport:
        """The memory of this rank. Local."""
        executor = self._executor
        tied_names = {name for tie in self._plan.ties for name in tie.tie.names}
        tied = [bucket for name, bucket in executor.buckets.items() if name in tied_names]
        return RankReport(
            tied_weights=sum(bucket.weight_bytes for bucket in tied),
            tied_grads=sum(executor.peak_grad_bytes[bucket.name] for bucket in tied),
            tied_optimizer=sum(bucket.optimizer_bytes for bucket in tied),
            optimizer_state=sum(bucket.optimizer_bytes for bucket in executor.buckets.values()),
        )

    def weights(self) -> dict[str, Tensor]:
        """This rank's parameters by their names in the full model, copied to the CPU. Local.

        A table of which it keeps rows only is not among them: its owner has it.
        """
        return {
            name: parameter.detach().cpu().clone()
            for module in self._modules.values()
            for name, parameter in module.named_parameters(remove_duplicate=False)
            if not isinstance(parameter, RowsParameter)
        }

    def close(self) -> None:
        """Finish all sends and close every line. Twice is fine."""
        self.replicator.close()
        self.keeper.close()
        self._executor.close()

    def abandon(self) -> None:
        """Close every line after a failure, whatever is on its way. Local; twice is fine."""
        self.replicator.abandon()
        self.keeper.close()
        self._executor.abandon()


def _agree(digest: str, fabric: Fabric) -> None:
    """Compare the plan's digest over all ranks."""
    if fabric.world_size == 1:
        return
    ranks = tuple(range(fabric.world_size))
    group = fabric.group(ranks, "agreement")
    words = torch.zeros(fabric.world_size, 4, dtype=torch.int64, device="cpu")
    words[fabric.rank] = torch.tensor([int(digest[i : i + 8], 16) for i in range(0, 32, 8)], device="cpu")
    group.all_reduce(words)
    group.close()
    different = [rank for rank in ranks if not torch.equal(words[rank], words[fabric.rank])]
    if different:
        raise ConfigError(
            f"rank {fabric.rank} and the ranks {different} have planned different runs; start every rank "
            "with the same options and the same version of piper-owner"
        )
