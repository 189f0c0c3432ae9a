"""Owners, bytes and seconds of plans: against sums done here, and how they change with what is asked."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import gpt_shapes, plan_config, preset_shapes

from piper_owner.cost import Candidate, elect, row_capacity, table_capacity
from piper_owner.dag.nodes import Sync, SyncKind
from piper_owner.errors import ConfigError
from piper_owner.ownership import Tie, Use
from piper_owner.planning.compare import Comparison, compare_methods
from piper_owner.planning.config import Method, Optimizer, PlanConfig, Transfer
from piper_owner.planning.seconds import SIMULATED_STEPS
from piper_owner.planning.shapes import TiedShape, TiedUse
from piper_owner.planning.units import parse_bytes, parse_rate, parse_seconds
from piper_owner.planning.zipf import expected_rows
from piper_owner.schedules import Placement, Schedule

VOCAB, HIDDEN = 256_000, 2304
TABLE = VOCAB * HIDDEN


@pytest.fixture(scope="module")
def gemma() -> Comparison:
    config = plan_config(num_rows=2840, bandwidth=25e9, tokens=16_384)
    return compare_methods(preset_shapes("gemma-2-2b", 4), config)


class TestGemma:
    """google/gemma-2-2b: 256,000 x 2,304 tied, 26 layers, in bfloat16 with float32 masters under AdamW."""

    ATTENTION = HIDDEN * (8 * 256 + 2 * 4 * 256) + 8 * 256 * HIDDEN
    LAYER = ATTENTION + 3 * HIDDEN * 9216 + 4 * HIDDEN

    def test_bytes_on_the_wire(self, gemma: Comparison) -> None:
        plans = gemma.plans
        dense, rows = plans[Method.DENSE].traffic, plans[Method.ROWS].traffic
        assert sum(sent.payload for sent in dense.values()) == 2 * TABLE * 2
        assert dense[3].grads == dense[0].weights == TABLE * 2
        assert [sent.messages for sent in dense.values()] == [1, 0, 0, 1]
        assert (rows[0].ids, rows[0].grads, rows[3].rows) == (2840 * 4, 2840 * HIDDEN * 2, 2840 * HIDDEN * 2)
        assert [plans[Method.ALL_REDUCE].traffic[rank].grads for rank in range(4)] == [
            2 * TABLE,
            0,
            0,
            2 * TABLE,
        ]
        assert sum(sent.payload for sent in plans[Method.NAIVE].traffic.values()) == 0

    def test_memory_of_a_stage_between(self, gemma: Comparison) -> None:
        layers = 8
        size = layers * self.LAYER
        memory = gemma.plans[Method.ROWS].memory[1]
        assert (memory.weights, memory.gradients, memory.masters) == (2 * size, 2 * size, 4 * size)
        tensors = layers * (7 + 4)
        assert memory.optimizer == 8 * size + 4 * tensors
        # Three microbatches of 2,048 tokens are in flight in the second of four stages.
        each = HIDDEN + layers * (8 * HIDDEN + 2 * 2048 + 2 * 1024 + 4 * 9216)
        assert memory.activations == 3 * 2048 * each * 2
        assert memory.rows == memory.staging == 0

    def test_memory_of_the_tie(self, gemma: Comparison) -> None:
        plans = gemma.plans
        for method, kept in ((Method.NAIVE, 2), (Method.ALL_REDUCE, 2), (Method.DENSE, 1), (Method.ROWS, 1)):
            masters = sum(memory.masters for memory in plans[method].memory.values())
            assert masters == 4 * (26 * self.LAYER + HIDDEN) + kept * 4 * TABLE
        rows = plans[Method.ROWS].memory[0]
        assert rows.rows == 4096 * HIDDEN * 2
        assert rows.gradients - 2 * 8 * self.LAYER == rows.rows
        saved = plans[Method.DENSE].memory[0].total - rows.total
        assert saved > 14 * TABLE  # weights, gradient, masters and moments of the table

    def test_seconds(self, gemma: Comparison) -> None:
        plans = gemma.plans
        reduce = plans[Method.ALL_REDUCE]
        assert reduce.exposed_seconds == pytest.approx(TABLE * 2 / 25e9 + 2e-5, rel=1e-6)
        assert plans[Method.DENSE].owners == (0,)
        assert plans[Method.ROWS].owners == (3,)
        assert plans[Method.DENSE].exposed_seconds < reduce.exposed_seconds / 10
        # The weights come back a link's time behind the gradient; rank 0 steps no table meanwhile.
        last, wire = gemma.tried[Method.DENSE, 3], TABLE * 2 / 25e9
        assert wire / 2 < last.exposed_seconds < wire
        assert "least exposed sync" in plans[Method.DENSE].ownership.ties[0].reason
        assert gemma.advice is Method.ROWS
        assert "against all-reduce: 10.6 GB less" in gemma.reason


def small(**changes: object) -> Comparison:
    config = plan_config(**{"stages": 3, "microbatches": 4, "tokens": 4096, "num_rows": 700, **changes})
    shapes = gpt_shapes(3, vocab=5000, hidden=256, layers=6, heads=4, context=1024)
    return compare_methods(shapes, config)


RATES = st.floats(1e6, 1e12)
SCHEDULES = st.sampled_from(list(Schedule)[:2])


class TestMonotony:
    @settings(max_examples=25, deadline=None)
    @given(rates=st.tuples(RATES, RATES), schedule=SCHEDULES, transfer=st.sampled_from(Transfer))
    def test_more_bandwidth_is_never_slower(
        self, rates: tuple[float, float], schedule: Schedule, transfer: Transfer
    ) -> None:
        slow, fast = (small(bandwidth=rate, schedule=schedule, transfer=transfer) for rate in sorted(rates))
        for key, plan in slow.tried.items():
            assert fast.tried[key].timing.step_seconds <= plan.timing.step_seconds * (1 + 1e-9)
        for method, plan in slow.plans.items():
            assert fast.plans[method].timing.step_seconds <= plan.timing.step_seconds * (1 + 1e-9)

    @settings(max_examples=25, deadline=None)
    @given(
        tokens=st.lists(st.integers(1, 10**6), min_size=2, max_size=2), vocab=st.sampled_from([1, 300, 8192])
    )
    def test_more_tokens_never_look_up_fewer_rows(self, tokens: list[int], vocab: int) -> None:
        few, many = (expected_rows(count, vocab) for count in sorted(tokens))
        assert 1 <= few <= many <= vocab

    @settings(max_examples=30, deadline=None)
    @given(
        vocab=st.integers(1, 5000),
        hidden=st.sampled_from([4, 64]),
        dtype=st.sampled_from(["float64", "float32", "bfloat16"]),
        num_rows=st.integers(1, 5000),
        optimizer=st.sampled_from(Optimizer),
    )
    def test_bytes_of_every_method(
        self, vocab: int, hidden: int, dtype: str, num_rows: int, optimizer: Optimizer
    ) -> None:
        num_rows = min(num_rows, vocab)
        config = plan_config(
            stages=2, dtype=dtype, num_rows=num_rows, optimizer=optimizer, tokens=64, latency=0.0
        )
        shapes = gpt_shapes(2, vocab=vocab, hidden=hidden, layers=2, heads=2, context=8)
        plans = compare_methods(shapes, config).plans
        size = {"float64": 8, "float32": 4, "bfloat16": 2}[dtype]
        dense = sum(sent.payload for sent in plans[Method.DENSE].traffic.values())
        assert dense == 2 * vocab * hidden * size
        rows = sum(sent.payload for sent in plans[Method.ROWS].traffic.values())
        assert rows == num_rows * (2 * hidden * size + 4)
        state = {m: sum(x.masters + x.optimizer for x in p.memory.values()) for m, p in plans.items()}
        assert state[Method.DENSE] == state[Method.ROWS] < state[Method.NAIVE] == state[Method.ALL_REDUCE]
        weights = {m: sum(each.weights + each.rows for each in p.memory.values()) for m, p in plans.items()}
        assert weights[Method.NAIVE] == weights[Method.ALL_REDUCE] == weights[Method.DENSE]
        assert plans[Method.ROWS].memory[0].rows <= row_capacity(num_rows) * hidden * size
        assert plans[Method.ROWS].memory[0].optimizer < plans[Method.NAIVE].memory[0].optimizer


class TestSteps:
    @pytest.mark.parametrize("schedule", list(Schedule)[:2])
    @pytest.mark.parametrize("method", list(Method))
    def test_the_last_step_is_as_long_as_any_after_it(
        self, schedule: Schedule, method: Method, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        short = small(schedule=schedule, bandwidth=1e9).plans[method].timing
        monkeypatch.setattr("piper_owner.planning.seconds.SIMULATED_STEPS", SIMULATED_STEPS + 4)
        long = small(schedule=schedule, bandwidth=1e9).plans[method].timing
        assert short.step_seconds == pytest.approx(long.step_seconds, rel=1e-9)

    def test_what_streams_is_not_faster_than_the_link(self) -> None:
        slow = 1.25e8
        found = small(bandwidth=slow, transfer=Transfer.STREAMED, dtype="float32", chunk_bytes=2**17)
        wire = 5000 * 256 * 4 / slow
        for owner in (0, 2):
            exposed = found.tried[Method.DENSE, owner].exposed_seconds
            assert 0.99 * wire < exposed < 1.1 * wire
        serial = small(
            bandwidth=slow, transfer=Transfer.STREAMED, dtype="float32", optimizer=Optimizer.ADAFACTOR
        )
        assert serial.tried[Method.DENSE, 2].exposed_seconds > 1.9 * wire

    @pytest.mark.parametrize("slow", [1.25e8, 1e9])
    def test_early_gradients_are_never_later_than_streamed_ones(self, slow: float) -> None:
        early, streamed = (
            small(bandwidth=slow, transfer=transfer, dtype="float32", chunk_bytes=2**17)
            for transfer in Transfer
        )
        wire = 5000 * 256 * 4 / slow
        for owner in (0, 2):
            step = early.tried[Method.DENSE, owner].timing.step_seconds
            assert step <= streamed.tried[Method.DENSE, owner].timing.step_seconds * 1.001
        # A link that is slow beside the pipeline is busy both ways at once, not twice one after the other.
        assert early.tried[Method.DENSE, 0].exposed_seconds < 1.1 * wire

    def test_given_stage_seconds_are_taken(self) -> None:
        found = small(stage_seconds=(1.0, 1.0, 1.0), bandwidth=1e12, latency=0.0)
        # 1F1B of 4 microbatches on 3 stages: 4 + 2 turns of one forward and one backward.
        assert found.plans[Method.NAIVE].timing.step_seconds == pytest.approx(6 * 3.0, rel=1e-3)

    def test_given_backward_seconds_are_taken(self) -> None:
        found = small(
            stage_seconds=(1.0, 1.0, 1.0), backward_seconds=(5.0, 5.0, 5.0), bandwidth=1e12, latency=0.0
        )
        assert found.plans[Method.NAIVE].timing.step_seconds == pytest.approx(6 * 6.0, rel=1e-3)

    @pytest.mark.parametrize("method", [Method.DENSE, Method.ROWS])
    def test_an_owner_adds_before_it_steps(self, method: Method) -> None:
        found = small(dtype="float32", memory_bandwidth=1e9, bandwidth=1e15, latency=0.0, barrier=True)
        table = 5000 * 256 * 4
        steps = sum(
            event.end - event.start
            for event in found.tried[method, 2].timing.timeline.events(2)
            if isinstance(event.action, Sync) and event.action.kind is SyncKind.OWNER_STEP
        )
        # AdamW moves seven tables, and the state's counters; two gradients are read and their sum written.
        assert steps == pytest.approx((7 + 3) * table / 1e9, rel=1e-3)

    def test_nothing_hides_behind_a_barrier(self) -> None:
        for method, owner in ((Method.DENSE, 0), (Method.DENSE, 2), (Method.ROWS, 2)):
            free, bound = (
                small(bandwidth=1e9, barrier=barrier, transfer=Transfer.STREAMED) for barrier in (False, True)
            )
            alone = bound.tried[method, owner].timing
            assert alone.step_seconds == alone.timeline.makespan
            assert alone.window == (0.0, alone.step_seconds)
            assert alone.step_seconds >= free.tried[method, owner].timing.step_seconds - 1e-9

    def test_one_stage_has_nothing_to_exchange(self) -> None:
        shapes = gpt_shapes(1, vocab=300, hidden=16, layers=2, heads=2, context=8)
        found = compare_methods(shapes, plan_config(stages=1, tokens=64))
        assert set(found.plans) == {Method.NAIVE, Method.DENSE}
        assert found.plans[Method.NAIVE].memory[0].total == found.plans[Method.DENSE].memory[0].total

    def test_a_placement_with_both_uses_on_one_device(self) -> None:
        found = small(placement=Placement.V, devices=2)
        assert found.advice is Method.ROWS  # three stages on two devices: the last is not on the first
        shapes = gpt_shapes(4, vocab=300, hidden=16, layers=4, heads=2, context=8)
        folded = compare_methods(shapes, plan_config(placement=Placement.V, tokens=64))
        assert folded.advice is Method.DENSE
        assert "one Parameter" in folded.reason
        assert "nobody to serve" in folded.impossible[Method.ROWS]

    def test_an_owner_that_is_asked_for_is_kept(self) -> None:
        shapes = gpt_shapes(3, vocab=5000, hidden=256, layers=6, heads=4, context=1024)
        config = plan_config(stages=3, tokens=4096)
        assert compare_methods(shapes, config, owner="last").plans[Method.DENSE].owners == (2,)
        first = compare_methods(shapes, config, owner="first")
        assert Method.ROWS not in first.plans
        assert first.plans[Method.DENSE].ownership.ties[0].reason.startswith("asked for")
        with pytest.raises(ConfigError, match="rank 1 cannot own"):
            compare_methods(shapes, config, owner=1)

    def test_several_ties_have_owners_of_their_own(self) -> None:
        shapes = gpt_shapes(3, vocab=500, hidden=16, layers=6, heads=4, context=64)
        (tied,) = shapes.ties
        uses = [TiedUse(name=name, stage=stage, use=Use.DENSE) for name, stage in (("a", 1), ("b", 2))]
        other = TiedShape(tie=Tie(("a", "b")), shape=(64, 64), uses=tuple(uses))
        both = dataclasses.replace(shapes, ties=(tied, other))
        found = compare_methods(both, plan_config(stages=3, tokens=4096, num_rows=100))
        dense = found.plans[Method.DENSE]
        assert [tie.name for tie in dense.ownership.ties] == ["a", "embed.weight"]
        assert all(tie.owner in tie.ranks and tie.reason for tie in dense.ownership.ties)
        sent = sum(each.payload for each in dense.traffic.values())
        assert sent == 2 * (500 * 16 + 64 * 64) * 2
        assert dense.messages == 4
        rows = found.plans[Method.ROWS]  # only one of the ties has a replica that only looks rows up
        assert [bool(tie.row_replicas) for tie in rows.ownership.ties] == [False, True]
        assert sum(each.payload for each in rows.traffic.values()) == 2 * 64 * 64 * 2 + 100 * (2 * 16 * 2 + 4)

    def test_a_model_without_ties(self) -> None:
        shapes = gpt_shapes(3, vocab=500, hidden=16, layers=6, heads=4, context=64)
        found = compare_methods(dataclasses.replace(shapes, ties=()), plan_config(stages=3, tokens=4096))
        assert set(found.plans) == {Method.NAIVE, Method.DENSE}
        assert "no tied parameter" in found.reason
        assert all("no tied parameter" in found.impossible[each] for each in (Method.ALL_REDUCE, Method.ROWS))
        assert found.plans[Method.DENSE].memory == found.plans[Method.NAIVE].memory

    def test_averages_over_pipelines_are_waited_for(self) -> None:
        alone, side = small(), small(pipelines=4)
        for method in Method:
            plan = side.plans[method]
            assert plan.timing.step_seconds > alone.plans[method].timing.step_seconds
            held = sum(memory.gradients for memory in plan.memory.values())
            if method is not Method.ROWS:
                copies = 1 if method is Method.DENSE else 0
                held -= copies * 5000 * 256 * 2  # the replica's is not averaged
                across = sum(sent.across for sent in plan.traffic.values())
                assert across == pytest.approx(2 * 3 / 4 * held, abs=16)
        assert all(sent.across == 0 for sent in alone.plans[Method.DENSE].traffic.values())

    def test_what_does_not_fit_is_not_advised(self) -> None:
        fits = small().plans[Method.ROWS].peak
        assert small(device_memory=fits).advice is Method.ROWS
        assert "nothing fits" in small(device_memory=1000).reason


class TestElection:
    def test_time_comes_first_then_memory_then_rank(self) -> None:
        fast = Candidate(rank=5, stage=5, exposed_seconds=0.001, free_bytes=1)
        slow = Candidate(rank=1, stage=1, exposed_seconds=0.002, free_bytes=10**12)
        assert elect([slow, fast]).rank == 5
        assert "1 ms a step (rank 1: 2 ms)" in elect([slow, fast]).reason
        roomy = dataclasses.replace(slow, exposed_seconds=0.001)
        assert elect([fast, roomy]).rank == 1
        assert "more free memory" in elect([fast, roomy]).reason
        alike = [Candidate(rank=rank, stage=0, exposed_seconds=0.0) for rank in (3, 2)]
        assert elect(alike).rank == 2

    def test_without_figures_the_earliest_stage_owns(self) -> None:
        candidates = [Candidate(rank=0, stage=3), Candidate(rank=3, stage=0)]
        assert elect(candidates).rank == 3
        assert "0 is the earliest" in elect(candidates).reason
        assert elect(candidates[:1]).reason == "no other rank can"

    def test_times_within_a_thousandth_of_a_step_are_equal(self) -> None:
        near = [
            Candidate(rank=0, stage=0, exposed_seconds=1e-5, free_bytes=1),
            Candidate(rank=1, stage=1, exposed_seconds=0.0, free_bytes=2),
        ]
        assert elect(near, step_seconds=1.0).rank == 1
        assert elect([near[0], dataclasses.replace(near[1], free_bytes=0)], step_seconds=1.0).rank == 0
        assert elect(near).rank == 1


@pytest.mark.parametrize(("tokens", "measured"), [(1024, 263), (8192, 1458), (32_768, 3942), (131_072, 9121)])
def test_the_law_is_near_what_text_does(tokens: int, measured: int) -> None:
    assert expected_rows(tokens, 32_000) == pytest.approx(measured, rel=0.06)


@pytest.mark.parametrize(
    ("before", "num_rows", "after"),
    [
        (0, 3, 64),
        (0, 65, 128),
        (128, 65, 128),
        (128, 63, 64),
        (64, 300, 512),
        (512, 256, 512),
        (512, 255, 256),
    ],
)
def test_a_table_grows_by_powers_of_two(before: int, num_rows: int, after: int) -> None:
    assert table_capacity(num_rows, before=before) == after <= row_capacity(num_rows)


@pytest.mark.parametrize(
    ("text", "rate"),
    [("25GB/s", 25e9), ("1gbit", 1.25e8), ("100Gbit/s", 12.5e9), ("1e9", 1e9), ("2GiB/s", 2**31)],
)
def test_rates(text: str, rate: float) -> None:
    assert parse_rate("--bandwidth", text) == rate


@pytest.mark.parametrize("text", ["", "GB", "-1", "0", "25Gb/s", "1e999", "nan", "inf", "1 parsec"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--bandwidth") as error:
        parse_rate("--bandwidth", text)
    assert len(str(error.value)) < 300


def test_a_long_rate_is_refused_in_short() -> None:
    with pytest.raises(ConfigError) as error:
        parse_rate("--bandwidth", "9" * 10**6)
    assert len(str(error.value)) < 300


def test_sizes_and_times() -> None:
    assert parse_bytes("--x", "80GB") == 80 * 10**9
    assert parse_bytes("--x", "4MiB") == 4 * 2**20
    assert parse_seconds("--x", "10us") == pytest.approx(1e-5)
    for wrong in ("ten", "-1ms", "1h"):
        with pytest.raises(ConfigError, match="--x"):
            parse_seconds("--x", wrong)


@pytest.mark.parametrize(
    "changes",
    [{"stages": 0}, {"devices": 9}, {"tokens": 3}, {"bandwidth": 0.0}, {"bandwidth": float("nan")},
     {"latency": float("inf")}, {"stage_seconds": (1.0,)}, {"microbatches": 10**6},
     {"backward_seconds": (1.0,)}, {"chunk_bytes": 0}],
)  # fmt: skip
def test_what_cannot_be_planned_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"--|backward_seconds"):
        PlanConfig(**changes)  # type: ignore[arg-type]
