"""Stages sharded by fully_shard over data parallel ranks: a tie works shard against equal shard."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch
import torch.distributed as dist
from owners import near, process_group
from tiny import one_torch_thread
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Shard

from piper_owner.assignment import Ownership, assign_owners
from piper_owner.errors import ReplicaMismatchError, TieError
from piper_owner.frontends.torch_pipelining import attach
from piper_owner.grad_scaler import GradScaler
from piper_owner.optimizer_wrap import OwnerOptimizer
from piper_owner.ownership import Tie
from piper_owner.sharding import local_of
from piper_owner.ties import find_ties
from piper_owner.transport import Fabric

if TYPE_CHECKING:
    from ranks import RankPool

TIE: Final = (("embed.weight", "head.weight"),)
WIDTH: Final = 4
STEPS: Final = 5
MICROBATCHES: Final = 4


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


class First(nn.Module):
    """The stage with the embedding."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.tanh(self.first(self.embed(ids)))


class Last(nn.Module):
    """The stage with the head."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, vocab, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.head(torch.tanh(self.last(hidden)))  # type: ignore[no-any-return]


def build(vocab: int, dtype: torch.dtype) -> tuple[First, Last]:
    """The two stages, the same on every rank; tied."""
    torch.manual_seed(1)
    first, last = First(vocab).to(dtype), Last(vocab).to(dtype)
    last.head.weight = first.embed.weight
    return first, last


def batch(step: int, pipeline: int, vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The ids and targets of one pipeline's step."""
    generator = torch.Generator().manual_seed(10 * step + pipeline)
    ids = torch.randint(0, vocab, (MICROBATCHES * 3,), generator=generator)
    target = torch.randn(MICROBATCHES * 3, vocab, generator=generator, dtype=torch.float64)
    return ids, target.to(dtype)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to train the model."""

    kind: type[torch.optim.Optimizer] = torch.optim.AdamW
    options: Mapping[str, Any] = field(default_factory=lambda: {"lr": 0.05})
    vocab: int = 7
    owner: str = "auto"
    clip: float | None = None
    attached: bool = False
    mesh: tuple[int, ...] = (2,)
    steps: int = STEPS


def reference(case: Case) -> dict[str, Tensor]:
    """The weights after the same steps in one process, on the batches of both pipelines."""
    first, last = build(case.vocab, torch.float64)
    parameters = list({id(p): p for p in [*first.parameters(), *last.parameters()]}.values())
    opt = case.kind(parameters, **case.options)
    for step in range(case.steps):
        both = [batch(step, pipeline, case.vocab, torch.float64) for pipeline in range(2)]
        ids, target = (torch.cat(parts) for parts in zip(*both, strict=True))
        nn.functional.mse_loss(last(first(ids)), target).backward()
        if case.clip is not None:
            nn.utils.clip_grad_norm_(parameters, case.clip)
        opt.step()
        opt.zero_grad()
    named = [*first.named_parameters(), *last.named_parameters()]
    return {name: parameter.detach().clone() for name, parameter in named}


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    """`shape` data parallel dimensions, and two stages."""
    names = ("dp",) if len(shape) == 1 else ("replicate", "shard")
    return init_device_mesh("cpu", (*shape, 2), mesh_dim_names=(*names, "pp"))


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    names = mesh.mesh_dim_names
    assert names is not None
    return mesh["dp"] if names[0] == "dp" else mesh["replicate", "shard"]


def stage_of(
    rank: int,
    vocab: int,
    mesh: DeviceMesh,
    dtype: torch.dtype = torch.float64,
    policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 - frozen
) -> nn.Module:
    """This rank's stage, its linear layer and the rest sharded apart."""
    first, last = build(vocab, dtype)
    inner = (first.first, last.last)[rank % 2]
    stage: nn.Module = (first, last)[rank % 2]
    fully_shard(inner, mesh=data_mesh(mesh), mp_policy=policy)
    fully_shard(stage, mesh=data_mesh(mesh), mp_policy=policy)
    return stage


