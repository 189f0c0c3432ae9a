"""`--model module:function`: what it may be, what is refused, and that it trains as in one process."""

from __future__ import annotations

import dataclasses
import pickle
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import one_torch_thread
from torch import Tensor

from piper_owner.data.batches import TokenStream
from piper_owner.errors import ConfigError, TieError, TraceError
from piper_owner.executor.config import RunKind, TrainConfig
from piper_owner.executor.local import run_threads, train_in_process
from piper_owner.executor.plan import plan_run
from piper_owner.executor.reference import ReferenceSession
from piper_owner.executor.results import compare
from piper_owner.executor.session import RankSession
from piper_owner.frontends.piper import AnnotatedModel
from piper_owner.transport.base import Fabric

TESTS = str(Path(__file__).parent)
ROOT = str(Path(__file__).parents[1])
CONFIG = TrainConfig(
    microbatches=4, microbatch_size=1, sequence_length=4, vocab=256, steps=3, dtype="float64", devices=2
)

BAD = """
import torch
from torch import nn

number = 3

def takes_nothing():
    return nn.Linear(2, 2)

def not_a_model(vocab_size):
    return {"vocab_size": vocab_size}

def fails(vocab_size):
    sizes = [vocab_size]
    return nn.Embedding(sizes[0], sizes[1])

def leaves(vocab_size):
    raise SystemExit("done")

def looks(vocab_size):
    return nn.Linear(2, 2, bias=bool(torch.ones(1).sum() > 0))

def copies(vocab_size):
    model = nn.ModuleDict({"embed": nn.Embedding(vocab_size, 5), "head": nn.Linear(5, vocab_size)})
    model["head"].weight.data = model["embed"].weight.data
    return model

class Wrong(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, 5)

    def forward(self, ids):
        import piper_owner
        with piper_owner.annotate("PP"):
            return self.embed(ids)
"""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A folder with modules of a user's, which no other test has imported."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "bad_models.py").write_text(BAD)
    (tmp_path / "needs_more.py").write_text("import no_such_package\n")
    (tmp_path / "ends.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "half.py").write_text("def build(vocab_size):\n    return (\n")
    yield str(tmp_path)
    for name in ("bad_models", "needs_more", "ends", "half"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("no_such_module:build", "there is no module 'no_such_module' in "),
        ("bad_models.inner:build", "bad_models.inner"),
        (
            "bad_models:build",
            "bad_models has no 'build'; what Python imports by that name is .*bad_models.py",
        ),
        ("json:build", r"json has no 'build'; what Python imports by that name is .*json.__init__\.py"),
        ("ends:build", r"importing it ended the program.* with 3; keep .*__main__"),
        (
            "bad_models:leaves",
            "building the model, first on the meta device.* ended the program.* with 'done'",
        ),
        ("bad_models:looks", "building the model, first on the meta device and so without values, failed at"),
        ("bad_models:number", "it is of type int, not a function"),
        (
            "bad_models:takes_nothing",
            r"called as takes_nothing\(vocab_size=256\).*unexpected keyword argument 'vocab_size'; name that",
        ),
        ("bad_models:not_a_model", "returned a dict, not an nn.Module"),
        (
            "bad_models:fails",
            r"bad_models.py:15: `return nn.Embedding\(sizes\[0\], sizes\[1\]\)`: IndexError",
        ),
        ("needs_more:build", r"importing it failed at .*needs_more.py:1.*No module named 'no_such_package'"),
        ("half:build", r"importing it failed at .*half.py:2: `.+`: SyntaxError"),
    ],
)
def test_targets_that_are_refused(folder: str, target: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        AnnotatedModel(target=target, folder=folder).resolve(CONFIG)
    assert f"--model {target}" in str(caught.value)


@pytest.mark.parametrize("target", ["models", ":build", "models:", ""])
def test_a_target_is_a_module_and_a_function(target: str) -> None:
    with pytest.raises(ConfigError, match="write it as module:function"):
        AnnotatedModel(target=target)


@pytest.mark.parametrize("path", ["./models", "../models", "models.py", ".models", "a/models"])
def test_a_path_is_no_module(path: str) -> None:
    with pytest.raises(ConfigError, match="is a path; name the module as Python imports it"):
        AnnotatedModel(target=f"{path}:build")


def test_a_signal_while_a_model_is_imported_ends_the_process(folder: str) -> None:
    (Path(folder) / "ends.py").write_text("raise SystemExit(128 + 15)\n")
    with pytest.raises(SystemExit):
        AnnotatedModel(target="ends:build", folder=folder).resolve(CONFIG)


def test_two_parameters_over_one_memory_are_refused_before_anything_starts(folder: str) -> None:
    assert CONFIG.dtype == "float64", "a change of dtype parts the two"
    with pytest.raises(TieError, match=r"'embed.weight' and 'head.weight' are two Parameters over the same"):
        AnnotatedModel(target="bad_models:copies", folder=folder).resolve(CONFIG)


def test_outputs_that_are_no_logits_are_refused(folder: str) -> None:
    with pytest.raises(TraceError, match=r"gives \(1, 4, 5\) where logits .*\(1, 4, 256\) are needed"):
        AnnotatedModel(target="bad_models:Wrong", folder=folder).split(CONFIG, device="meta")
    with pytest.raises(TraceError, match=r"gives \(1, 4, 256\) and \(1, 4, 256\) where logits"):
        AnnotatedModel(target="annotated_models:MultiToken", folder=TESTS).split(CONFIG, device="cpu")


def test_regions_decide_the_number_of_stages() -> None:
    source = AnnotatedModel(target="annotated_models:TwoRegions", folder=TESTS)
    assert source.resolve(TrainConfig()).stages == 2
    assert source.resolve(TrainConfig()).devices == 2
    assert source.resolve(TrainConfig(placement="v")).devices == 1
    assert source.resolve(TrainConfig(devices=1)).devices == 1
    with pytest.raises(ConfigError, match="--devices 3 with --stages 2"):
        source.resolve(TrainConfig(devices=3))


def test_every_rank_builds_the_same_values_and_the_models_own() -> None:
    source = pickle.loads(pickle.dumps(AnnotatedModel(target="examples.annotated:build", folder=ROOT)))
    state = torch.random.get_rng_state()
    whole = dict(source.build_model(CONFIG).named_parameters(remove_duplicate=False))
    split = source.split(CONFIG, device="cpu")
    assert torch.equal(torch.random.get_rng_state(), state), "the caller's random state is as it was"
    held: dict[str, Tensor] = {}
    for stage in split.stages.values():
        held |= dict(stage.named_parameters())
    assert held.keys() == whole.keys()
    assert all(torch.equal(held[name], whole[name]) for name in whole)
    assert whole["embed.weight"].dtype is torch.float64
    assert held["embed.weight"] is not held["head.weight"], "a stage can go to a device of its own"
    assert split.tags == ({"PP": 0}, {"PP": 1}, {"PP": 2}, {"PP": 3})
    planned = source.split(CONFIG, device="meta")
    assert (planned.ports, planned.ties, planned.dense) == (split.ports, split.ties, split.dense)
    assert all(p.is_meta for stage in planned.stages.values() for p in stage.parameters())


@pytest.mark.parametrize(
    ("target", "folder"),
    [("examples.annotated:build", ROOT), ("annotated_models:SharedLayer", TESTS)],
)
@pytest.mark.parametrize(
    ("placement", "dp", "scope"),
    [("loop", 1, "pipeline"), ("v", 1, "pipeline"), ("v", 2, "pipeline"), ("v", 2, "global")],
)
def test_sessions_train_as_in_one_process(
    target: str, folder: str, placement: str, dp: int, scope: str
) -> None:
    source = AnnotatedModel(target=target, folder=folder)
    config = TrainConfig(
        placement=placement,
        dp=dp,
        scope=scope,
        microbatches=4,
        microbatch_size=1,
        sequence_length=4,
        vocab=256,
        dtype="float64",
    )
    plan = plan_run(config, RunKind.OWNER, source)
    tokens = np.random.default_rng(0).integers(0, 256, 400)
    stream = TokenStream(tokens, microbatches=4 * dp, microbatch_size=1, sequence_length=4)

    def work(fabric: Fabric) -> tuple[list[float], dict[str, Tensor]]:
        session = RankSession(config, RunKind.OWNER, fabric, source)
        losses = [session.train_step(stream.batch(step)).loss for step in range(3)]
        assert session.check()
        session.close()
        return losses, session.weights()

    ranks = run_threads(plan.config.num_ranks, work, timeout=timedelta(seconds=30))
    reference = ReferenceSession(config, source)
    for step in range(3):
        expected = reference.train_step(stream.batch(step)).loss
        assert sum(losses[step] for losses, _ in ranks) == pytest.approx(expected, abs=1e-12)
    whole = reference.weights()
    assert {name for _, weights in ranks for name in weights} >= whole.keys() - {"embed.weight"}
    for _, weights in ranks:
        for name in weights.keys() & whole.keys():
            torch.testing.assert_close(weights[name], whole[name], rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["EncoderDecoder", "SharedLayer"])
def test_the_ways_to_compare_with_hold_for_more_than_two_uses(name: str) -> None:
    source = AnnotatedModel(target=f"annotated_models:{name}", folder=TESTS)
    tokens = np.random.default_rng(0).integers(0, 256, 400)
    stream = TokenStream(tokens, microbatches=4, microbatch_size=1, sequence_length=4)
    config = dataclasses.replace(CONFIG, devices=2, placement="v")
    kinds = (RunKind.REFERENCE, RunKind.NAIVE, RunKind.ALLREDUCE)
    result = train_in_process(config, stream, compare=kinds, source=source)
    param = compare(result.runs, result.ownership).param
    assert param[RunKind.OWNER] < 1e-10
    assert param[RunKind.ALLREDUCE] < 1e-10, "no copy is counted twice"
    assert param[RunKind.NAIVE] > 1e-6
