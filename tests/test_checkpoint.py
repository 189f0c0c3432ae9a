"""Checkpoints: one copy on disk, for other stages, ranks, owners and layouts; whole or not there."""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import random
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from owners import errors, ranks
from tiny import one_torch_thread
from torch import Tensor, nn

from piper_owner import checkpoint
from piper_owner.assignment import Ownership, assign_over
from piper_owner.checkpoint.layout import INDEX
from piper_owner.errors import CheckpointError, ConfigError, ReplicaMismatchError
from piper_owner.optimizer_wrap import OwnerOptimizer
from piper_owner.transport import Fabric

VOCABULARY, WIDTH, LAYERS, MICROBATCHES = 11, 4, 2, 4
TIE = (("embed.weight", "head.weight"),)
BF16 = {"dtype": torch.bfloat16, "master_dtype": torch.float32}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


class Model(nn.Module):
    """An embedding, some layers, and a head that is the embedding; `parts` are those of one rank."""

    def __init__(self, parts: Sequence[str], dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        shapes = {"embed": (VOCABULARY, WIDTH)}
        shapes |= {f"layer{number}": (WIDTH, WIDTH) for number in range(LAYERS)}
        values = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        values["head"] = values["embed"]
        for part in parts:
            if part == "embed":
                self.embed = nn.Embedding(VOCABULARY, WIDTH)
            else:
                rows = VOCABULARY if part == "head" else WIDTH
                self.add_module(part, nn.Linear(WIDTH, rows, bias=False))
            with torch.no_grad():
                self.get_submodule(part).get_parameter("weight").copy_(values[part])
        self.to(dtype)


def parts_of(rank: int, size: int) -> list[str]:
    """The parts of the model on `rank` of `size`."""
    everything = ["embed", *(f"layer{number}" for number in range(LAYERS)), "head"]
    return [part for place, part in enumerate(everything) if place * size // len(everything) == rank]


class Rank:
    """One rank of the job: every part has a loss of its own, over a batch that all ranks know."""

    def __init__(self, fabric: Fabric, layout: str, owner: str, **options: Any) -> None:  # noqa: ANN401
        self.size = fabric.world_size
        dtype = options.pop("dtype", torch.float64)
        self.model = Model(parts_of(fabric.rank, fabric.world_size), dtype)
        if fabric.world_size == 1 and "head" in dict(self.model.named_children()):
            self.model.get_submodule("head").weight = self.model.embed.weight
        chosen: Any = {"owner": owner, "layout": layout if fabric.world_size > 1 else "dense"}
        self.own: Ownership = assign_over(fabric, self.model, TIE, **chosen)
        self.opt = OwnerOptimizer(
            self.model.parameters(), torch.optim.AdamW, ownership=self.own, lr=0.05, **options
        )

    def step(self, number: int) -> None:
        """Accumulate microbatches, and step."""
        generator = torch.Generator().manual_seed(100 + number)
        batch = torch.randint(0, VOCABULARY, (MICROBATCHES, 3), generator=generator)
        parts = dict(self.model.named_children())
        self.opt.prefetch(batch if "embed" in parts else None)
        for ids in batch:
            for name, part in parts.items():
                if name == "embed":
                    loss = part(ids).square().sum()
                else:
                    weight = part.get_parameter("weight")
                    given = (ids[:, None] + torch.arange(WIDTH)).to(weight.dtype) / 7
                    loss = part(given).sin().sum()
                loss.backward()
        self.opt.step()
        self.opt.zero_grad()

    def save(self, path: Path) -> None:
        checkpoint.save(path, self.model, self.opt, self.own, step=2, extra={"words": ["a"]})

    def load(self, path: Path) -> checkpoint.Loaded:
        return checkpoint.load(path, self.model, self.opt, self.own)

    def state(self) -> dict[str, Tensor]:
        """Weights and state that this rank has, by name; of a tie, the owner's."""
        assert self.own.check()
        found: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            canonical = "embed.weight" if name == "head.weight" else name
            if canonical == "embed.weight" and not self.own.owns(self.own.plan[canonical]):
                continue
            found[canonical] = parameter.detach().clone()
            for key, value in self.opt.state[parameter].items():
                found[f"{canonical}.{key}"] = value.clone()
        return found


def disturb(rank: Rank) -> None:
    """Give all weights of the rank other values, so that a load has something to do."""
    with torch.no_grad():
        for name, parameter in rank.model.named_parameters():
            if rank.own.plan["embed.weight"].copies or "embed" not in name:
                parameter.fill_(0.25)


def straight(size: int, layout: str, owner: str, path: Path, **options: Any) -> dict[str, Tensor]:  # noqa: ANN401
    """Two steps, save, and one more: its state."""

    def work(fabric: Fabric) -> dict[str, Tensor]:
        rank = Rank(fabric, layout, owner, **options)
        rank.step(0)
        rank.step(1)
        rank.save(path)
        rank.step(2)
        return rank.state()

    return {name: value for part in ranks(size, work) for name, value in part.items()}


def resumed(size: int, layout: str, owner: str, path: Path, **options: Any) -> dict[str, Tensor]:  # noqa: ANN401
    """A fresh start from disk, and the third step: its state."""

    def work(fabric: Fabric) -> dict[str, Tensor]:
        rank = Rank(fabric, layout, owner, **options)
        disturb(rank)
        loaded = rank.load(path)
        assert (loaded.step, loaded.extra) == (2, {"words": ["a"]})
        rank.step(2)
        return rank.state()

    return {name: value for part in ranks(size, work) for name, value in part.items()}


LAYOUTS = [
    (size, layout, owner)
    for size, layout, owner in itertools.product((1, 2, 3, 4), ("dense", "rows"), ("first", "last"))
    if (layout == "dense" or owner == "last") and not (size == 1 and (layout, owner) != ("dense", "first"))
]
"""Rows are served by the head's rank, so that their owner is the last one; one rank has no layouts."""
PAIRS = list(itertools.product(LAYOUTS, LAYOUTS))
SAMPLE = [pair for index, pair in enumerate(PAIRS) if index % 17 == 1]


def agree(one: dict[str, Tensor], two: dict[str, Tensor], tolerance: float) -> None:
    assert sorted(one) == sorted(two)
    for name, value in one.items():
        assert value.dtype == two[name].dtype
        if tolerance == 0.0:
            assert torch.equal(value, two[name]), name
        else:
            torch.testing.assert_close(value, two[name], rtol=0.0, atol=tolerance)


def sums_alike(one: tuple[int, str, str], two: tuple[int, str, str]) -> bool:
    """Whether the tie's gradient is added up in one order under both: use by use on one rank, and use after
    use over several; by fetched rows in one sum over the microbatches, and otherwise in the same."""
    return one[0] > 1 and two[0] > 1


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [pytest.param(*pair, marks=[] if pair in SAMPLE else pytest.mark.slow) for pair in PAIRS],
)
def test_case_35_every_layout_loads_what_every_other_saved(
    tmp_path: Path, saved: tuple[int, str, str], loaded: tuple[int, str, str]
) -> None:
    expected = straight(*saved, tmp_path)
    agree(expected, resumed(*loaded, tmp_path), 0.0 if sums_alike(saved, loaded) else 1e-12)


@pytest.mark.parametrize(("layout", "owner"), [("dense", "first"), ("rows", "last")])
def test_case_34_masters_and_moments_bit_for_bit(tmp_path: Path, layout: str, owner: str) -> None:
    expected = straight(2, layout, owner, tmp_path, **BF16)
    assert expected["embed.weight.master"].dtype == torch.float32
    agree(expected, resumed(2, layout, owner, tmp_path, **BF16), 0.0)


def test_a_tie_is_stored_once(tmp_path: Path) -> None:
    straight(2, "dense", "first", tmp_path, **BF16)
    index = checkpoint.read_index(tmp_path)
    tied = [key for key in index.tensors if "embed" in key or "head" in key]
    kinds = ("exp_avg", "exp_avg_sq", "master", "step")
    assert sorted(tied) == ["model.embed.weight", *(f"optimizer.state.embed.weight.{k}" for k in kinds)]
    assert index.ties == TIE


def test_one_process_without_an_ownership(tmp_path: Path) -> None:
    expected = straight(3, "rows", "last", tmp_path)
    model = Model(["embed", "layer0", "layer1", "head"])
    model.get_submodule("head").weight = model.embed.weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=9.0)
    assert checkpoint.load(tmp_path, model, optimizer).step == 2
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    second = tmp_path / "second"
    checkpoint.save(second, model, optimizer, step=2, extra={"words": ["a"]})
    agree(expected, resumed(2, "dense", "last", second), 0.0)