def full(module: nn.Module) -> dict[str, Tensor]:
    """The whole parameters of a sharded stage. Collective over its mesh."""
    found = {}
    for name, parameter in module.named_parameters():
        assert isinstance(parameter, DTensor)
        found[name] = parameter.detach().full_tensor()  # type: ignore[attr-defined]
    return found


def train(fabric: Fabric, case: Case) -> dict[str, Any]:
    """DP 2 x PP 2 under Schedule1F1B."""
    with process_group(fabric):
        mesh = mesh_of(case.mesh)
        pipeline, place = divmod(fabric.rank, 2)
        module = stage_of(fabric.rank, case.vocab, mesh)
        stage = PipelineStage(module, place, 2, torch.device("cpu"), group=mesh.get_group("pp"))
        schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
        own = assign_owners(stage, TIE, group=mesh["pp"], owner=case.owner)  # type: ignore[arg-type]
        opt = OwnerOptimizer(module.parameters(), case.kind, ownership=own, **case.options)
        if case.attached:
            attach(schedule, opt)
        norms = []
        for step in range(case.steps):
            ids, target = batch(step, pipeline, case.vocab, torch.float64)
            if place == 0:
                schedule.step(ids)
            else:
                schedule.step(target=target)
            if case.clip is not None:
                norms.append(float(opt.clip_grad_norm_(case.clip)))
            opt.step()
            opt.zero_grad()
            assert own.check()
        states = [type(v) for state in opt.state.values() for k, v in state.items() if k != "step"]
        assert set(states) <= {DTensor}
        tied = own.exchange.tied["embed.weight"].parameter
        found = {
            "weights": full(module),
            "norms": norms,
            "has_state": tied in opt.state,
            "sent": opt.stats.sent,
        }
        own.close()
        return found


ADAMW: Final = Case()
CASES: Final = {
    "adamw": ADAMW,
    "divides": Case(vocab=8),
    "empty shard": Case(vocab=1),
    "owner last": Case(owner="last"),
    "attached": Case(attached=True),
    "fused": Case(options={"lr": 0.05, "fused": True}),
    "foreach": Case(options={"lr": 0.05, "foreach": True}),
    "sgd": Case(kind=torch.optim.SGD, options={"lr": 0.1, "momentum": 0.9}),
    "clip": Case(clip=0.1),
    "clip attached": Case(clip=0.1, attached=True, kind=torch.optim.SGD, options={"lr": 0.1}),
    "adagrad": Case(kind=torch.optim.Adagrad),
    "hsdp": Case(mesh=(2, 1)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_trains_like_one_process(rank_pool: RankPool, case: Case) -> None:
    expected = reference(case)
    found = rank_pool.run(4, train, case)
    for rank, each in enumerate(found):
        for name, weight in each["weights"].items():
            torch.testing.assert_close(
                weight, expected[name], rtol=0, atol=1e-10, msg=f"{name} on rank {rank}"
            )
    assert len({tuple(each["norms"]) for each in found}) == 1
    if case.kind is torch.optim.AdamW:
        owner = 1 if case.owner == "last" else 0
        assert [each["has_state"] for each in found] == [rank % 2 == owner for rank in range(4)]


def mistake(fabric: Fabric, what: str) -> tuple[str, str, list[bool]]:
    """(kind of error, its text, whether each parameter is as it was) of a use that is refused."""
    with process_group(fabric):
        mesh = mesh_of((2,))
        place = fabric.rank % 2
        stage = build(8, torch.float64)[place]
        tied = stage.get_parameter(TIE[0][place])
        with torch.no_grad():
            tied.add_(place)  # so that a value that is shared before the error shows
        how: dict[str, Any] = {"mesh": mesh["dp"]}
        owner: Any = "auto"
        if what == "one side":
            if place == 0:
                fully_shard(stage, **how)
        elif what == "mesh":
            whole = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
            other = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "one"))
            assert whole.size() == 4
            fully_shard(stage, mesh=mesh["dp"] if place == 0 else other["one"])
        elif what == "placement":
            fully_shard(stage, shard_placement_fn=lambda p: Shard(p.dim() - 1), **how)
        elif what == "ignored":
            fully_shard(stage, ignored_params={tied} if place == 1 else set(), **how)
        elif what == "owners":
            fully_shard(stage, **how)
            owner = fabric.rank // 2
        before = {
            n: p.to_local().clone() if isinstance(p, DTensor) else p.clone()
            for n, p in stage.named_parameters()
        }
        kind, text = "", ""
        try:
            assign_owners(stage, TIE, group=mesh["pp"], owner=owner)
        except TieError as error:
            kind, text = type(error).__name__, str(error)
        same = [
            torch.equal(before[n], p.to_local() if isinstance(p, DTensor) else p)
            for n, p in stage.named_parameters()
        ]
        return kind, text, same


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("one side", "sharded by fully_shard on rank 0 and whole on rank 1"),
        ("ignored", "sharded by fully_shard on rank 0 and whole on rank 1"),
        ("mesh", "the mesh of 'embed.weight' is (2) on rank 0, and that of 'head.weight' is (1) on rank 1"),
        ("placement", "'embed.weight' on rank 0 is a DTensor that cannot be tied: its placements are (S(1))"),
        ("owners", "sharded over pipelines that chose the ranks 0, 1 of theirs as its owner"),
    ],
)
def test_what_cannot_be_tied_is_refused_on_every_rank(rank_pool: RankPool, what: str, words: str) -> None:
    for kind, text, same in rank_pool.run(4, mistake, what):
        assert kind == "TieError"
        assert words in text
        assert all(same)


