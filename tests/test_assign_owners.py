"""Agreeing on owners over real process groups of torch, and over threads where a wait is not the point."""

from __future__ import annotations

import copy
import pickle
import threading
import time
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from owners import NAMES, TIE, Weights, add_grad, errors, near, process_group, ranks
from ranks import RankFailures
from tiny import one_torch_thread
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from piper_owner.assignment import Ownership, assign_over, assign_owners
from piper_owner.errors import ConfigError, PeerLostError, PeerTimeoutError, TieError
from piper_owner.executor.local import run_threads
from piper_owner.optimizer_wrap import OwnerOptimizer
from piper_owner.ownership import Tie
from piper_owner.ties import find_ties
from piper_owner.transport import Fabric

if TYPE_CHECKING:
    from ranks import RankPool


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


def train(own: Ownership, module: nn.Module, name: str, grad: float) -> float:
    """One step of SGD on the tied weight, and a proof that the copies are equal."""
    opt = OwnerOptimizer(module.parameters(), torch.optim.SGD, ownership=own, lr=0.1)
    add_grad(module.get_parameter(name), grad)
    opt.clip_grad_norm_(1000.0)
    opt.step()
    opt.zero_grad()
    assert own.check()
    own.sync()
    own.close()
    own.close()
    return module.get_parameter(name).item()


# -- process groups


def over_everybody(fabric: Fabric) -> tuple[float, int, int]:
    with process_group(fabric):
        module = Weights({NAMES[fabric.rank]: 1.0})
        own = assign_owners(module, TIE)
        return train(own, module, NAMES[fabric.rank], 2.0 + fabric.rank), own.rank, own.plan.ties[0].owner


def test_group_none_is_every_rank(rank_pool: RankPool) -> None:
    assert rank_pool.run(2, over_everybody) == [(near(0.5), 0, 0), (near(0.5), 1, 0)]


def twice(fabric: Fabric) -> list[float]:
    values = []
    for _ in range(2):
        with process_group(fabric):
            for owner in ("first", "last"):
                module = Weights({NAMES[fabric.rank]: 1.0})
                own = assign_owners(module, TIE, owner=owner, group=dist.group.WORLD)
                values.append(train(own, module, NAMES[fabric.rank], 2.0 + fabric.rank))
    return values


def test_it_may_be_called_again_and_after_torch_was_initialised_again(rank_pool: RankPool) -> None:
    assert rank_pool.run(2, twice) == [near([0.5] * 4)] * 2


def pipelines(fabric: Fabric, how: str) -> tuple[float, int, list[int]]:
    """Ranks 0, 1 and 2, 3 are two pipelines; their groups differ."""
    with process_group(fabric):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
        if how == "mesh":
            group: Any = mesh["pp"]
        elif how == "process group":
            group = mesh.get_group("pp")
        else:
            group = next(
                made
                for made in [dist.new_group([1, 0]), dist.new_group([2, 3])]
                if isinstance(made, dist.ProcessGroup)
            )
        stage, pipeline = fabric.rank % 2, fabric.rank // 2
        module = Weights({NAMES[stage]: 1.0})
        own = assign_owners(module, TIE, group=group)
        value = train(own, module, NAMES[stage], (1.0 + pipeline) * (2.0 + stage))
        return value, own.rank, list(own.plan.ties[0].ranks)


@pytest.mark.parametrize("how", ["mesh", "process group", "new_group"])
def test_two_pipelines_whose_groups_differ(rank_pool: RankPool, how: str) -> None:
    first, second = near(0.5), near(0.0)
    assert rank_pool.run(4, pipelines, how) == [
        (first, 0, [0, 1]),
        (first, 1, [0, 1]),
        (second, 0, [0, 1]),
        (second, 1, [0, 1]),
    ]