def test_asynchronous_save_keeps_the_values_of_its_call(tmp_path: Path) -> None:
    def work(fabric: Fabric) -> dict[str, Tensor]:
        rank = Rank(fabric, "dense", "first")
        rank.step(0)
        rank.step(1)
        extra = {"words": ["a"]}
        handle = checkpoint.async_save(tmp_path, rank.model, rank.opt, rank.own, extra=extra)
        rank.step(2)  # meanwhile
        handle.wait()
        assert handle.done
        return rank.state()

    expected = {name: value for part in ranks(3, work) for name, value in part.items()}
    agree(expected, resumed(2, "rows", "last", tmp_path), 0.0)


def test_case_36_replicas_that_differ_are_refused(tmp_path: Path) -> None:
    def work(fabric: Fabric) -> None:
        rank = Rank(fabric, "dense", "first")
        rank.step(0)
        if fabric.rank == 2:
            with torch.no_grad():
                rank.model.get_submodule("head").get_parameter("weight")[3, 1] += 0.5
        rank.save(tmp_path)

    found = errors(3, work)
    assert [type(error) for error in found] == [ReplicaMismatchError] * 3
    assert all("0.5" in str(error) for error in found)
    assert not checkpoint.has_checkpoint(tmp_path)


def test_a_name_on_two_ranks_without_a_tie_is_refused(tmp_path: Path) -> None:
    def work(fabric: Fabric) -> None:
        model = Model(["layer0"])
        with torch.no_grad():
            model.get_submodule("layer0").get_parameter("weight").fill_(float(fabric.rank))
        checkpoint.save(tmp_path, model, None, assign_over(fabric, model, ()))

    for error in errors(2, work):
        assert isinstance(error, CheckpointError)
        assert "'layer0.weight' is on the ranks [0, 1] with different values" in str(error)


