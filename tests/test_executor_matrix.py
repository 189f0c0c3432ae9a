"""The law: training under any placement equals training one copy on one device.

A small GPT in float64, five steps. The owner run and the all-reduced copies must equal the
reference to rounding, and the copies that nobody synchronises must not. Every run goes through the
executor, over threads of this process; a few go over gloo between processes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tiny import SGD, Pipeline, batch_losses, one_torch_thread

from piper_owner.data.batches import TokenStream
from piper_owner.executor.config import SCHEDULES, RunKind, TrainConfig
from piper_owner.executor.local import train_in_process
from piper_owner.executor.plan import plan_run
from piper_owner.executor.reference import ReferenceSession
from piper_owner.executor.results import RunResult, TrainResult, collect_run, compare
from piper_owner.executor.session import RankReport, RankSession, StepReport
from piper_owner.models.gpt import GPTConfig, build_stage, lm_loss
from piper_owner.schedules import Placement, Schedule, place_stages
from piper_owner.transport.base import Fabric

if TYPE_CHECKING:
    from ranks import RankPool

STEPS = 5
VOCAB, HIDDEN, SEQUENCE, SIZE = 300, 16, 8, 2
TIE_BYTES = VOCAB * HIDDEN * 8
# Large enough for each optimizer that five steps without synchronisation show.
LEARNING_RATES = {"sgd": 0.3, "adamw": 3e-3, "adafactor": 3e-2}

# One value of each makes a combination; see `combination`.
FACTORS: dict[str, Sequence[object]] = {
    "schedule": SCHEDULES,
    "microbatches": (1, 4, 7),
    "stages": (2, 3, 4),
    "stages_per_rank": (1, 2),
    "placement": ("loop", "v"),
    "optimizer": ("sgd", "adamw", "adafactor"),
    "owner": ("auto", "first", "last"),
    "clip": (None, 0.05),
    "chunk_bytes": (1, 8 * 1024, 4 * 2**20),
    "layout": ("auto", "dense"),
}
Values = tuple[object, ...]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


def _pairs(values: Values) -> set[tuple[int, object, int, object]]:
    numbered = list(enumerate(values))
    return {(i, a, j, b) for (i, a), (j, b) in itertools.combinations(numbered, 2)}


def _sample(size: int) -> list[Values]:
    """`size` combinations in which every two values of two factors meet; always the same ones."""
    candidates = list(itertools.product(*FACTORS.values()))[::7]
    missing = set().union(*map(_pairs, itertools.product(*FACTORS.values())))
    chosen: list[Values] = []
    while missing:
        best = max(candidates, key=lambda values: len(missing & _pairs(values)))
        missing -= _pairs(best)
        chosen.append(best)
    others = [values for values in candidates if values not in chosen]
    return chosen + others[:: len(others) // (size - len(chosen))][: size - len(chosen)]


def _everything() -> list[Values]:
    """All combinations of the first six factors; the others take turns."""
    names = list(FACTORS)
    turns = itertools.cycle(itertools.product(*(FACTORS[name] for name in names[6:])))
    return [(*values, *next(turns)) for values in itertools.product(*(FACTORS[n] for n in names[:6]))]


SAMPLE = _sample(24)


def combination(values: Values) -> TrainConfig:
    """The run of one combination."""
    chosen = dict(zip(FACTORS, values, strict=True))
    stages, each = int(str(chosen["stages"])), int(str(chosen.pop("stages_per_rank")))
    return TrainConfig(
        **chosen,  # type: ignore[arg-type]
        devices=-(-stages // each),
        lr=LEARNING_RATES[str(chosen["optimizer"])],
        microbatch_size=SIZE,
        sequence_length=SEQUENCE,
        vocab=VOCAB,
        hidden=HIDDEN,
        heads=2,
        layers=4,
        dtype="float64",
        steps=STEPS,
        timeout_seconds=60.0,
    )


def name_of(values: Values) -> str:
    """The test's id."""
    return "-".join(map(str, values))


def stream_of(config: TrainConfig) -> TokenStream:
    """Random tokens, always the same."""
    return TokenStream(
        np.random.default_rng(0).integers(0, VOCAB, 4000),
        microbatches=config.microbatches,
        microbatch_size=config.microbatch_size,
        sequence_length=config.sequence_length,
    )


