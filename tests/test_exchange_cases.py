"""What users of tied pipelines have run into, each with the right value.

The fixture: one tied weight W = 1 on two ranks, SGD at 0.1, the owner's gradient 2, the
replica's 3. Right is 0.5 on both ranks; a wrong value tells the fault: 0.75 averaged, 0.8 the
replica's share lost, 0.7 the owner's share lost, 0.0 counted twice.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from tiny import (
    ADAM,
    LateFabric,
    Mix,
    Pipeline,
    Term,
    batch_losses,
    largest_difference,
    one_torch_thread,
    row_batch,
    squared_loss,
    sum_loss,
    term_batch,
)
from torch import Tensor, nn

from piper_owner.errors import TieError
from piper_owner.executor.rank import RankExecutor
from piper_owner.executor.stage import Tensors
from piper_owner.models.gpt import GPTConfig, build_stage, lm_loss
from piper_owner.schedules import Placement, Schedule, place_stages

W = ("first.weight", "last.weight")
ZERO_BUBBLE = ("0F0 0F1 0I0 0I1 0W0 0W1", "1F0 1I0 1F1 1I1 1W0 1W1")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


def scalar(
    *,
    microbatches: int = 1,
    placement: tuple[int, ...] = (0, 1),
    shape: tuple[int, ...] = (1,),
    values: tuple[float, float] = (1.0, 1.0),
    extra: float | None = None,
    dtype: torch.dtype = torch.float64,
    frozen: tuple[bool, bool] = (False, False),
    **options: object,
) -> Pipeline:
    """The fixture. `extra` is the gradient of a local parameter of the last stage."""

    def build(stage: int) -> nn.Module:
        last = stage == len(placement) - 1
        if stage not in (0, len(placement) - 1):
            return nn.Identity()
        return Term(
            W[last],
            stage,
            (2.0, 3.0)[last],
            value=values[last],
            shape=shape,
            extra=extra if last else None,
            dtype=dtype,
            frozen=frozen[last],
        )

    return Pipeline(
        build=build,
        placement=placement,
        ties=[W],
        microbatches=microbatches,
        loss=sum_loss(microbatches),
        **options,  # type: ignore[arg-type]
    )


def tied_values(pipeline: Pipeline, *batches: int) -> list[float]:
    """W before the first step and after each, equal on both stages; a batch is given by its mask."""
    ranks = pipeline.run([term_batch(pipeline.microbatches, mask=mask) for mask in batches])
    last = len(pipeline.placement) - 1
    first, second = (
        [float(weights[name]) for weights in ranks[pipeline.placement[stage]].weights]
        for stage, name in ((0, W[0]), (last, W[1]))
    )
    assert first == second
    return first


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("owner", ["first", "last"])
@pytest.mark.parametrize("placement", [(0, 1), (0, 0)])
def test_case_01_three_steps(
    microbatches: int, shape: tuple[int, ...], owner: str, placement: tuple[int, ...]
) -> None:
    pipeline = scalar(microbatches=microbatches, shape=shape, owner=owner, placement=placement)
    batches = [term_batch(microbatches)] * 3
    ranks = pipeline.run(batches)
    reference = pipeline.reference(batches)
    assert largest_difference(pipeline, ranks, reference) < 1e-12
    for rank, name in ((0, W[0]), (placement[1], W[1])):
        values = [float(weights[name]) for weights in ranks[rank].weights]
        assert values == pytest.approx([1.0, 0.5, 0.0, -0.5])
    if placement == (0, 0):
        stages = ranks[0].executor.stages
        assert stages[0].module.weight is stages[1].module.weight
        assert ranks[0].messages == [0, 0, 0]
        assert [sent.total for sent in ranks[0].sent] == [0, 0, 0]


def test_case_02_messages_do_not_grow_with_microbatches() -> None:
    seen = []
    for microbatches in (1, 4, 16):
        ranks = scalar(microbatches=microbatches).run([term_batch(microbatches)] * 2)
        seen.append([(rank.messages, rank.sent) for rank in ranks])
        assert [rank.messages for rank in ranks] == [[1, 1], [1, 1]]
        assert [rank.sent[0].grads for rank in ranks] == [0, 8]
        assert [rank.sent[0].weights for rank in ranks] == [8, 0]
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("owner", ["first", "last"])
def test_case_05_deferred_weight_backward(owner: str) -> None:
    pipeline = scalar(microbatches=2, programs=ZERO_BUBBLE, owner=owner)
    assert tied_values(pipeline, 0) == pytest.approx([1.0, 0.5])


def test_case_06_loss_is_a_mean_over_microbatches() -> None:
    assert tied_values(scalar(microbatches=4), 0) == pytest.approx([1.0, 0.5])


@pytest.mark.parametrize("chunk_bytes", [1, 4 * 2**20])
@pytest.mark.parametrize("owner", ["first", "last"])
def test_case_07_clip_then_step_exchanges_once(chunk_bytes: int, owner: str) -> None:
    clipped = scalar(microbatches=4, clip=1e9, owner=owner, chunk_bytes=chunk_bytes, shape=(1,))
    ranks = clipped.run([term_batch(4)])
    assert [float(ranks[rank].weights[1][W[rank]]) for rank in range(2)] == pytest.approx([0.5, 0.5])
    assert [rank.messages for rank in ranks] == [[1], [1]]
    assert sum(rank.sent[0].grads for rank in ranks) == 8


@pytest.mark.parametrize(
    ("mask", "value"), [(0b10, 0.8), (0b01, 0.7), (0b11, 1.0)], ids=["replica", "owner", "both"]
)
def test_case_08_gradient_none(mask: int, value: float) -> None:
    assert tied_values(scalar(), mask) == pytest.approx([1.0, value])


@pytest.mark.parametrize("clip", [None, 1e9])
def test_case_08_no_gradient_at_all_is_no_step(clip: float | None) -> None:
    values = tied_values(scalar(optimizer=ADAM, clip=clip), 0, 0b11)
    assert values[1] == pytest.approx(0.9)
    assert values[2] == values[1], "a step with zeros would give 0.8330"


def test_case_08_gradient_none_in_one_step_only() -> None:
    pipeline = scalar(optimizer=ADAM, microbatches=2)
    batches = [term_batch(2, mask=mask) for mask in (0, 0b10, 0b01, 0b11, 0)]
    assert largest_difference(pipeline, pipeline.run(batches), pipeline.reference(batches)) < 1e-12


def test_output_that_nobody_uses_has_no_gradient() -> None:
    class Constant(Term):
        def forward(self, entering: Tensor) -> Tensor:
            return super().forward(entering.detach())

    class Scalar(nn.Module):
        """Gives a scalar, where torch would start a backward by itself."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, entering: Tensor) -> Tensor:
            return entering[0] + self.weight

    class Deaf(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, entering: Tensor) -> Tensor:
            return self.weight * 3.0 + entering.detach()

    for programs in ((), ZERO_BUBBLE):
        pipeline = Pipeline(
            build=lambda stage: nn.ModuleDict({W[stage].split(".")[0]: (Scalar, Deaf)[stage]()}).__getitem__(
                W[stage].split(".")[0]
            ),
            placement=(0, 1),
            ties=[],
            microbatches=2,
            programs=programs,
            loss=lambda output, labels: output,
        )
        ranks = pipeline.run([term_batch(2)])
        assert float(ranks[0].weights[1]["weight"]) == 1.0
        assert float(ranks[1].weights[1]["weight"]) == pytest.approx(0.4)