def a_pair_of_four(fabric: Fabric) -> float:
    """Ranks 0 and 3 hold the tie; 1 and 2 are in no group of it at all."""
    with process_group(fabric):
        pair = dist.new_group([0, 3])
        value = 0.5
        if fabric.rank in (0, 3):
            name = NAMES[fabric.rank // 3]
            module = Weights({name: 1.0})
            own = assign_owners(module, TIE, group=pair)
            value = train(own, module, name, 2.0 + fabric.rank // 3)
        return value


def test_case_40_the_others_of_the_world_need_not_take_part(rank_pool: RankPool) -> None:
    assert rank_pool.run(4, a_pair_of_four) == [near(0.5)] * 4


def wrong_groups(fabric: Fabric, fault: str) -> str:
    with process_group(fabric):
        group: Any = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "pp"))
        if fault == "not a member":
            group = dist.new_group([1 - fabric.rank] if fabric.rank else [0])
            if fabric.rank == 0:
                return ""
        try:
            assign_owners([], [], group=group)
        except ConfigError as error:
            return str(error)
        return "went on"


def test_a_mesh_of_two_dimensions_is_refused(rank_pool: RankPool) -> None:
    for said in rank_pool.run(2, wrong_groups, "mesh"):
        assert 'mesh["pp"]' in said


def test_a_rank_outside_its_group_is_told_so(rank_pool: RankPool) -> None:
    assert "rank 1 is not in the group" in rank_pool.run(2, wrong_groups, "not a member")[1]


def test_not_initialised_is_a_world_of_one() -> None:
    module = Weights(dict.fromkeys(NAMES, 1.0))
    own = assign_owners(module, find_ties_by_name(module))
    assert own.plan.world_size == 1
    assert module.get_parameter(NAMES[0]) is module.get_parameter(NAMES[1])
    assert train(own, module, NAMES[1], 5.0) == near(0.5)


def find_ties_by_name(module: nn.Module) -> tuple[Tie, ...]:
    assert find_ties(module) == ()
    return (Tie(NAMES),)


def test_a_group_without_torch_distributed_is_refused() -> None:
    with pytest.raises(ConfigError, match="not initialised"):
        assign_owners([], [], group=object())  # type: ignore[arg-type]


def one_never_calls(fabric: Fabric) -> tuple[str, float]:
    with process_group(fabric):
        started = time.monotonic()
        if fabric.rank == 2:
            return "", 0.0
        try:
            assign_owners(Weights({NAMES[fabric.rank]: 1.0}), TIE, timeout=timedelta(seconds=2))
        except PeerTimeoutError as error:
            return str(error), time.monotonic() - started
        return "went on", 0.0


def test_case_43_a_rank_that_never_calls(rank_pool: RankPool) -> None:
    for said, seconds in rank_pool.run(3, one_never_calls)[:2]:
        assert "every one of the ranks (0, 1, 2) must open it" in said
        assert seconds < 8.0


def timeouts(fabric: Fabric) -> tuple[float, float]:
    with process_group(fabric):
        module = Weights({NAMES[fabric.rank]: 1.0})
        of_group = assign_owners(module, TIE)
        own = assign_owners(module, TIE, timeout=timedelta(seconds=3))
        line = next(iter(own.exchange.lines.values()))
        default = next(iter(of_group.exchange.lines.values())).channel.timeout.total_seconds()
        return default, line.channel.timeout.total_seconds()


def test_the_timeout_is_the_groups_unless_given(rank_pool: RankPool) -> None:
    assert rank_pool.run(2, timeouts) == [(20.0, 3.0), (20.0, 3.0)]


def a_rank_dies_in_a_step(fabric: Fabric) -> None:
    with process_group(fabric):
        names = (*NAMES, "third.weight")
        module = Weights({names[fabric.rank]: 1.0})
        own = assign_owners(module, [names])
        opt = OwnerOptimizer(module.parameters(), torch.optim.SGD, ownership=own, lr=0.1)
        for step in range(3):
            add_grad(module.get_parameter(names[fabric.rank]), 1.0)
            if step == 1 and fabric.rank == 2:
                with own.reporting("the backward of step 1"):
                    raise ArithmeticError("a layer overflowed")
            opt.step()
            opt.zero_grad()