def crossed(fabric: Fabric) -> str:
    """Pipelines of two ranks that hold different shards."""
    with process_group(fabric):
        mesh = mesh_of((2,))
        stage = stage_of(fabric.rank, 8, mesh)
        pipelines = [dist.new_group([0, 3]), dist.new_group([2, 1])]
        mine = pipelines[0] if fabric.rank in (0, 3) else pipelines[1]
        with pytest.raises(TieError) as caught:
            assign_owners(stage, TIE, group=mine)
        return str(caught.value)


def test_shards_of_other_rows_are_refused(rank_pool: RankPool) -> None:
    assert all("the coordinate of" in text for text in rank_pool.run(4, crossed))


def on_one_rank(fabric: Fabric, is_tied_first: bool) -> tuple[str, int]:
    """Both uses at one stage, over two data parallel ranks."""
    with process_group(fabric):
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))
        first, last = build(8, torch.float64)
        if not is_tied_first:
            last.head.weight = nn.Parameter(first.embed.weight.detach().clone())
        both = nn.Sequential(first, last)
        fully_shard(both, mesh=mesh["dp"])
        names = ("0.embed.weight", "1.head.weight")
        if is_tied_first:
            assert find_ties(both) == (Tie(names),)
        try:
            own = assign_owners(both, [names], group=mesh["pp"])
        except TieError as error:
            return str(error), 0
        opt = OwnerOptimizer(both.parameters(), torch.optim.SGD, ownership=own, lr=0.1)
        both(torch.tensor([0, 1])).sum().backward()
        opt.step()
        own.close()
        return "", sum(p.numel() for group in opt.param_groups for p in group["params"])


def test_a_tie_within_one_stage(rank_pool: RankPool) -> None:
    found = rank_pool.run(2, on_one_rank, True)
    assert found == [("", 8 * WIDTH + 2 * (WIDTH * WIDTH + WIDTH))] * 2
    for text, _ in rank_pool.run(2, on_one_rank, False):
        assert "Tie them first (head.weight = embed.weight), then call fully_shard" in text