def test_case_09_frozen_on_both() -> None:
    pipeline = scalar(frozen=(True, True), values=(1.0, 7.0), extra=1.0)
    with pytest.warns(UserWarning, match="up to 6 before the first step") as caught:
        ranks = pipeline.run([term_batch(1)] * 2)
    assert len(caught) == 1
    for rank in ranks:
        assert [float(weights[W[rank.rank]]) for weights in rank.weights] == [1.0, 1.0, 1.0]
        assert rank.messages == [0, 0]
        assert [sent.total for sent in rank.sent] == [0, 0]
        assert W[0] not in rank.executor.buckets
    assert float(ranks[1].weights[2]["local"]) == pytest.approx(0.8)


def test_case_09_frozen_on_one() -> None:
    with pytest.raises(
        TieError, match=r"requires_grad is True for 'first.weight' on rank 0 .* 'last.weight'"
    ):
        scalar(frozen=(False, True)).plan()


@pytest.mark.parametrize("owner", ["first", "last"])
def test_case_09_frozen_after_planning(owner: str) -> None:
    pipeline = scalar(owner=owner, timeout=1.0)
    plan, build = pipeline.plan(), pipeline.build

    def late(stage: int) -> nn.Module:
        return build(stage).requires_grad_(stage == 0)

    class Planned(Pipeline):
        def plan(self) -> object:  # type: ignore[override]
            return plan

    changed = Planned(
        build=late, placement=(0, 1), ties=[W], loss=pipeline.loss, owner=pipeline.owner, timeout=1.0
    )
    errors = changed.errors([term_batch(1)])
    assert isinstance(errors[1], TieError)
    for error in errors:
        assert "rank 1" in str(error)
        assert "first.weight" in str(error)