def test_case_44_every_rank_names_the_one_that_failed(rank_pool: RankPool) -> None:
    with pytest.raises(RankFailures) as caught:
        rank_pool.run(3, a_rank_dies_in_a_step)
    failures = caught.value.failures
    assert sorted(failures) == [0, 1, 2]
    assert failures[2].kind == "ArithmeticError"
    for rank in (0, 1):
        assert isinstance(failures[rank].error, PeerLostError)
        assert "rank 2 failed first, at the backward of step 1" in failures[rank].text
        assert "a layer overflowed" in failures[rank].text
    assert "embed.weight" in failures[0].text


# -- arguments


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"owner": 7}, "rank 7 cannot own"),
        ({"owner": "middle"}, "choose one of"),
        ({"owner": {"other.weight": 0}}, "other.weight"),
        ({"owner": {0: 1}}, "owner= has the key 0 (int)"),
        ({"owner": {NAMES[0]: 1.5}}, "owner['embed.weight'] is 1.5 (float)"),
        ({"owner": torch.device("cpu")}, "owner is device(type='cpu')"),
        ({"layout": {(1,): "rows"}}, "layout= has the key (1,) (tuple)"),
        ({"uses": {NAMES[0]: "rows"}}, "choose one of ['lookup', 'dense']"),
        ({"uses": {1: "dense"}}, "uses={1: 'dense'}: give a mapping"),
        ({"uses": ["dense"]}, "uses=['dense']: give a mapping"),
        ({"names": "embed.weight"}, "names='embed.weight': give a mapping"),
        ({"names": lambda name: None}, "names= gives None for"),
        ({"scope": ["global"]}, "scope=['global']; choose one of"),
        ({"timeout": 5}, "timeout=5: give a positive datetime.timedelta"),
        ({"ties": None}, "ties=None: give a list of ties"),
        ({"ties": NAMES[0]}, "ties='embed.weight': give a list of ties"),
        ({"ties": Tie(NAMES)}, "give a list of ties"),
        ({"stages": 5}, "stages on rank"),
        ({"stages": None}, "stages on rank"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused_on_every_rank(arguments: dict[str, Any], said: str) -> None:
    def work(fabric: Fabric) -> None:
        given = {"stages": Weights({NAMES[fabric.rank]: 1.0}), "ties": TIE, **arguments}
        assign_over(fabric, **given)

    for error in errors(2, work):
        assert isinstance(error, ConfigError)
        assert said in str(error)


def bad_timeouts(fabric: Fabric) -> list[str]:
    said = []
    with process_group(fabric):
        for timeout in (5, timedelta(0), timedelta(seconds=-1)):
            given: Any = timeout if fabric.rank == 1 else None
            try:
                assign_owners(Weights({NAMES[fabric.rank]: 1.0}), TIE, timeout=given)
            except ConfigError as error:
                said.append(str(error))
    return said


def test_a_bad_timeout_is_told_to_every_rank(rank_pool: RankPool) -> None:
    first, second = rank_pool.run(2, bad_timeouts)
    assert first == [f"rank 1 failed: {text}" for text in second]
    assert [text.split(": give")[0] for text in second] == [
        "timeout=5",
        "timeout=datetime.timedelta(0)",
        "timeout=datetime.timedelta(days=-1, seconds=86399)",
    ]


@pytest.mark.parametrize("given", [None, 3])
def test_an_optimizer_needs_an_ownership(given: Any) -> None:  # noqa: ANN401
    with pytest.raises(ConfigError, match=r"give the Ownership that assign_owners returns"):
        OwnerOptimizer([nn.Parameter(torch.ones(1))], torch.optim.SGD, ownership=given, lr=0.1)


def test_a_stage_that_is_none_is_an_error_on_both() -> None:
    def work(fabric: Fabric) -> None:
        stage: Any = Weights({NAMES[0]: 1.0}) if fabric.rank == 0 else "a stage"
        assign_over(fabric, [stage], TIE)

    first, second = errors(2, work)
    assert "rank 1 failed" in str(first)
    assert "stages[0] on rank 1 is a str" in str(second)


@pytest.mark.parametrize("what", ["ties", "owner"])
def test_ranks_that_were_told_different_things(what: str) -> None:
    def work(fabric: Fabric) -> None:
        ties = [NAMES] if what == "owner" or fabric.rank == 0 else [NAMES[::-1]]
        owner = fabric.rank if what == "owner" else 0
        assign_over(fabric, Weights({NAMES[fabric.rank]: 1.0}), ties, owner=owner)

    for error in errors(2, work):
        assert isinstance(error, TieError)
        assert f"called with {what}=" in str(error)
        assert "on rank 1" in str(error)


@pytest.mark.parametrize(
    ("ties", "said"),
    [
        ([("embed.weigth", NAMES[1])], "did you mean 'embed.weight'"),
        ([NAMES, (NAMES[1], "own.weight")], "stands in two ties"),
        ([("embed.weight", "embed.weight")], "lists each name once"),
        ([()], "at least one"),
        (list(NAMES), "a tie is a tuple of names"),
        ([NAMES, 3], "ties= has 3 in it"),
        ([("embed.weight", 3)], "made of parameter names, not 3"),
        ([("0.weight", NAMES[1])], "give assign_owners names={name in the stage: name in the model}"),
    ],
    ids=str,
)
def test_bad_ties_are_refused_on_every_rank(ties: list[tuple[str, ...]], said: str) -> None:
    def work(fabric: Fabric) -> None:
        assign_over(fabric, Weights({NAMES[fabric.rank]: 1.0, "own.weight": 1.0}), ties)

    for error in errors(2, work):
        assert isinstance(error, TieError)
        assert said in str(error)


def test_names_map_a_stages_names_to_the_models() -> None:
    def work(fabric: Fabric) -> float:
        module = Weights({"w.weight": 1.0})
        mapped = {"w.weight": NAMES[fabric.rank]}
        names: Any = mapped if fabric.rank == 0 else mapped.get
        return train(assign_over(fabric, module, TIE, names=names), module, "w.weight", 2.0 + fabric.rank)

    assert ranks(2, work) == [near(0.5)] * 2


def test_wrappers_prefixes_are_stripped() -> None:
    def work(fabric: Fabric) -> float:
        inner = Weights({NAMES[fabric.rank]: 1.0})
        wrapped = nn.ModuleDict({"_orig_mod": nn.ModuleDict({"module": inner})})
        own = assign_over(fabric, wrapped, TIE)
        return train(own, inner, NAMES[fabric.rank], 2.0 + fabric.rank)

    assert ranks(2, work) == [near(0.5)] * 2


@pytest.mark.parametrize("how", ["wrapper", "names"])
def test_two_parameters_of_one_name_are_refused_on_every_rank(how: str) -> None:
    def work(fabric: Fabric) -> None:
        module = Weights({NAMES[fabric.rank]: 1.0})
        names = None
        if fabric.rank == 1 and how == "wrapper":
            module.get_submodule("head").add_module("module", nn.Linear(1, 1, bias=False).double())
        elif fabric.rank == 1:
            module.add_module("other", nn.Linear(1, 1, bias=False).double())
            names = {"other.weight": NAMES[1]}
        assign_over(fabric, module, TIE, names=names)

    other = "head.module.weight" if how == "wrapper" else "other.weight"
    for error in errors(2, work):
        assert isinstance(error, TieError)
        assert f"'head.weight' and {other!r} are two Parameters of one stage" in str(error)


def test_one_parameter_under_one_name_twice_and_two_untied_ones_are_fine() -> None:
    def work(fabric: Fabric) -> float:
        module = Weights({NAMES[fabric.rank]: 1.0, "own.weight": 1.0})
        module.get_submodule("own").add_module("module", nn.Linear(1, 1, bias=False).double())
        part = module.get_submodule(NAMES[fabric.rank].split(".")[0])
        part.add_module("module", nn.Module())
        part.get_submodule("module").register_parameter("weight", module.get_parameter(NAMES[fabric.rank]))
        return train(assign_over(fabric, module, TIE), module, NAMES[fabric.rank], 2.0 + fabric.rank)

    assert ranks(2, work) == [near(0.5)] * 2


def test_a_model_with_a_part_called_module() -> None:
    parts = nn.ModuleDict({"e": nn.Embedding(4, 2), "h": nn.Linear(2, 4, bias=False)})
    parts["h"].weight = parts["e"].weight
    ties = find_ties(nn.ModuleDict({"module": parts}))

    def work(fabric: Fabric) -> str:
        name = "eh"[fabric.rank]
        stage = nn.ModuleDict({"module": nn.ModuleDict({name: copy.deepcopy(parts[name])})})
        return assign_over(fabric, stage, ties).describe().splitlines()[0]

    assert ranks(2, work) == ["e.weight = h.weight: one parameter, 4 x 2 float32"] * 2


def test_a_default_device_does_not_matter() -> None:
    def work(fabric: Fabric) -> float:
        module = Weights({NAMES[fabric.rank]: 1.0})
        with torch.device("meta"):
            return train(assign_over(fabric, module, TIE), module, NAMES[fabric.rank], 2.0 + fabric.rank)

    assert ranks(2, work) == [near(0.5)] * 2


# -- afterwards


def test_a_closed_ownership_says_so_whatever_it_is_asked() -> None:
    def work(fabric: Fabric) -> list[str]:
        module = Weights({NAMES[fabric.rank]: 1.0} if fabric.rank < 2 else {"own.weight": 1.0})
        own = assign_over(fabric, module, TIE)
        opt = OwnerOptimizer(module.parameters(), torch.optim.SGD, ownership=own, lr=0.1)
        own.close()
        said = []
        for call in (
            opt.step,
            own.check,
            lambda: opt.clip_grad_norm_(1.0),
            lambda: opt.prefetch(torch.tensor([0])),
            own.sync,
            lambda: opt.load_state_dict(opt.state_dict()),
            lambda: OwnerOptimizer(module.parameters(), torch.optim.SGD, ownership=own, lr=0.1),
        ):
            with pytest.raises(PeerLostError) as caught:
                call()
            said.append(str(caught.value))
        return said

    for rank, said in enumerate(ranks(3, work)):
        assert all(f"rank {rank}: this Ownership was closed" in text for text in said), said


def test_an_ownership_is_not_copied() -> None:
    own = assign_owners(Weights({name: 1.0 for name in NAMES}), TIE)
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="an Ownership holds connections to other ranks"):
            attempt(own)