def check_law(config: TrainConfig, result: TrainResult) -> None:
    """Assert what every combination must show."""
    differences = compare(result.runs, result.ownership)
    for kind in (RunKind.OWNER, RunKind.ALLREDUCE):
        assert differences.loss[kind] < 1e-10
        assert differences.param[kind] < 1e-10
    assert differences.loss[RunKind.NAIVE] > 1e-4
    assert differences.param[RunKind.NAIVE] > 1e-4
    assert result.replicas_equal
    owner, reference = result.runs[RunKind.OWNER], result.runs[RunKind.REFERENCE]
    losses = owner.losses
    assert all(np.isfinite(losses))
    assert losses[0] != losses[1]
    check_bytes(config, owner, reference)
    check_copies(config, result.runs[RunKind.ALLREDUCE], reference)
    check_copies(config, result.runs[RunKind.NAIVE], reference)
    unsynchronised = result.runs[RunKind.NAIVE].bytes_sent_per_step.values()
    assert all(sent.grads == sent.weights == 0 for sent in unsynchronised)


def check_bytes(config: TrainConfig, owner: RunResult, reference: RunResult) -> None:
    """One optimizer state, and one gradient and one weight message where two ranks hold the tie.

    Of rows: the ids of the step, their rows and the gradients of those.
    """
    placement = place_stages(config.stages, config.devices, Placement(config.placement))
    first, last = placement[0], placement[-1]
    keeps_rows = config.layout == "auto" and config.owner != "first" and first != last
    owning = last if config.owner == "last" or keeps_rows else first
    num_rows = len(np.unique(stream_of(config).batch(STEPS - 1).ids))
    row_bytes = num_rows * HIDDEN * 8
    state = {rank: tied.optimizer for rank, tied in owner.tied_bytes.items()}
    one = reference.tied_bytes[0].optimizer
    assert one > 0
    assert state == {rank: one if rank == owning else 0 for rank in range(config.devices)}
    total = sum(owner.optimizer_state_bytes.values())
    assert total == reference.optimizer_state_bytes[0]
    for rank, sent in owner.bytes_sent_per_step.items():
        replicas = {first, last} - {owning}
        assert sent.grads == ((row_bytes if keeps_rows else TIE_BYTES) if rank in replicas else 0)
        assert sent.weights == (TIE_BYTES if rank == owning and replicas and not keeps_rows else 0)
        assert sent.ids == (4 * num_rows if rank == first and keeps_rows else 0)
        assert sent.rows == (row_bytes if rank == last and keeps_rows else 0)
        if rank not in (first, last):
            assert sent.total == (8 * (1 + config.devices) if config.clip and config.devices > 1 else 0)
    for rank, tied in owner.tied_bytes.items():
        if keeps_rows and rank == first:
            assert row_bytes <= tied.weights == tied.grads <= max(64, 2 * num_rows) * HIDDEN * 8
        else:
            assert tied.grads == tied.weights == (TIE_BYTES if rank in (first, last) else 0)


def check_copies(config: TrainConfig, run: RunResult, reference: RunResult) -> None:
    """Two copies, each with an optimizer state of its own."""
    placement = place_stages(config.stages, config.devices, Placement(config.placement))
    one = reference.tied_bytes[0].optimizer
    copies = [placement[0], placement[-1]]
    state = {rank: tied.optimizer for rank, tied in run.tied_bytes.items()}
    assert state == {rank: one * copies.count(rank) for rank in range(config.devices)}


def train_all(values: Values) -> tuple[TrainConfig, TrainResult]:
    """One combination with all comparisons."""
    config = combination(values)
    others = (RunKind.REFERENCE, RunKind.NAIVE, RunKind.ALLREDUCE)
    return config, train_in_process(config, stream_of(config), compare=others)


def test_sample_meets_every_pair_of_values() -> None:
    assert len(SAMPLE) == len(set(SAMPLE)) == 24
    met = set().union(*map(_pairs, SAMPLE))
    assert met == set().union(*map(_pairs, itertools.product(*FACTORS.values())))


@pytest.mark.parametrize("values", SAMPLE, ids=name_of)
def test_training_equals_one_copy(values: Values) -> None:
    check_law(*train_all(values))


@pytest.mark.slow
@pytest.mark.parametrize("values", _everything(), ids=name_of)
def test_training_equals_one_copy_everywhere(values: Values) -> None:
    check_law(*train_all(values))


def _homes() -> Iterator[tuple[str, str, int, int, float | None]]:
    """Every schedule on every home ground: one stage a rank, two placed round and round, two as a V."""
    yield from itertools.product(SCHEDULES, ("loop", "loop-2", "v"), (4, 8), (4,), (None, 0.05))