class Product(nn.Module):
    """x @ W, `times` times."""

    def __init__(self, name: str, times: int = 1) -> None:
        super().__init__()
        self.times = times
        self.path = name
        path, leaf = name.split(".")
        self.add_module(path, nn.Module())
        start = torch.linspace(-1, 1, 9, dtype=torch.float64).view(3, 3)
        self.get_submodule(path).register_parameter(leaf, nn.Parameter(start))

    def forward(self, rows: Tensor) -> Tensor:
        for _ in range(self.times):
            rows = rows @ self.get_parameter(self.path)
        return rows


@pytest.mark.parametrize(
    ("placement", "programs"),
    [
        ((0, 1), ZERO_BUBBLE),
        ((0, 1), ()),
        ((0, 0), ()),
        ((0, 0), ("0F0 1F0 0F1 1F1 1I0 0I0 1I1 0I1 1W0 1W1 0W0 0W1",)),
        ((0, 0), ("0F0 1F0 1I0 0I0 0F1 1F1 1I1 1W1 0I1 0W1 0W0 1W0",)),
    ],
)
@pytest.mark.parametrize("times", [1, 2])
def test_case_10_product_equals_autograd(
    placement: tuple[int, ...], programs: tuple[str, ...], times: int
) -> None:
    pipeline = Pipeline(
        build=lambda stage: Product(W[stage], times),
        placement=placement,
        ties=[W],
        microbatches=2,
        programs=programs,
        optimizer=partial(torch.optim.SGD, lr=1e-2),
    )
    batches = [row_batch(2, seed, width=3) for seed in range(3)]
    assert largest_difference(pipeline, pipeline.run(batches), pipeline.reference(batches)) < 1e-12


def test_case_10_v_of_four_stages_equals_autograd() -> None:
    names = [f"s{stage}.weight" for stage in range(4)]
    pipeline = Pipeline(
        build=lambda stage: Product(names[stage]),
        placement=place_stages(4, 2, Placement.V),
        ties=[names],
        microbatches=2,
        programs=(
            "0F0 0F1 3F0 3I0 3F1 3I1 0I0 3W0 0I1 3W1 0W0 0W1",
            "1F0 2F0 1F1 2F1 2I0 1I0 2I1 1I1 2W0 1W0 1W1 2W1",
        ),
        optimizer=partial(torch.optim.SGD, lr=1e-2),
    )
    batches = [row_batch(2, seed, width=3) for seed in range(3)]
    ranks = pipeline.run(batches)
    assert largest_difference(pipeline, ranks, pipeline.reference(batches)) < 1e-12
    assert [rank.messages for rank in ranks] == [[1, 1, 1], [1, 1, 1]]