# -- weights of other origin


@pytest.mark.parametrize("given", ["embed.weight", "head.weight", "both", "unlike", "none"])
def test_case_37_either_name_of_a_tie(given: str) -> None:
    value = torch.arange(VOCABULARY * WIDTH, dtype=torch.float64).view(VOCABULARY, WIDTH)
    source = {f"layer{number}.weight": torch.ones(WIDTH, WIDTH) for number in range(LAYERS)}
    if given in ("embed.weight", "both", "unlike"):
        source["embed.weight"] = value
    if given in ("head.weight", "both", "unlike"):
        source["head.weight"] = value + (0.75 if given == "unlike" else 0.0)

    def work(fabric: Fabric) -> bool:
        rank = Rank(fabric, "rows" if given == "head.weight" else "dense", "last")
        checkpoint.load_weights(source, rank.model, rank.own)
        state = rank.state()
        return fabric.rank == 0 or torch.equal(state["embed.weight"], value)

    if given not in ("unlike", "none"):
        assert ranks(2, work) == [True, True]
        return
    found = errors(2, work)
    assert all(isinstance(error, CheckpointError) for error in found)
    assert all(("0.75" if given == "unlike" else "has no 'embed.weight'") in str(e) for e in found[1:])


def test_case_37_a_single_process_refuses_both_names_with_different_values() -> None:
    model = Model(["embed", "head"])
    model.get_submodule("head").weight = model.embed.weight
    ones = torch.ones(VOCABULARY, WIDTH)
    with pytest.raises(CheckpointError, match=r"'embed.weight' and 'head.weight' .* differ by up to 2"):
        checkpoint.load_weights({"embed.weight": ones, "head.weight": -ones}, model)


def test_a_file_of_torch_save_is_read_as_weights_alone(tmp_path: Path) -> None:
    model = Model(["embed"])
    torch.save({"embed.weight": torch.ones(VOCABULARY, WIDTH)}, tmp_path / "model.bin")
    checkpoint.load_weights(tmp_path / "model.bin", model)
    assert model.embed.weight.unique().tolist() == [1.0]
    torch.save({"embed.weight": Path("x")}, tmp_path / "evil.bin")
    with pytest.raises(CheckpointError, match="cannot be read as weights alone"):
        checkpoint.load_weights(tmp_path / "evil.bin", model)


def test_case_38_safetensors_has_the_weight_once_and_transformers_loads_it(tmp_path: Path) -> None:
    safetensors = pytest.importorskip(
        "safetensors.torch", reason="needs the hf extra: pip install 'piper-owner[hf]'"
    )
    straight(2, "rows", "last", tmp_path)
    file = checkpoint.export_safetensors(tmp_path, tmp_path)
    values = safetensors.load_file(file)
    assert sorted(values) == ["embed.weight", "layer0.weight", "layer1.weight"]
    assert not list(tmp_path.glob(".*"))
    model = Model(["embed", "layer0", "layer1", "head"])
    model.get_submodule("head").weight = model.embed.weight
    checkpoint.load_weights(tmp_path, model)
    assert torch.equal(model.embed.weight, values["embed.weight"])
    transformers = pytest.importorskip(
        "transformers", reason="needs the hf extra: pip install 'piper-owner[hf]'"
    )
    config = transformers.GPT2Config(vocab_size=16, n_embd=8, n_layer=1, n_head=2, n_positions=8)
    made = transformers.GPT2LMHeadModel(config)
    checkpoint.save(tmp_path / "gpt2", made)
    folder = tmp_path / "hf"
    folder.mkdir()
    config.save_pretrained(folder)
    checkpoint.export_safetensors(tmp_path / "gpt2", folder)
    again = transformers.GPT2LMHeadModel.from_pretrained(folder)
    assert again.lm_head.weight is again.transformer.wte.weight
    assert torch.equal(again.lm_head.weight, made.lm_head.weight)


