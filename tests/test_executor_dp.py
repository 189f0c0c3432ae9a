"""Several equal pipelines side by side, and one owner in each or in all, against one process."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

import numpy as np
import pytest
import torch
from tiny import one_torch_thread
from torch import nn

from piper_owner.dag.graph import TrainingDAG
from piper_owner.dag.nodes import Across, AcrossKind, Action, Sync, SyncKind, parse_action
from piper_owner.dag.pipelines import insert_data_parallel
from piper_owner.dag.rules import Level, check_rules
from piper_owner.dag.text import format_dag, parse_dag
from piper_owner.errors import ConfigError, DagError, RuleViolationError
from piper_owner.executor.averaging import average_grads, share_values
from piper_owner.executor.config import RunKind, TrainConfig
from piper_owner.executor.local import run_threads, train_in_process
from piper_owner.executor.plan import plan_run
from piper_owner.executor.rank import RankExecutor
from piper_owner.executor.results import TrainResult, compare
from piper_owner.executor.session import RankSession
from piper_owner.executor.stream import token_stream
from piper_owner.simulate import simulate
from piper_owner.transport import Fabric, pipeline_views

TOKENS: Final = np.random.default_rng(0).integers(0, 256, 4000).astype(np.int32)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


def config_of(**changes: Any) -> TrainConfig:  # noqa: ANN401 - the fields of a config
    small: dict[str, Any] = {
        "stages": 4, "devices": 2, "dp": 2, "microbatches": 4, "microbatch_size": 1, "sequence_length": 8,
        "vocab": 256, "hidden": 8, "heads": 2, "layers": 2, "steps": 3, "dtype": "float64",
        "timeout_seconds": 20,
    }  # fmt: skip
    return TrainConfig(**{**small, **changes})


def train(config: TrainConfig, *others: RunKind) -> TrainResult:
    return train_in_process(config, token_stream(config, TOKENS), compare=(RunKind.REFERENCE, *others))


def check_equal(result: TrainResult) -> None:
    differences = compare(result.runs, result.ownership)
    assert differences.loss[RunKind.OWNER] <= 1e-10
    assert differences.param[RunKind.OWNER] <= 1e-10
    assert result.replicas_equal


MATRIX: Final = list(
    itertools.product(
        (("loop", 2, 2), ("loop", 4, 2), ("v", 4, 2), ("loop", 1, 1)),
        ("gpipe", "1f1b", "zbv"),
        (("pipeline", "auto"), ("pipeline", "dense"), ("global", "auto")),
        ("adamw", "sgd", "adafactor"),
        (None, 0.5),
        (2, 3),
    )
)
SAMPLE: Final = frozenset(range(0, len(MATRIX), 37))


@pytest.mark.parametrize(
    "case", [pytest.param(i, marks=() if i in SAMPLE else pytest.mark.slow) for i in range(len(MATRIX))]
)
def test_pipelines_side_by_side_train_as_one_process(case: int) -> None:
    (placement, stages, devices), schedule, (scope, layout), optimizer, clip, dp = MATRIX[case]
    config = config_of(
        placement=placement, stages=stages, devices=devices, schedule=schedule, scope=scope, layout=layout,
        optimizer=optimizer, clip=clip, dp=dp,
    )  # fmt: skip
    check_equal(train(config))


@pytest.mark.parametrize(
    ("scope", "layout", "owners"),
    [("pipeline", "auto", [1, 3]), ("pipeline", "dense", [0, 2]), ("global", "auto", [0])],
)
def test_one_owner_in_each_pipeline_or_in_the_whole_job(scope: str, layout: Any, owners: list[int]) -> None:  # noqa: ANN401 - a word
    result = train(config_of(scope=scope, layout=layout), RunKind.ALLREDUCE)
    check_equal(result)
    held = {rank for rank, tied in result.runs[RunKind.OWNER].tied_bytes.items() if tied.optimizer}
    assert sorted(held) == owners
    assert all(tied.optimizer for tied in result.runs[RunKind.ALLREDUCE].tied_bytes.values())
    json = result.to_json()
    assert sorted(json["runs"]["owner"]["bytes_sent_per_step"]) == ["0", "1", "2", "3"]
    assert (json["config"]["dp"], json["config"]["scope"]) == (2, scope)


def test_a_tie_with_one_owner_crosses_the_pair_in_the_lead_pipeline_alone() -> None:
    config = config_of(scope="global")
    sent = train(config).runs[RunKind.OWNER].bytes_sent_per_step
    table = config.vocab * config.hidden * 8
    # Rank 1 is the lead's replica: its gradient goes to the owner, rank 0, which broadcasts the weights
    # to rank 2 and sends them to rank 1, which broadcasts them to rank 3. Ranks 2 and 3 reduce theirs.
    assert {rank: bytes_.grads for rank, bytes_ in sent.items()} == {0: 0, 1: table, 2: table, 3: table}
    assert {rank: bytes_.weights for rank, bytes_ in sent.items()} == {0: 2 * table, 1: table, 2: 0, 3: 0}


def test_bytes_do_not_depend_on_the_number_of_microbatches() -> None:
    for scope in ("pipeline", "global"):
        one, four = (
            train(config_of(scope=scope, layout="dense", microbatches=count)).runs[RunKind.OWNER]
            for count in (1, 4)
        )
        assert one.bytes_sent_per_step == four.bytes_sent_per_step


def test_rows_and_one_owner_for_all_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="--layout rows with --scope global and --dp 2"):
        config_of(scope="global", layout="rows")
    assert config_of(scope="global", layout="rows", dp=1).dp == 1


# -- the TrainingDAG


def texts(dag: TrainingDAG, rank: int) -> list[str]:
    return [repr(action) for action in dag.programs[rank] if isinstance(action, Across | Sync)]


def test_the_nodes_of_one_owner_for_all() -> None:
    dag = plan_run(config_of(scope="global", stages=2), RunKind.OWNER).dag
    assert dag.num_pipelines == 2
    assert texts(dag, 0) == [
        "DP_REDUCE[embed.weight]",
        "DP_ALL_REDUCE[stage0]",
        "RECV_GRAD[embed.weight]<-1",
        "OWNER_STEP[embed.weight]",
        "SEND_WEIGHT[embed.weight]->1",
        "DP_BROADCAST[embed.weight]",
    ]
    assert texts(dag, 1) == [
        "DP_REDUCE[embed.weight]",
        "SEND_GRAD[embed.weight]->0",
        "DP_ALL_REDUCE[stage1]",
        "RECV_WEIGHT[embed.weight]<-0",
        "DP_BROADCAST[embed.weight]",
    ]


def test_the_nodes_of_an_owner_in_each_pipeline() -> None:
    dag = plan_run(config_of(stages=2, layout="dense"), RunKind.OWNER).dag
    assert [t for t in texts(dag, 0) if t.startswith("DP")] == ["DP_ALL_REDUCE[stage0]"]
    one = plan_run(config_of(stages=2, layout="dense", dp=1), RunKind.OWNER).dag
    assert not any(isinstance(action, Across) for program in one.programs for action in program)
    assert one.num_pipelines == 1


@pytest.mark.parametrize("scope", ["pipeline", "global"])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_the_text_form_parses_back(scope: str, clip: float | None) -> None:
    dag = plan_run(config_of(scope=scope, clip=clip), RunKind.OWNER).dag
    text = format_dag(dag)
    assert text.startswith("training_dag ranks=2 microbatches=4 pipelines=2\n")
    assert parse_dag(text) == dag
    assert simulate(dag).makespan > 0
    dag.topological_order()


def broken(dag: TrainingDAG, rank: int, change: Any) -> TrainingDAG:  # noqa: ANN401 - a function of a program
    programs = [list(program) for program in dag.programs]
    change(programs[rank])
    return dataclasses.replace(dag, programs=tuple(map(tuple, programs)))


def drop(kind: AcrossKind) -> Any:  # noqa: ANN401 - a function of a program
    def change(program: list[Action]) -> None:
        program.remove(next(a for a in program if isinstance(a, Across) and a.kind is kind))

    return change


def to_front(text: str) -> Any:  # noqa: ANN401 - a function of a program
    def change(program: list[Action]) -> None:
        action = parse_action(text)
        program.remove(action)
        program.insert(0, action)

    return change


def to_end(text: str) -> Any:  # noqa: ANN401 - a function of a program
    def change(program: list[Action]) -> None:
        action = parse_action(text)
        program.remove(action)
        program.append(action)

    return change


@pytest.mark.parametrize(
    ("rank", "change"),
    [
        *((rank, drop(kind)) for rank in (0, 1) for kind in AcrossKind),
        (0, to_front("DP_ALL_REDUCE[stage0]")),
        (0, to_end("DP_ALL_REDUCE[stage0]")),
        (1, to_front("DP_REDUCE[embed.weight]")),
        (1, to_end("DP_REDUCE[embed.weight]")),
        (0, to_front("DP_BROADCAST[embed.weight]")),
        (1, lambda program: program.append(parse_action("DP_ALL_REDUCE[embed.weight]"))),
        (1, lambda program: program.append(parse_action("DP_REDUCE[nothing]"))),
        (1, lambda program: program.append(parse_action("DP_BROADCAST[embed.weight]"))),
    ],
)
def test_a_program_that_does_not_average_is_caught(rank: int, change: Any) -> None:  # noqa: ANN401 - a function
    dag = plan_run(config_of(scope="global", stages=2), RunKind.OWNER).dag
    check_rules(dag, Level.EXECUTABLE)
    with pytest.raises(RuleViolationError, match="averaged over pipelines"):
        check_rules(broken(dag, rank, change), Level.EXECUTABLE)


def test_nodes_of_several_pipelines_in_a_single_one_are_caught() -> None:
    dag = plan_run(config_of(scope="global", stages=2), RunKind.OWNER).dag
    with pytest.raises(RuleViolationError, match=r"1 pipeline\(s\) run this program"):
        check_rules(dataclasses.replace(dag, num_pipelines=1), Level.EXECUTABLE)


def test_the_pass_runs_once_and_not_over_rows() -> None:
    rows = plan_run(config_of(dp=1), RunKind.OWNER).dag
    assert any(isinstance(a, Sync) and a.kind is SyncKind.SEND_ROWS for p in rows.programs for a in p)
    with pytest.raises(DagError, match="plan them with layout='dense' or scope='pipeline'"):
        insert_data_parallel(rows, 2, one_owner=True)
    assert insert_data_parallel(rows, 1, one_owner=True) == rows
    with pytest.raises(DagError, match="run it once"):
        insert_data_parallel(insert_data_parallel(rows, 2, one_owner=False), 2, one_owner=False)


# -- its parts


def test_gradients_are_averaged_and_none_counts_as_zeros_unless_all_are_none() -> None:
    def work(fabric: Fabric) -> list[torch.Tensor | None]:
        group = fabric.group((0, 1), "gradients")
        dtypes = (torch.float64, torch.float64, torch.bfloat16, torch.float32)
        parameters = [nn.Parameter(torch.zeros(3, 2, dtype=dtype)) for dtype in dtypes]
        parameters[0].grad = torch.full((2, 3), float(fabric.rank + 1), dtype=torch.float64).T
        if fabric.rank == 1:
            parameters[2].grad = torch.full((3, 2), 3.0, dtype=torch.bfloat16)
        parameters[3].grad = torch.eye(3, 2).to_sparse() if fabric.rank else torch.eye(3, 2)
        average_grads(parameters, group, fabric.rank, 0)
        average_grads([], group, fabric.rank, 0)
        return [p.grad for p in parameters]

    for grads in run_threads(2, work, timeout=timedelta(seconds=10)):
        assert grads[0] is not None
        assert torch.equal(grads[0], torch.full((3, 2), 1.5, dtype=torch.float64))
        assert grads[1] is None
        assert grads[2] is not None
        assert torch.equal(grads[2], torch.full((3, 2), 1.5, dtype=torch.bfloat16))
        assert grads[3] is not None
        assert torch.equal(grads[3], torch.eye(3, 2))


def test_all_pipelines_start_from_the_values_of_the_first() -> None:
    def work(fabric: Fabric) -> torch.Tensor:
        parameter = nn.Parameter(torch.full((4,), -0.0 if fabric.rank == 0 else 7.0, dtype=torch.bfloat16))
        share_values([parameter], fabric.group((0, 1, 2), "values"))
        return parameter.detach().view(torch.int16)

    first, *others = run_threads(3, work, timeout=timedelta(seconds=10))
    assert all(torch.equal(first, other) for other in others)


def test_views_of_a_job_of_several_pipelines() -> None:
    def work(fabric: Fabric) -> tuple[int, int, int, int, float]:
        pipeline, side = pipeline_views(fabric, 3)
        assert side is not None
        total = torch.tensor([float(fabric.rank)])
        group = side.group(tuple(range(3)), "sum")
        group.broadcast(total, 2)
        return pipeline.rank, pipeline.world_size, side.rank, side.job_rank, float(total)

    found = run_threads(6, work, timeout=timedelta(seconds=10))
    assert found == [(r % 2, 2, r // 2, r, 4.0 + r % 2) for r in range(6)]


def test_a_failing_rank_is_named_by_its_number_in_the_job() -> None:
    config = config_of(stages=2, timeout_seconds=5)

    def work(fabric: Fabric) -> None:
        session = RankSession(config, RunKind.OWNER, fabric)
        batch = token_stream(config, TOKENS).batch(0)
        if fabric.rank == 3:
            batch = dataclasses.replace(batch, labels=batch.labels + 10_000)
        session.train_step(batch)

    with pytest.raises((IndexError, RuntimeError)) as failed:
        run_threads(4, work, timeout=timedelta(seconds=5))
    assert any("on rank 3" in note for note in failed.value.__notes__)


def test_a_job_of_another_size_is_refused() -> None:
    config = config_of(stages=2)

    def work(fabric: Fabric) -> None:
        RankSession(config, RunKind.OWNER, fabric)

    with pytest.raises(ConfigError, match=r"the run has 4 ranks \(--devices 2, --dp 2\), and the job 3"):
        run_threads(3, work, timeout=timedelta(seconds=2))


def test_a_side_that_does_not_fit_the_dag_is_refused() -> None:
    plan = plan_run(config_of(stages=1, devices=1), RunKind.OWNER)

    def work(fabric: Fabric) -> None:
        RankExecutor(
            plan.dag,
            plan.ownership,
            rank=0,
            stages={0: nn.Linear(1, 1)},
            optimizer=torch.optim.SGD,
            loss=lambda output, labels: output.sum(),
            fabric=fabric,
        )

    with pytest.raises(DagError, match="for 2 pipelines, and the ranks of side= are 1"):
        run_threads(1, work, timeout=timedelta(seconds=2))