class Normed(nn.Module):
    """A norm whose weight is tied, then a product that is tied too."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.add_module(f"n{stage}", nn.LayerNorm(3, dtype=torch.float64))
        self.add_module(f"p{stage}", Product(f"w{stage}.weight"))
        self.stage = stage

    def forward(self, rows: Tensor) -> Tensor:
        norm, product = self.get_submodule(f"n{self.stage}"), self.get_submodule(f"p{self.stage}")
        out: Tensor = rows + product(norm(rows))
        return out


@pytest.mark.parametrize("owner", [0, 1])
@pytest.mark.parametrize("clip", [None, 0.01])
def test_case_11_two_ties_at_once(owner: int, clip: float | None) -> None:
    pipeline = Pipeline(
        build=Normed,
        placement=(0, 1),
        ties=[("n0.weight", "n1.weight"), ("p0.w0.weight", "p1.w1.weight")],
        microbatches=3,
        owner={"n0.weight": owner},
        optimizer=ADAM,
        clip=clip,
        chunk_bytes=1,
    )
    batches = [row_batch(3, seed, width=3) for seed in range(4)]
    ranks = pipeline.run(batches)
    assert largest_difference(pipeline, ranks, pipeline.reference(batches)) < 1e-10


def test_case_11_a_partner_is_missing() -> None:
    pipeline = Pipeline(
        build=Normed, placement=(0, 1), ties=[("n0.weight", "n2.weight")], microbatches=1, timeout=1.0
    )
    with pytest.raises(TieError, match=r"no stage holds 'n2\.weight' of the tie"):
        pipeline.plan()


def test_case_12_bfloat16_is_summed_in_float32() -> None:
    # 256 + 1 is 256 in bfloat16, whichever comes first; 256 + 1 + 1 is 258, in bfloat16 too.
    names = [f"s{stage}.weight" for stage in range(3)]
    factors = (256.0, 1.0, 1.0)
    for owner in (0, 1, 2):
        pipeline = Pipeline(
            build=lambda stage: Term(names[stage], stage, factors[stage], value=0.0, dtype=torch.bfloat16),
            placement=(0, 1, 2),
            ties=[names],
            loss=sum_loss(1),
            optimizer=partial(torch.optim.SGD, lr=1.0),
            owner=owner,
        )
        ranks = pipeline.run([term_batch(1, dtype=torch.bfloat16)])
        assert [float(rank.weights[1][names[rank.rank]]) for rank in ranks] == [-258.0] * 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_case_13_replicas_equal_after_every_step(dtype: torch.dtype, clip: float | None) -> None:
    model = GPTConfig(vocab_size=40, hidden=8, layers=1, heads=2, context=6)

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        # A batch without labels does not reach the model: every gradient is None.
        share = lm_loss(logits, labels, num_tokens=24)
        return share if int(labels.max()) >= 0 else share.detach()

    pipeline = Pipeline(
        build=lambda stage: build_stage(model, stage, 2, dtype=dtype),
        placement=(0, 1),
        ties=[("embed.weight", "head.weight")],
        microbatches=2,
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        loss=loss,
        clip=clip,
        chunk_bytes=512,
    )
    generator = torch.Generator().manual_seed(0)
    batches = []
    for step in range(20):
        ids, labels = torch.randint(40, (2, 2, 2, 6), generator=generator).unbind()
        batches.append((list(ids), list(torch.full_like(labels, -100) if step == 7 else labels)))
    ranks = pipeline.run(batches)
    pairs = [
        (mine["embed.weight"], theirs["head.weight"])
        for mine, theirs in zip(ranks[0].weights, ranks[1].weights, strict=True)
    ]
    assert len(pairs) == 21
    assert all(torch.equal(one, two) for one, two in pairs)
    changed = [not torch.equal(before[0], after[0]) for before, after in itertools.pairwise(pairs)]
    assert changed == [step != 7 for step in range(20)]


def test_case_14_weights_that_arrive_late_are_waited_for() -> None:
    late = threading.Event()

    class Late(RankExecutor):
        def train_step(self, inputs: Sequence[Tensors], labels: Sequence[Tensor]) -> float:
            if self.rank == 1 and self.step == 0:
                late.set()  # what rank 1 receives first of the tie are the new weights
            return super().train_step(inputs, labels)

    pipeline = scalar(microbatches=2, wrap=lambda fabric: LateFabric(fabric, 1, late, 1.0), kind=Late)
    batches = [term_batch(2)] * 2
    start = time.monotonic()
    ranks = pipeline.run(batches, check=False)
    assert time.monotonic() - start > 1.0
    losses, _ = pipeline.reference(batches)
    assert batch_losses(ranks) == pytest.approx(losses)
    assert losses == pytest.approx([5.0, 2.5])


def test_case_15_a_stage_that_lost_its_tie_is_tied_again() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 3, dtype=torch.float64)
            self.head = nn.Linear(3, 5, bias=False, dtype=torch.float64)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            out: Tensor = self.head(self.embed(ids))
            return out

    def build(stage: int) -> nn.Module:
        with torch.device("meta"):
            module = Both()
        module.to_empty(device="cpu")
        assert module.head.weight is not module.embed.weight
        for parameter in module.parameters():
            parameter.data.copy_(torch.linspace(-1, 1, 15).view(5, 3))
        return module

    pipeline = Pipeline(
        build=build,
        placement=(0,),
        ties=[("embed.weight", "head.weight")],
        loss=lambda logits, labels: F.cross_entropy(logits, labels),
    )
    ids = torch.tensor([1, 2, 2])
    batches = [([ids], [ids])] * 3
    ranks = pipeline.run(batches)
    module = ranks[0].executor.stages[0].module
    assert module.get_parameter("head.weight") is module.get_parameter("embed.weight")
    assert largest_difference(pipeline, ranks, pipeline.reference(batches)) < 1e-12


def test_case_15_a_copy_on_the_meta_device_is_refused() -> None:
    whole = scalar()
    pipeline = scalar(timeout=1.0)
    build = whole.build

    class Meta(Pipeline):
        def plan(self) -> object:  # type: ignore[override]
            return whole.plan()

    def on_meta(stage: int) -> nn.Module:
        return build(stage).to("meta") if stage == 1 else build(stage)

    broken = Meta(build=on_meta, placement=(0, 1), ties=[W], loss=pipeline.loss, timeout=1.0)
    errors = broken.errors([term_batch(1)])
    assert isinstance(errors[1], TieError)
    assert "meta device" in str(errors[1])
    assert "rank 1 failed first, at start-up: TieError" in str(errors[0])


@pytest.mark.parametrize("owner", ["first", "last"])
def test_case_16_the_first_name_s_value_wins(owner: str) -> None:
    pipeline = scalar(values=(1.0, 4.0), owner=owner)
    with pytest.warns(UserWarning, match=r"differed .* by up to 3 before") as caught:
        values = tied_values(pipeline, 0)
    assert len(caught) == 1
    assert "rank 1 differed from that of rank 0" in str(caught[0].message)
    assert values == pytest.approx([1.0, 0.5])


def test_case_16_one_warning_for_each_copy_that_differed() -> None:
    names = [f"s{stage}.weight" for stage in range(3)]
    pipeline = Pipeline(
        build=lambda stage: Term(names[stage], stage, 1.0, value=(1.0, 2.0, 2.0)[stage]),
        placement=(0, 1, 2),
        ties=[names[::-1]],
        loss=sum_loss(1),
    )
    with pytest.warns(UserWarning, match="by up to 1 before") as caught:
        ranks = pipeline.run([term_batch(1)])
    assert len(caught) == 1
    assert [float(rank.weights[0][names[rank.rank]]) for rank in ranks] == [2.0] * 3


@pytest.mark.parametrize("owner", ["first", "last"])
@pytest.mark.parametrize("clip", [None, 1e9])
def test_case_18_ranks_between_send_nothing(owner: str, clip: float | None) -> None:
    pipeline = scalar(placement=(0, 1, 2, 3), owner=owner, clip=clip, microbatches=4)
    ranks = pipeline.run([term_batch(4)] * 2)
    for rank in ranks[1:3]:
        assert rank.executor.check()
        assert rank.executor.exchange.lines == {}
        assert rank.messages == [0, 0]
        # Only its share of the norm, with the steps of the four ranks beside it.
        assert all(sent.total == (5 * 8 if clip else 0) for sent in rank.sent)
    assert [float(ranks[rank].weights[2][W[rank // 3]]) for rank in (0, 3)] == pytest.approx([0.0, 0.0])


class Embed(nn.Module):
    """Ids to rows."""

    def __init__(self, num: int = 5, width: int = 3, **options: object) -> None:
        super().__init__()
        self.embed = nn.Embedding(num, width, dtype=torch.float64, **options)  # type: ignore[arg-type]
        self.embed.weight.data.copy_(torch.linspace(-1, 1, num * width).view(num, width))

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.embed(ids)
        return out


class Head(nn.Module):
    """Rows to logits."""

    def __init__(self, num: int = 5, width: int = 3, *, bias: bool = False) -> None:
        super().__init__()
        self.head = nn.Linear(width, num, bias=bias, dtype=torch.float64)
        self.head.weight.data.copy_(torch.linspace(-1, 1, num * width).view(num, width))
        if bias:
            self.head.bias.data.zero_()

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = self.head(rows)
        return out


def embed_and_head(
    embed: dict[str, object] | None = None, *, bias: bool = False, **options: object
) -> Pipeline:
    """An embedding-only stage and a head-only stage."""

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")

    sizes = {key: options.pop(key) for key in ("num", "width") if key in options}
    return Pipeline(
        build=lambda stage: Head(bias=bias, **sizes) if stage else Embed(**sizes, **(embed or {})),  # type: ignore[arg-type]
        placement=(0, 1),
        ties=[("embed.weight", "head.weight")],
        **{"loss": loss, **options},  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("names", [W, W[::-1]])
def test_case_19_a_stage_with_one_of_the_names_is_tied(names: tuple[str, str]) -> None:
    pipeline = Pipeline(build=scalar().build, placement=(0, 1), ties=[names], loss=sum_loss(1), owner="first")
    ranks = pipeline.run([term_batch(1)])
    assert [float(rank.weights[1][W[rank.rank]]) for rank in ranks] == pytest.approx([0.5, 0.5])


def test_case_20_max_norm_is_refused() -> None:
    errors = embed_and_head({"max_norm": 1.0}, timeout=1.0).errors([([torch.tensor([1])] * 1,) * 2])
    assert isinstance(errors[0], TieError)
    assert "max_norm=1.0" in str(errors[0])
    assert "rank 0 failed first, at start-up" in str(errors[1])
    assert "max_norm=1.0" in str(errors[1])


@pytest.mark.parametrize("owner", ["first", "last"])
def test_case_21_padding_row_gets_the_head_s_half_only(owner: str) -> None:
    ids = torch.tensor([[0, 0, 2, 1]])
    batches = [([ids], [torch.tensor([[3, 1, 0, 0]])])]
    padded = embed_and_head({"padding_idx": 0}, owner=owner)
    ranks = padded.run(batches)
    assert largest_difference(padded, ranks, padded.reference(batches)) < 1e-12
    change = (ranks[0].weights[1]["embed.weight"] - ranks[0].weights[0]["embed.weight"])[0] / -0.1
    head = Head()
    rows = Embed()(ids).detach()
    padded.loss(head(rows), batches[0][1][0]).backward()
    assert head.head.weight.grad is not None
    assert torch.allclose(change, head.head.weight.grad[0])
    plain = embed_and_head(owner=owner).run(batches)
    assert not torch.allclose(plain[0].weights[1]["embed.weight"][0], ranks[0].weights[1]["embed.weight"][0])


def test_case_22_a_bias_stays_local() -> None:
    pipeline = embed_and_head(bias=True)
    ids = torch.tensor([[1, 4, 2]])
    batches = [([ids], [ids])] * 2
    ranks = pipeline.run(batches)
    assert [rank.messages for rank in ranks] == [[1, 1], [1, 1]]
    assert [rank.sent[0].grads for rank in ranks] == [0, 5 * 3 * 8]
    assert [rank.sent[0].weights for rank in ranks] == [5 * 3 * 8, 0]
    assert ranks[1].weights[1]["head.bias"].abs().max() > 0
    assert largest_difference(pipeline, ranks, pipeline.reference(batches)) < 1e-12


@pytest.mark.parametrize("owner", ["first", "last"])
@pytest.mark.parametrize("placement", [(0, 1), (0, 0), (0, 1, 2)])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_case_24_the_norm_counts_a_tie_once(
    owner: str, placement: tuple[int, ...], microbatches: int
) -> None:
    # (2 + 3)**2 + 12**2 = 13**2; counted twice it would be 13.93, before combining 12.53.
    pipeline = scalar(clip=1.0, extra=12.0, owner=owner, placement=placement, microbatches=microbatches)
    ranks = pipeline.run([term_batch(microbatches)])
    last = placement[-1]
    assert float(ranks[0].weights[1][W[0]]) == pytest.approx(0.961538, abs=1e-6)
    assert float(ranks[last].weights[1][W[1]]) == pytest.approx(0.961538, abs=1e-6)
    assert float(ranks[last].weights[1]["local"]) == pytest.approx(1 - 0.1 * 12 / 13, abs=1e-6)


def test_case_24_norms_below_the_limit_change_nothing() -> None:
    pipeline = scalar(clip=13.1, extra=12.0)
    ranks = pipeline.run([term_batch(1)])
    assert float(ranks[1].weights[1][W[1]]) == pytest.approx(0.5, abs=1e-12)


@pytest.mark.parametrize("clip", [None, 0.1])
def test_case_25_embedding_only_and_head_only(clip: float | None) -> None:
    pipeline = embed_and_head(clip=clip, microbatches=2)
    ids = torch.tensor([[1, 4, 2]])
    batches = [([ids, ids + 0], [ids, (ids + 1) % 5])] * 3
    assert largest_difference(pipeline, pipeline.run(batches), pipeline.reference(batches)) < 1e-12


def test_case_26_a_tie_counts_once() -> None:
    pipeline = embed_and_head(num=1000, width=8, optimizer=ADAM)
    ids = torch.tensor([[1, 4, 999]])
    ranks = pipeline.run([([ids], [ids])])
    owner, replica = (rank.executor.buckets["embed.weight"] for rank in ranks)
    owned = [p.numel() for bucket in ranks[0].executor.buckets.values() for p in bucket.parameters]
    assert sum(owned) == 8000
    assert owner.optimizer_bytes == 2 * 8000 * 8 + 4
    assert replica.optimizer is None
    assert replica.optimizer_bytes == 0


def test_case_27_two_sequence_lengths_in_a_row() -> None:
    pipeline = embed_and_head(microbatches=2)
    batches = []
    for step, length in enumerate((7, 3, 11)):
        ids = torch.arange(2 * 2 * length).view(2, 2, length) * (step + 3) % 5
        batches.append((list(ids), list((ids + 1) % 5)))
    assert largest_difference(pipeline, pipeline.run(batches), pipeline.reference(batches)) < 1e-12


@pytest.mark.parametrize("owner", ["first", "last"])
def test_case_47_a_sparse_embedding_equals_a_dense_one(owner: str) -> None:
    ids = torch.tensor([[1, 1, 2]])
    batches = [([ids, ids], [(ids + 2) % 5] * 2)] * 3
    sparse = embed_and_head({"sparse": True}, owner=owner, microbatches=2)
    dense = embed_and_head(owner=owner, microbatches=2)
    one, two = sparse.run(batches), dense.run(batches)
    assert torch.equal(one[0].weights[3]["embed.weight"], two[0].weights[3]["embed.weight"])
    assert largest_difference(dense, one, dense.reference(batches)) < 1e-12


def test_case_47_repeated_ids_add_up() -> None:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return logits.sum()

    class Frozen(Head):
        def forward(self, rows: Tensor) -> Tensor:
            return rows + self.head.weight.sum() * 0.0

    def build(stage: int) -> nn.Module:
        return Frozen() if stage else Embed()

    pipeline = Pipeline(build=build, placement=(0, 1), ties=[("embed.weight", "head.weight")], loss=loss)
    ranks = pipeline.run([([torch.tensor([1, 1, 2])], [torch.tensor(0)])])
    change = (ranks[1].weights[0]["head.weight"] - ranks[1].weights[1]["head.weight"]) / 0.1
    assert torch.allclose(change[:, 0], torch.tensor([0, 2, 1, 0, 0], dtype=torch.float64))


@pytest.mark.parametrize("schedule", list(Schedule))
def test_case_48_a_batch_without_tokens_or_labels(schedule: Schedule) -> None:
    model = GPTConfig(vocab_size=20, hidden=8, layers=2, heads=2, context=6)
    pipeline = Pipeline(
        build=lambda stage: build_stage(model, stage, 3, dtype=torch.float64),
        placement=(0, 1, 2),
        ties=[("embed.weight", "head.weight")],
        microbatches=2,
        schedule=schedule,
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        loss=lambda logits, labels: lm_loss(logits, labels, num_tokens=8),
    )
    ids = torch.arange(16).view(2, 2, 4)
    empty = ids[:, :, :0]
    batches = [
        (list(ids), list(ids + 1)),
        (list(ids), list(torch.full_like(ids, -100))),
        ([ids[0], empty[1]], [ids[0] + 1, empty[1]]),
        (list(ids), list(ids + 1)),
    ]
    ranks = pipeline.run(batches)
    assert all(math.isfinite(loss) for loss in batch_losses(ranks))
    assert largest_difference(pipeline, ranks, pipeline.reference(batches)) < 1e-10


@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize("placement", [(0, 1, 2, 3), (0, 1, 1, 0)])
def test_case_49_fewer_microbatches_than_stages(schedule: Schedule, placement: tuple[int, ...]) -> None:
    for microbatches in (1, 2, 3):
        pipeline = Pipeline(
            build=lambda stage: Mix(stage, [f"s{stage}.weight"] if stage in (0, 3) else []),
            placement=placement,
            ties=[("s0.weight", "s3.weight")],
            microbatches=microbatches,
            schedule=schedule,
            loss=squared_loss,
            optimizer=partial(torch.optim.SGD, lr=1e-3),
        )
        batches = [row_batch(microbatches, seed) for seed in range(2)]
        assert largest_difference(pipeline, pipeline.run(batches), pipeline.reference(batches)) < 1e-12