@pytest.mark.parametrize("call", ["assign_owners", "OwnerOptimizer", "clip_grad_norm_"])
def test_a_wait_says_in_which_call_and_for_whom(call: str) -> None:
    others_fail = threading.Event()

    def work(fabric: Fabric) -> str:
        def stay_away(where: str) -> bool:
            if call == where and fabric.rank == 2:
                others_fail.wait(30.0)
            return call == where and fabric.rank == 2

        module = Weights({NAMES[fabric.rank]: 1.0} if fabric.rank < 2 else {"own.weight": 1.0})
        try:
            if stay_away("assign_owners"):
                return ""
            own = assign_over(fabric, module, TIE)
            if stay_away("OwnerOptimizer"):
                return ""
            opt = OwnerOptimizer(module.parameters(), torch.optim.SGD, ownership=own, lr=0.1)
            if stay_away("clip_grad_norm_"):
                return ""
            opt.clip_grad_norm_(1.0)
        except PeerTimeoutError as error:
            others_fail.set()
            return str(error)
        except PeerLostError as error:  # of the two that wait, one is the first to give up
            return str(error)
        raise AssertionError("nobody waited")

    first, second, _ = run_threads(3, work, timeout=timedelta(seconds=1))
    assert call in first
    assert call in second
    assert "rank 0 waited 1 s for ranks 1, 2" in first or "rank 1 waited 1 s for ranks 0, 2" in second


