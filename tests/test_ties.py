"""Finding ties in a model, and making the names on one rank one Parameter."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from piper_owner.errors import TieError
from piper_owner.models.gpt import TIE, GPTConfig, build_model, build_stage
from piper_owner.ownership import Tie, Use
from piper_owner.ties import describe_uses, find_ties, unite


class Both(nn.Module):
    """An embedding and a head."""

    def __init__(self, *, tied: bool = True, **options: object) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4, **options)  # type: ignore[arg-type]
        self.head = nn.Linear(4, 6, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.embed(ids))
        return out


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_ties_are_found_by_identity(device: str) -> None:
    with torch.device(device):
        assert find_ties(Both()) == (Tie(("embed.weight", "head.weight")),)
        assert find_ties(Both(tied=False)) == ()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch.compile imports what warns
def test_names_are_without_the_parts_of_wrappers() -> None:
    expected = (Tie(("embed.weight", "head.weight")),)
    assert find_ties(torch.compile(Both())) == expected  # type: ignore[arg-type]
    model = Both()
    model.head = checkpoint_wrapper(model.head)  # type: ignore[assignment]
    assert find_ties(nn.ModuleDict({"module": model})) == expected
    shared = nn.Linear(2, 2, bias=False)
    assert find_ties(nn.ModuleDict({"a": shared, "b": nn.ModuleDict({"module": shared})})) == (
        Tie(("a.weight", "b.weight")),
    )


def test_a_tied_name_that_is_another_parameters_without_wrappers_is_refused() -> None:
    model = Both()
    model.head.add_module("module", nn.Linear(4, 6, bias=False))
    with pytest.raises(TieError, match=r"'head.weight' and 'head.module.weight' are two Parameters"):
        find_ties(model)
    model.head.module = model.embed
    assert find_ties(model) == (Tie(("embed.weight", "head.weight")),)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_gpt_has_one_tie(device: str) -> None:
    config = GPTConfig(vocab_size=300, hidden=8, layers=2, heads=2, context=4)
    assert find_ties(build_model(config, device=device)) == (TIE,)
    assert find_ties(build_stage(config, 0, 2, device=device)) == ()


def test_a_module_used_twice_is_a_tie_of_its_parameters() -> None:
    layer = nn.Linear(3, 3)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    assert find_ties(model) == (Tie(("0.weight", "2.weight")), Tie(("0.bias", "2.bias")))


def test_ties_of_three_names_and_several_ties() -> None:
    model = nn.ModuleDict({name: nn.Linear(3, 3) for name in "abcd"})
    model["c"].weight = model["b"].weight = model["a"].weight
    model["d"].bias = model["a"].bias
    assert find_ties(model) == (
        Tie(("a.weight", "b.weight", "c.weight")),
        Tie(("a.bias", "d.bias")),
    )


def test_equal_values_are_no_tie() -> None:
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    model[1].load_state_dict(model[0].state_dict())
    assert find_ties(model) == ()


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("transposed", [True, False])
def test_case_17_same_storage_in_another_object_is_refused(transposed: bool, device: str) -> None:
    with torch.device(device):
        model = Both(tied=False)
        assert find_ties(model) == ()
    data = model.embed.weight.data
    model.head.weight = nn.Parameter(data.t() if transposed else data)
    with pytest.raises(
        TieError, match=r"'embed\.weight' and 'head\.weight' are two Parameters over the same"
    ):
        find_ties(model)


def test_case_17_views_that_overlap_in_part_are_refused() -> None:
    flat = torch.zeros(10)
    model = nn.ParameterDict({"a": nn.Parameter(flat[:6]), "b": nn.Parameter(flat[5:])})
    with pytest.raises(TieError, match="over the same memory"):
        find_ties(model)


def test_case_17_an_overlap_behind_a_small_view_is_found() -> None:
    flat = torch.zeros(10)
    parts = {"a": flat[:10], "b": flat[1:2], "c": flat[8:]}
    model = nn.ParameterDict({name: nn.Parameter(part) for name, part in parts.items()})
    with pytest.raises(TieError):
        find_ties(model)
    del model["b"]
    with pytest.raises(TieError, match="'a' and 'c'"):
        find_ties(model)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_case_17_views_of_one_flat_buffer_are_no_tie(device: str) -> None:
    flat = torch.zeros(10, device=device)
    model = nn.ParameterDict({"a": nn.Parameter(flat[:6].view(2, 3)), "b": nn.Parameter(flat[6:])})
    assert find_ties(model) == ()


def test_columns_of_one_buffer_interleave_without_overlap() -> None:
    flat = torch.zeros(6, 4)
    model = nn.ParameterDict({"a": nn.Parameter(flat[:, :2]), "b": nn.Parameter(flat[:, 2:])})
    assert find_ties(model) == ()
    model["c"] = nn.Parameter(flat[::2, 1:3])
    with pytest.raises(TieError, match="'a' and 'c'"):
        find_ties(model)


def test_views_of_other_dtypes_overlap_by_their_bytes() -> None:
    flat = torch.zeros(8, 2)
    halves = flat.view(torch.float16)  # (8, 4): two to each float
    model = nn.ParameterDict({"a": nn.Parameter(flat[:, 0]), "b": nn.Parameter(halves[:, 2:])})
    assert find_ties(model) == ()
    model["c"] = nn.Parameter(halves[:, 1])
    with pytest.raises(TieError, match="'a' and 'c'"):
        find_ties(model)


def test_case_17_empty_tensors_are_no_tie() -> None:
    model = nn.ParameterDict({name: nn.Parameter(torch.empty(0)) for name in "ab"})
    assert find_ties(model) == ()
    flat = torch.zeros(4)
    model = nn.ParameterDict({"a": nn.Parameter(flat[:0]), "b": nn.Parameter(flat)})
    assert find_ties(model) == ()


def test_case_17_a_freed_and_reused_id_is_no_tie() -> None:
    freed: set[int] = set()
    reused = False
    for _ in range(50):
        model = nn.ModuleList([nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)])
        assert find_ties(model) == ()
        ids = {id(parameter) for parameter in model.parameters()}
        reused |= not ids.isdisjoint(freed)
        freed |= ids
        del model
        gc.collect(0)
    assert reused, "no id was reused: this test shows nothing"


def test_uses_tell_lookups_from_products() -> None:
    model = Both()
    uses = {use.name: use for use in describe_uses({3: model}, rank=2)}
    assert list(uses) == ["embed.weight", "head.weight"]
    assert uses["embed.weight"].use is Use.LOOKUP
    assert uses["head.weight"].use is Use.DENSE
    for use in uses.values():
        assert (use.rank, use.stage, use.shape, use.dtype) == (2, 3, (6, 4), "float32")
        assert use.requires_grad
    model.embed.weight.requires_grad_(False)
    assert not any(use.requires_grad for use in describe_uses({0: model}, rank=0))


def test_unite_keeps_the_earliest_name_s_parameter() -> None:
    first, second = Both(tied=False), Both(tied=False)
    with torch.no_grad():
        for value, each in enumerate((first.head, first.embed, second.head, second.embed)):
            each.weight.fill_(float(value))  # type: ignore[operator]
    names = ("head.weight", "embed.weight")
    with pytest.warns(UserWarning, match=r"tie \('head\.weight', .* differed by up to 3 before") as caught:
        kept = unite({0: first, 5: second}, Tie(names))
    assert len(caught) == 1
    assert bool((kept == 0).all())
    assert kept is first.head.weight
    places = [first.embed.weight, first.head.weight, second.embed.weight, second.head.weight]
    assert all(place is kept for place in places)
    assert len(list(first.parameters())) == 1


@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
def test_case_19_a_stage_with_one_of_the_names(name: str) -> None:
    model = Both(tied=False)
    delattr(model, "head" if name == "embed.weight" else "embed")
    assert unite({0: model}, Tie(("embed.weight", "head.weight"))) is model.get_parameter(name)


def test_case_15_to_empty_loses_a_tie_and_unite_restores_it() -> None:
    with torch.device("meta"):
        model = Both()
    model.to_empty(device="cpu")
    assert model.head.weight is not model.embed.weight
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert unite({0: model}, Tie(("embed.weight", "head.weight"))) is model.head.weight
    assert model.head.weight is model.embed.weight


def test_case_15_the_meta_device_is_refused() -> None:
    with torch.device("meta"):
        model = Both()
    with pytest.raises(TieError, match="still on the meta device; call to_empty"):
        unite({0: model}, Tie(("embed.weight", "head.weight")))


def test_case_20_max_norm_is_refused() -> None:
    with pytest.raises(TieError, match=r"max_norm=1\.5, which rewrites the weight"):
        unite({0: Both(max_norm=1.5)}, Tie(("embed.weight", "head.weight")))


def test_a_tie_that_no_stage_has_is_refused() -> None:
    with pytest.raises(
        TieError, match=r"none of the stages \[1\] has a parameter of the tie \('x', 'y\.z'\)"
    ):
        unite({1: Both()}, Tie(("x", "y.z")))


@pytest.mark.parametrize("what", ["shape", "dtype", "requires_grad"])
def test_partners_must_agree(what: str) -> None:
    model = Both(tied=False)
    match what:
        case "shape":
            model.head = nn.Linear(4, 7, bias=False)
        case "dtype":
            model.head.double()
        case _:
            model.head.requires_grad_(False)
    good = nn.ModuleDict({"good": nn.Linear(4, 6, bias=False)})
    before = [model.head.weight, good.get_parameter("good.weight")]
    with pytest.raises(TieError, match="tied parameters are one parameter and must agree"):
        unite({0: model, 1: good}, Tie(("embed.weight", "good.weight", "head.weight")))
    after = [model.head.weight, good.get_parameter("good.weight")]
    assert all(one is two for one, two in zip(before, after, strict=True)), "nothing was changed"