# -- what goes wrong


def saved_once(path: Path) -> None:
    model = Model(["embed", "layer0"])
    checkpoint.save(path, model, torch.optim.Adam(model.parameters()))


def test_missing_unfit_and_damaged_checkpoints_are_refused(tmp_path: Path) -> None:
    model = Model(["embed", "layer0"])
    before = model.embed.weight.detach().clone()
    with pytest.raises(CheckpointError, match="does not exist"):
        checkpoint.load(tmp_path / "none", model)
    saved_once(tmp_path)
    with pytest.raises(CheckpointError, match=r"has no 'layer1.weight'"):
        checkpoint.load(tmp_path, Model(["embed", "layer0", "layer1"]))
    with pytest.raises(CheckpointError, match=r"weights that no rank holds: \['layer0.weight'\]"):
        checkpoint.load(tmp_path, Model(["embed"]))
    other = Model(["embed", "layer0"])
    other.embed.weight = nn.Parameter(torch.zeros(2, WIDTH))
    with pytest.raises(CheckpointError, match=r"'embed.weight' was saved with the shape \[11, 4\]"):
        checkpoint.load(tmp_path, other)
    file = next(tmp_path.glob("data-*/*.distcp"))
    content = file.read_bytes()
    file.write_bytes(content[:-100])
    with pytest.raises(CheckpointError, match="it is cut off"):
        checkpoint.load(tmp_path, model)
    file.write_bytes(bytes(len(content)))
    with pytest.raises(CheckpointError, match="is damaged"):
        checkpoint.load(tmp_path, model)
    assert torch.equal(model.embed.weight, before)


def test_an_extra_that_json_cannot_keep_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="plain JSON"):
        checkpoint.save(tmp_path, Model(["embed"]), extra={"when": {1, 2}})
    with pytest.raises(ConfigError, match="optimizer is a int"):
        checkpoint.save(tmp_path, Model(["embed"]), 3)  # type: ignore[arg-type]


def test_no_file_is_unpickled(tmp_path: Path) -> None:
    """torch's own index is a pickle; a harmful one is not even looked at."""
    saved_once(tmp_path)
    next(tmp_path.glob("data-*/.metadata")).write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    checkpoint.load(tmp_path, Model(["embed", "layer0"]))


@st.composite
def damaged(draw: st.DrawFn, text: str) -> str:
    """An index with something in it replaced, or cut off."""
    if draw(st.booleans()):
        return text[: draw(st.integers(0, len(text) - 1))]
    document = json.loads(text)
    place: Any = document
    while isinstance(place, dict | list) and place:
        key = draw(st.sampled_from(sorted(place) if isinstance(place, dict) else list(range(len(place)))))
        if not isinstance(place[key], dict | list) or not place[key] or draw(st.booleans()):
            values = st.none() | st.booleans() | st.integers() | st.text(max_size=9) | st.floats()
            place[key] = draw(values | st.lists(st.integers(-2, 2**70), max_size=3))
            break
        place = place[key]
    return json.dumps(document)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_malformed_metadata_is_refused_in_words(data: st.DataObject, tmp_path: Path) -> None:
    saved_once(tmp_path)
    file = tmp_path / INDEX
    file.write_text(data.draw(damaged(file.read_text())))
    model = Model(["embed", "layer0"])
    with contextlib.suppress(CheckpointError):  # any other error is a finding
        checkpoint.load(tmp_path, model, torch.optim.Adam(model.parameters()))


def keep_saving(path: str, begun: Any) -> None:  # noqa: ANN401 - an Event of its context
    """Save again and again, each time with the number of the save as every weight."""
    torch.set_num_threads(1)
    model = nn.Linear(256, 1024, bias=False)
    for number in itertools.count(1):
        with torch.no_grad():
            model.weight.fill_(float(number))
        checkpoint.save(path, model, step=number)
        begun.set()


def test_a_save_killed_at_any_moment_leaves_the_last_one(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    context = multiprocessing.get_context("spawn")
    moments = random.Random(5)
    model = nn.Linear(256, 1024, bias=False)
    for _ in range(10 if request.config.getoption("--all") else 2):
        begun = context.Event()
        process = context.Process(target=keep_saving, args=(str(tmp_path), begun))
        process.start()
        assert begun.wait(60)
        time.sleep(moments.random() * 0.05)  # the moment is what is drawn
        process.kill()
        process.join(20)
        assert process.exitcode == -signal.SIGKILL
        loaded = checkpoint.load(tmp_path, model)
        assert model.weight.unique().tolist() == [float(loaded.step)]
    checkpoint.save(tmp_path, model, step=1)
    assert len(list(tmp_path.iterdir())) == 2  # the index and its data: nothing else is left