def test_uses_and_description() -> None:
    def work(fabric: Fabric) -> tuple[str, list[str]]:
        parts: list[nn.Module] = [nn.Embedding(5, 2), nn.Linear(2, 5, bias=False)]
        module = nn.ModuleDict({("embed", "head")[fabric.rank]: parts[fabric.rank]})
        with torch.no_grad():
            next(module.parameters()).fill_(1.0)
        own = assign_over(fabric, module, TIE, uses={"embed.weight": "dense"})
        other = assign_over(fabric, module, TIE)
        return own.describe(), [holder.use.value for holder in other.plan.ties[0].holders]

    for text, uses in ranks(2, work):
        assert text.splitlines() == [
            "embed.weight = head.weight: one parameter, 5 x 2 float32",
            "  rank 0 owns it (stage 0, dense use): of the stages that use it 0 is the earliest, "
            "where transfers can hide",
            "  rank 1 holds a replica (stage 1, dense use)",
        ]
        assert uses == ["lookup", "dense"]


def test_no_ties_and_no_stages() -> None:
    def work(fabric: Fabric) -> str:
        own = assign_over(fabric, [], [])
        assert own.check()
        own.sync()
        return repr(own)

    assert ranks(2, work)[1] == "<Ownership of rank 1: no tied parameters over 2 ranks>"