def sharded_late(fabric: Fabric) -> str:
    with process_group(fabric):
        mesh = mesh_of((2,))
        stage = build(8, torch.float64)[fabric.rank % 2]
        own = assign_owners(stage, TIE, group=mesh["pp"])
        fully_shard(stage, mesh=mesh["dp"])
        with pytest.raises(TieError) as caught:
            OwnerOptimizer(stage.parameters(), torch.optim.SGD, ownership=own, lr=0.1)
        own.close()
        return str(caught.value)


def test_fully_shard_after_assign_owners_is_refused(rank_pool: RankPool) -> None:
    assert all("call assign_owners after fully_shard" in text for text in rank_pool.run(4, sharded_late))


def add_grads(module: nn.Module, rank: int, value: float = 1.0) -> None:
    """Give every parameter a gradient of its own shape and sharding."""
    for number, parameter in enumerate(module.parameters()):
        parameter.grad = torch.full_like(parameter, value * (1 + rank % 2 + number), requires_grad=False)


def with_masters(fabric: Fabric, is_resumed: bool) -> list[Tensor]:
    """bf16 shards, fp32 masters; perhaps through torch's checkpoint functions into a new optimizer."""
    with process_group(fabric):
        mesh = mesh_of((2,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

        def new() -> tuple[nn.Module, Ownership, OwnerOptimizer]:
            stage = stage_of(fabric.rank, 7, mesh, torch.bfloat16, policy)
            own = assign_owners(stage, TIE, group=mesh["pp"])
            options: dict[str, Any] = {"master_dtype": torch.float32, "lr": 1e-3}
            return stage, own, OwnerOptimizer(stage.parameters(), torch.optim.AdamW, ownership=own, **options)

        stage, own, opt = new()
        for step in range(6):
            if is_resumed and step == 3:
                weights = get_model_state_dict(stage)
                state = copy.deepcopy(get_optimizer_state_dict(stage, opt))
                weights = {name: value.clone() for name, value in weights.items()}  # type: ignore[union-attr]
                own.close()
                stage, own, opt = new()
                set_model_state_dict(stage, weights)
                set_optimizer_state_dict(stage, opt, state)
                own.check()
            add_grads(stage, fabric.rank, 1e-2 * (step + 1))
            opt.step()
            opt.zero_grad()
            assert own.check()
        for state in opt.state.values():
            kept = {key: value for key, value in state.items() if key != "step"}
            assert {value.dtype for value in kept.values()} == {torch.float32}
            assert all(isinstance(value, DTensor) for value in kept.values())
        own.close()
        return [local_of(p).clone() for p in stage.parameters()]


def test_masters_over_bf16_shards_and_a_resume(rank_pool: RankPool) -> None:
    straight, resumed = (rank_pool.run(4, with_masters, is_resumed) for is_resumed in (False, True))
    for one, two in zip(straight, resumed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def scaled(fabric: Fabric, culprit: int, name: str) -> tuple[list[float], list[bool]]:
    """The scale after each of three steps, the first with a NaN in one shard of one rank; what moved."""
    with process_group(fabric):
        mesh = mesh_of((2,))
        stage = stage_of(fabric.rank, 8, mesh)
        own = assign_owners(stage, TIE, group=mesh["pp"])
        opt = OwnerOptimizer(stage.parameters(), torch.optim.SGD, ownership=own, lr=0.1)
        scaler = GradScaler("cpu", init_scale=8.0, growth_interval=100)
        scales, moved = [], []
        for step in range(3):
            before = [local_of(p).clone() for p in stage.parameters()]
            add_grads(stage, fabric.rank, 8.0)
            if step == 0 and fabric.rank == culprit:
                grad = stage.get_parameter(name).grad
                assert grad is not None
                local_of(grad)[-1] = float("nan")
            if step < 2:
                scaler.unscale_(opt)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
            scales.append(scaler.get_scale())
            after = [local_of(p) for p in stage.parameters()]
            moved.append(not all(torch.equal(a, b) for a, b in zip(before, after, strict=True)))
            assert own.check()
        own.close()
        return scales, moved


@pytest.mark.parametrize(
    ("culprit", "name"), [(0, "first.bias"), (3, "head.weight"), (2, "embed.weight"), (1, "last.weight")]
)
def test_a_nan_in_one_shard_skips_the_step_of_all(rank_pool: RankPool, culprit: int, name: str) -> None:
    assert rank_pool.run(4, scaled, culprit, name) == [([4.0, 4.0, 4.0], [False, True, True])] * 4


def norms_of(fabric: Fabric, kind: float) -> list[tuple[float, float]]:
    """The norm without and with the data parallel group given, and the largest gradient after it."""
    with process_group(fabric):
        mesh = mesh_of((2,))
        stage = stage_of(fabric.rank, 7, mesh)
        own = assign_owners(stage, TIE, group=mesh["pp"])
        opt = OwnerOptimizer(stage.parameters(), torch.optim.SGD, ownership=own, lr=0.1)
        found = []
        for groups in ([], [mesh.get_group("dp")]):
            add_grads(stage, fabric.rank)
            norm = float(opt.clip_grad_norm_(1.0, kind, groups=groups))
            found.append((norm, max(float(local_of(grad).max()) for grad in opt.grads())))
            opt.step()
            opt.zero_grad()
        own.close()
        return found


@pytest.mark.parametrize("kind", [2.0, float("inf")])
def test_the_norm_counts_every_shard_and_a_tie_once(rank_pool: RankPool, kind: float) -> None:
    # embed, first.weight, first.bias: 1, 2, 3; last.weight, last.bias, head: 2, 3, 4; embed = head: 5.
    sizes = [(5.0, 7 * WIDTH), *[(2.0, WIDTH * WIDTH), (3.0, WIDTH)] * 2]
    norm = 5.0 if kind != 2.0 else sum(n * value**2 for value, n in sizes) ** 0.5
    for rank, each in enumerate(rank_pool.run(4, norms_of, kind)):
        largest = (5.0 if rank % 2 == 0 else 3.0) / (norm + 1e-6)
        assert each == [(near(norm), near(largest))] * 2


def differing(fabric: Fabric) -> tuple[list[str], str, bool]:
    """Other values on the stages: the canonical name's are taken; then a shard of a replica is written."""
    with process_group(fabric):
        mesh = mesh_of((2,))
        stage = stage_of(fabric.rank, 7, mesh)
        name = TIE[0][fabric.rank % 2]
        expected = stage.get_parameter(name).detach().clone()
        if fabric.rank % 2:
            with torch.no_grad():
                stage.get_parameter(name).add_(1.0)
        stage(torch.zeros(2, dtype=torch.int64) if fabric.rank % 2 == 0 else torch.zeros(2, WIDTH).double())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            own = assign_owners(stage, TIE, group=mesh["pp"])
        taken = torch.equal(local_of(stage.get_parameter(name)), local_of(expected))
        assert own.check()
        if fabric.rank == 3:
            local_of(stage.get_parameter(name))[0] = 9.0
        text = ""
        try:
            own.check()
        except ReplicaMismatchError as error:
            text = str(error)
        own.close()
        return [str(each.message) for each in caught], text, taken


def test_values_are_shared_and_checked_by_shard(rank_pool: RankPool) -> None:
    """Also after a forward alone, which leaves the root's parameters gathered."""
    found = rank_pool.run(4, differing)
    assert all(taken for _, _, taken in found)
    assert ["differed from that of rank 0 by up to 1 " in " ".join(m) for m, _, _ in found] == [
        False,
        True,
    ] * 2
    assert ["a replica differs" in text for _, text, _ in found] == [False, False, True, True]