@pytest.mark.parametrize(
    "home",
    [
        # By default a fourth, in which every schedule meets every placement.
        pytest.param(home, id=name_of(home), marks=() if i % 4 == i // 4 % 4 else pytest.mark.slow)
        for i, home in enumerate(_homes())
    ],
)
def test_every_schedule_trains_right_on_every_home_ground(
    home: tuple[str, str, int, int, float | None],
) -> None:
    schedule, shape, microbatches, stages, clip = home
    each = 1 if shape == "loop" else 2
    config = combination(
        (schedule, microbatches, stages, each, shape.removesuffix("-2"), "adamw", "auto", clip, 2**20, "auto")
    )
    result = train_in_process(config, stream_of(config), compare=(RunKind.REFERENCE,))
    differences = compare(result.runs, result.ownership)
    assert differences.loss[RunKind.OWNER] < 1e-10
    assert differences.param[RunKind.OWNER] < 1e-10
    assert result.replicas_equal
    check_bytes(config, result.runs[RunKind.OWNER], result.runs[RunKind.REFERENCE])


def train_rank(
    fabric: Fabric, config: TrainConfig
) -> tuple[list[StepReport], RankReport, dict[str, NDArray[np.float64]]]:
    """What one process does; its weights come back as arrays."""
    session = RankSession(config, RunKind.OWNER, fabric)
    stream = stream_of(config)
    steps = [session.train_step(stream.batch(step)) for step in range(config.steps)]
    assert session.check()
    session.close()
    return steps, session.report(), {name: value.numpy() for name, value in session.weights().items()}


@pytest.mark.parametrize("index", [0, 1, 2, 3], ids=[name_of(SAMPLE[index]) for index in range(4)])
def test_training_over_gloo_equals_one_copy(rank_pool: RankPool, index: int) -> None:
    config = combination(SAMPLE[index])
    stream = stream_of(config)
    ranks = rank_pool.run(config.devices, train_rank, config)
    steps = [{rank: done[0][step] for rank, done in enumerate(ranks)} for step in range(STEPS)]
    weights = {
        rank: {name: torch.from_numpy(value) for name, value in done[2].items()}
        for rank, done in enumerate(ranks)
    }
    reports = {rank: done[1] for rank, done in enumerate(ranks)}
    owner = collect_run(config, RunKind.OWNER, steps, reports, weights)
    session = ReferenceSession(config)
    alone = [{0: session.train_step(stream.batch(step))} for step in range(STEPS)]
    reference = collect_run(config, RunKind.REFERENCE, alone, {0: session.report()}, {0: session.weights()})
    differences = compare(
        {RunKind.OWNER: owner, RunKind.REFERENCE: reference}, plan_run(config, RunKind.OWNER).ownership
    )
    assert differences.loss[RunKind.OWNER] < 1e-10
    assert differences.param[RunKind.OWNER] < 1e-10
    check_bytes(config, owner, reference)


@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize("chunk_bytes", [1, 4 * 2**20])
def test_v_placement_holds_one_parameter_and_sends_nothing(schedule: Schedule, chunk_bytes: int) -> None:
    model = GPTConfig(vocab_size=VOCAB, hidden=HIDDEN, layers=4, heads=2, context=SEQUENCE)
    tokens = 3 * SIZE * SEQUENCE
    pipeline = Pipeline(
        build=lambda stage: build_stage(model, stage, 4, dtype=torch.float64),
        placement=place_stages(4, 2, Placement.V),
        ties=[("embed.weight", "head.weight")],
        microbatches=3,
        schedule=schedule,
        optimizer=SGD,
        loss=lambda logits, labels: lm_loss(logits, labels, num_tokens=tokens),
        chunk_bytes=chunk_bytes,
    )
    generator = torch.Generator().manual_seed(0)
    batches = [
        tuple(torch.randint(VOCAB, (2, 3, SIZE, SEQUENCE), generator=generator).unbind()) for _ in range(3)
    ]
    split = [(list(ids), list(labels)) for ids, labels in batches]
    ranks = pipeline.run(split)
    holder = ranks[0].executor
    assert holder.exchange.lines == {}
    assert all(rank.messages == [0, 0, 0] for rank in ranks)
    assert all(sent.total == 0 for rank in ranks for sent in rank.sent)
    embed, head = holder.stages[0].module.embed, holder.stages[3].module.head
    assert isinstance(embed, torch.nn.Embedding)
    assert isinstance(head, torch.nn.Linear)
    assert embed.weight is head.weight
    assert holder.buckets["embed.weight"].parameters == (embed.weight,)
    assert "embed.weight" not in ranks[1].executor.buckets
    optimizers = {id(b.optimizer) for b in holder.buckets.values() if b.optimizer is not None}
    tied = [
        bucket
        for bucket in holder.buckets.values()
        for parameter in bucket.parameters
        if parameter is embed.weight
    ]
    assert len(tied) == 1
    assert len(optimizers) == 3
    losses, _ = pipeline.reference(split)
    assert max(abs(a - b) for a, b in zip(batch_losses(ranks), losses, strict=True)) < 1e-10