def test_a_first_name_on_meta_and_max_norm_are_refused_on_every_rank() -> None:
    def work(fabric: Fabric, fault: str) -> None:
        device = "meta" if fault == "meta" and fabric.rank == 0 else "cpu"
        max_norm = 1.0 if fault == "max_norm" and fabric.rank == 1 else None
        name = ("embed", "head")[fabric.rank]
        assign_over(fabric, nn.ModuleDict({name: nn.Embedding(3, 2, device=device, max_norm=max_norm)}), TIE)

    for fault in ("meta", "max_norm"):
        for error in errors(2, lambda f, fault=fault: work(f, fault)):  # type: ignore[misc]
            assert isinstance(error, TieError)
            assert fault in str(error)
            assert "embed.weight" in str(error)


@pytest.mark.parametrize("owner", [0, 1, 2])
def test_copies_on_the_meta_device_are_filled(owner: int) -> None:
    """Rank 1 holds two names, both on the meta device; rank 2 one on meta beside one that has a value."""
    names = ("a.weight", "b.weight", "c.weight", "d.weight", "e.weight")
    held = (names[:1], names[1:3], names[3:])

    def work(fabric: Fabric) -> float:
        module = Weights(dict.fromkeys(held[fabric.rank], torch.ones(3, 2)))
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(4.0 if fabric.rank == 0 else 1.0)
        places = {0: [], 1: list(held[1]), 2: [names[3]]}[fabric.rank]
        for name in places:
            place, _, leaf = name.rpartition(".")
            old = module.get_parameter(name)
            module.get_submodule(place).register_parameter(leaf, nn.Parameter(old.detach().to("meta")))
        own = assign_over(fabric, module, [names], owner=owner)
        parameter = module.get_parameter(held[fabric.rank][0])
        assert not parameter.is_meta
        assert all(module.get_parameter(name) is parameter for name in held[fabric.rank])
        assert own.check()
        assert bool((parameter == 4.0).all())
        opt = OwnerOptimizer(module.parameters(), torch.optim.SGD, ownership=own, lr=1.0)
        add_grad(parameter, 1.0)
        opt.step()
        assert own.check()
        return parameter[0, 0].item()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert ranks(3, work) == [1.0] * 3
    assert len(caught) == 1  # that of rank 2 had a value
    assert "rank 2 differed from that of rank 0 by up to 3" in str(caught[0].message)


def test_a_stage_that_lost_its_tie_is_tied_again() -> None:
    """`to_empty` makes two parameters of one; here both stand on rank 0, and a third on rank 1."""

    def work(fabric: Fabric) -> tuple[float, bool]:
        names = ("a.weight", "b.weight", "c.weight")
        held = names[:2] if fabric.rank == 0 else names[2:]
        module = Weights(dict.fromkeys(held, 1.0))
        own = assign_over(fabric, module, [names])
        is_one = module.get_parameter(held[0]) is module.get_parameter(held[-1])
        return train(own, module, held[-1], 2.0 + fabric.rank), is_one

    assert ranks(2, work) == [(near(0.5), True)] * 2
