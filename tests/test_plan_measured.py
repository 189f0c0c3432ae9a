"""Predicted bytes against those that runs in this process measure."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pytest
import torch
from plan_cases import gpt_shapes, plan_config

from piper_owner.cost import table_capacity
from piper_owner.data.batches import TokenStream
from piper_owner.executor.config import RunKind, TrainConfig
from piper_owner.executor.local import train_in_process
from piper_owner.models.gpt import GPTConfig, build_stage, lm_loss
from piper_owner.planning.compare import compare_methods
from piper_owner.planning.config import Method, Optimizer, PlanConfig
from piper_owner.planning.memory import activation_bytes, rank_memory, stepped_memory
from piper_owner.planning.seconds import Pipelines
from piper_owner.planning.shapes import ModelShapes, count
from piper_owner.schedules import Placement, Schedule

MODELS: Final[tuple[dict[str, Any], ...]] = (
    {"stages": 2, "vocab": 300, "hidden": 16, "layers": 2, "heads": 2, "optimizer": "adamw"},
    {"stages": 4, "vocab": 2000, "hidden": 24, "layers": 4, "heads": 3, "optimizer": "adam"},
    {"stages": 3, "vocab": 257, "hidden": 8, "layers": 3, "heads": 1, "optimizer": "sgd"},
    {"stages": 2, "vocab": 512, "hidden": 32, "layers": 1, "heads": 4, "optimizer": "adafactor"},
)
KINDS: Final = {
    Method.NAIVE: RunKind.NAIVE,
    Method.ALL_REDUCE: RunKind.ALLREDUCE,
    Method.DENSE: RunKind.OWNER,
    Method.ROWS: RunKind.OWNER,
}
STEPS: Final = 2
LENGTH: Final = 16


def planned(model: dict[str, Any], **changes: Any) -> tuple[ModelShapes, PlanConfig]:  # noqa: ANN401
    sizes = {name: model[name] for name in ("vocab", "hidden", "layers", "heads")}
    config = plan_config(
        stages=model["stages"],
        microbatches=4,
        tokens=4 * 2 * LENGTH,
        sequence=LENGTH,
        optimizer=Optimizer(model["optimizer"]),
        master_dtype=None,
        **changes,
    )
    return gpt_shapes(model["stages"], context=LENGTH, **sizes), config


def tied_of(shapes: ModelShapes, config: PlanConfig, method: Method) -> dict[str, dict[int, Any]]:
    """Predicted bytes of ties and of all optimizer state, by rank: with the ties, less without them."""
    plan = compare_methods(shapes, config).plans[method]
    bare = rank_memory(
        ModelShapes(name="", hidden=shapes.hidden, stages=shapes.stages, ties=()),
        Pipelines.of(shapes, config).placement,
        type(plan.ownership)(world_size=config.devices, ties=()),
        method,
        config,
        stages=[stepped_memory(stage.shapes, config) for stage in shapes.stages],
        activations={},
    )
    return {
        "state": {rank: memory.masters + memory.optimizer for rank, memory in plan.memory.items()},
        "tied": {
            rank: (
                memory.weights + memory.rows - bare[rank].weights,
                memory.gradients - bare[rank].gradients,
                memory.masters + memory.optimizer - bare[rank].masters - bare[rank].optimizer,
            )
            for rank, memory in plan.memory.items()
        },
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model["optimizer"])
def test_bytes_of_every_method_are_those_of_a_run(model: dict[str, Any], dtype: str) -> None:
    stream = TokenStream(
        np.random.default_rng(0).integers(0, model["vocab"], 4000),
        microbatches=4,
        microbatch_size=2,
        sequence_length=LENGTH,
    )
    used = [len(np.unique(stream.batch(step).ids)) for step in range(STEPS)]
    capacity = 0
    for num_rows in used:
        capacity = table_capacity(num_rows, before=capacity)
    assert capacity == table_capacity(used[-1]), "these texts do not shrink the table"
    shapes, config = planned(model, num_rows=used[-1], dtype=dtype)
    results = {}
    for layout in ("dense", "rows"):
        trained = TrainConfig(
            **model,
            microbatches=4,
            microbatch_size=2,
            sequence_length=LENGTH,
            dtype=dtype,
            steps=STEPS,
            layout=layout,
            owner="auto",
            timeout_seconds=30,
        )
        compare = (RunKind.NAIVE, RunKind.ALLREDUCE) if layout == "dense" else ()
        results[layout] = train_in_process(trained, stream, compare=compare)
    for method, kind in KINDS.items():
        result = results["rows" if method is Method.ROWS else "dense"]
        run = result.runs[kind]
        predicted = tied_of(shapes, config, method)
        if method is Method.DENSE:
            owner = result.ownership.ties[0].owner
            assert compare_methods(shapes, config).plans[method].owners == (owner,)
        measured = {rank: (tied.weights, tied.grads, tied.optimizer) for rank, tied in run.tied_bytes.items()}
        assert predicted["tied"] == measured, method
        assert predicted["state"] == dict(run.optimizer_state_bytes), method
        sent = run.bytes_sent_per_step
        traffic = compare_methods(shapes, config).plans[method].traffic
        for rank, mine in traffic.items():
            assert (mine.ids, mine.rows, mine.grads, mine.weights) == (
                (sent[rank].ids, sent[rank].rows, sent[rank].grads, sent[rank].weights)
            ), (method, rank)
            if method in (Method.DENSE, Method.ROWS):
                assert mine.headers == sent[rank].other, (method, rank)


def test_weights_of_untied_tensors_are_those_of_the_modules() -> None:
    shapes, config = planned(MODELS[1], num_rows=64, dtype="float32")
    plan = compare_methods(shapes, config).plans[Method.DENSE]
    gpt = GPTConfig(vocab_size=2000, hidden=24, layers=4, heads=3, context=LENGTH)
    for rank in range(4):
        module = build_stage(gpt, rank, 4, device="meta")
        held = sum(parameter.nbytes for parameter in module.parameters())
        assert plan.memory[rank].weights == plan.memory[rank].gradients == held


@pytest.mark.parametrize("stage", [0, 1])
def test_activations_are_about_what_autograd_saves(stage: int) -> None:
    vocab, hidden, layers, batch = 300, 64, 4, 2
    gpt = GPTConfig(vocab_size=vocab, hidden=hidden, layers=layers, heads=4, context=LENGTH)
    module = build_stage(gpt, stage, 2)
    weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.arange(batch * LENGTH).view(batch, LENGTH) % vocab
    given = ids if stage == 0 else torch.randn(batch, LENGTH, hidden, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = module(given)
        if stage == 1:
            output = lm_loss(output, ids, num_tokens=ids.numel())
    shapes = gpt_shapes(2, vocab=vocab, hidden=hidden, layers=layers, heads=4, context=LENGTH)
    config = plan_config(
        stages=2, microbatches=1, tokens=batch * LENGTH, dtype="float32", schedule=Schedule.GPIPE
    )
    dag = Pipelines.of(shapes, config).copied
    predicted = activation_bytes(shapes, dag.programs, config)[stage]
    assert predicted == pytest.approx(sum(kept.values()), rel=0.1)
    assert output is not None


def test_activations_in_flight_follow_the_schedule() -> None:
    shapes = gpt_shapes(4, vocab=300, hidden=16, layers=4, heads=2, context=LENGTH)
    found = {}
    for schedule in (Schedule.GPIPE, Schedule.ONE_F_ONE_B):
        config = plan_config(schedule=schedule, tokens=8 * LENGTH)
        found[schedule] = activation_bytes(shapes, Pipelines.of(shapes, config).copied.programs, config)
    one = {
        rank: activation_bytes(
            shapes,
            Pipelines.of(shapes, plan_config(microbatches=1, tokens=LENGTH)).copied.programs,
            plan_config(microbatches=1, tokens=LENGTH),
        )[rank]
        for rank in range(4)
    }
    assert found[Schedule.GPIPE] == {rank: 8 * one[rank] for rank in range(4)}
    assert found[Schedule.ONE_F_ONE_B] == {rank: (4 - rank) * one[rank] for rank in range(4)}


def test_two_copies_on_one_device_are_one_parameter() -> None:
    shapes, _ = planned(MODELS[1])
    config = plan_config(stages=4, placement=Placement.V, tokens=64)
    plans = compare_methods(shapes, config).plans
    table = count([(2000, 24)]) * config.itemsize
    assert plans[Method.NAIVE].memory[0].weights - plans[Method.DENSE].memory[0].weights == table
    assert plans[Method.DENSE].messages == 0
    assert Method.ROWS not in plans
