"""Each fault at each kind of DAG action, on owner, replica and bystander: the run ends, and says why.

Three real ranks train the small GPT: the embedding on rank 0, the head on rank 2, and neither on
rank 1. In the dense layout rank 0 owns the tie, in the rows layout rank 2 does.
"""

from __future__ import annotations

import functools
import gc
import os
import random
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest
import torch
from faults import Fault, FaultKind, Injector, poison
from ranks import RankFailure, RankFailures
from torch import Tensor

from piper_owner.dag.nodes import format_action
from piper_owner.executor.config import RunKind, TrainConfig
from piper_owner.executor.optimizers import optimizer_factory
from piper_owner.executor.plan import plan_run
from piper_owner.executor.session import RankSession
from piper_owner.executor.source import GPTSource
from piper_owner.executor.stream import token_stream
from piper_owner.models.gpt import lm_loss
from piper_owner.ownership import LayoutChoice
from piper_owner.transport import Fabric, GlooFabric

if TYPE_CHECKING:
    from ranks import RankPool

STEPS: Final = 3
WAITED_OUT: Final = ("stop", "drop", "repeat")
SHORT: Final = timedelta(seconds=3)
"""The timeout where it is what ends the run; all else ends long before one of 20 s."""
OPENING: Final = timedelta(seconds=20)
"""What opening a line may take: many of them take a busy machine longer than a step."""
LIMIT: Final = 5.0
"""How many seconds after a fault the last of the others has ended."""
TOKENS: Final = np.random.default_rng(0).integers(0, 256, 4000).astype(np.int32)
TIE: Final = "embed.weight"
# A backward of one part, gradients that stream while the owner steps; and one of two parts, with all
# gradients whole before the step. The second adds these kinds of action to those of the first.
SCHEDULES: Final[dict[str, dict[str, Any]]] = {
    "plain": {"schedule": "1f1b"},
    "split": {"schedule": "zbv", "clip": 0.5},
}
NEW_IN_SPLIT: Final = ("I", "W", "CLIP", "RECV_GRAD", "OWNER_STEP")
ROLES: Final[dict[LayoutChoice, tuple[str, ...]]] = {
    "dense": ("owner", "bystander", "replica"),
    "rows": ("replica", "bystander", "owner"),
}
SENDS: Final = ("SEND_F", "SEND_B", "SEND_GRAD", "SEND_IDS", "SEND_ROWS")
RECEIVES: Final = ("RECV_F", "RECV_B", "RECV_IDS", "RECV_ROWS", "RECV_WEIGHT")
HARMLESS: Final = ("pause", "nan", "inf")
WHATS: Final = ("raise", "exit", "stop", "corrupt", "drop", "repeat", *HARMLESS)
"""The faults, as the table has them: a stop outlasts the timeout, a pause does not."""


def config_of(layout: LayoutChoice, mode: str) -> TrainConfig:
    return TrainConfig(
        stages=3, layout=layout, microbatches=4, microbatch_size=1, sequence_length=8, vocab=256, hidden=8,
        heads=2, layers=3, steps=STEPS, dtype="float64",
        **SCHEDULES[mode],
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """One combination."""

    layout: LayoutChoice
    mode: str
    rank: int
    label: str
    """The kind of action."""
    what: str
    fault: Fault

    @property
    def role(self) -> str:
        return ROLES[self.layout][self.rank]

    @property
    def name(self) -> str:
        return f"{self.layout}-{self.role}-{self.mode}-{self.label}-{self.what}"


def label_of(action: str) -> str:
    """`F` of `0F2`, `SEND_GRAD` of `SEND_GRAD[embed.weight]->0`."""
    found = re.match(r"\d*([A-Z_]+)", action)
    assert found is not None
    return found[1]


def applies(what: str, layout: str, role: str, mode: str, label: str) -> bool:
    """Whether the fault can happen there at all."""
    sends_weights = (layout, label) == ("dense", "OWNER_STEP")
    match what:
        case "corrupt":
            takes_grad = role == "owner" and label == ("OWNER_STEP" if mode == "plain" else "CLIP")
            return label in (*SENDS, *RECEIVES) or sends_weights or takes_grad
        case "drop" | "repeat":
            return label in (*SENDS, "CLIP") or sends_weights
        case "nan" | "inf":
            # Where a gradient of this rank is there, and will be used as it is.
            of_tie = ("SEND_GRAD", "OWNER_STEP", "RECV_GRAD") if mode == "plain" else ("RECV_GRAD",)
            if (role, label) == ("replica", "CLIP"):
                return False  # it has sent its gradient
            return label in ("B", "W", "CLIP", *of_tie) or (role, label) == ("bystander", "STEP")
        case _:
            return True


def case_of(layout: LayoutChoice, mode: str, rank: int, label: str, what: str, actions: list[str]) -> Case:
    draw = random.Random(f"{layout} {mode} {rank} {label} {what}")
    kinds = {"stop": FaultKind.STOP, "pause": FaultKind.STOP}
    fault = Fault(
        kind=kinds[what] if what in kinds else FaultKind(what),
        rank=rank,
        # A step follows, so that a rank that is gone is missed; two where only the next one shows the fault.
        step=draw.randrange(STEPS - 1 - (what == "repeat")),
        action=draw.choice(actions),
        seconds=SHORT.total_seconds() + 2.5 if what == "stop" else 0.7,
        byte=draw.randrange(200),
        parameter=(TIE, "blocks.1.mlp.expand.bias", "head.weight")[rank],
    )
    return Case(layout=layout, mode=mode, rank=rank, label=label, what=what, fault=fault)


def all_cases() -> Iterable[Case]:
    for layout, roles in ROLES.items():
        for mode in SCHEDULES:
            dag = plan_run(config_of(layout, mode), RunKind.OWNER, GPTSource()).dag
            for rank, role in enumerate(roles):
                found: dict[str, list[str]] = {}
                for action in map(format_action, dag.programs[rank]):
                    found.setdefault(label_of(action), []).append(action)
                for label, actions in found.items():
                    if mode == "plain" or label in NEW_IN_SPLIT:
                        for what in WHATS:
                            if applies(what, layout, role, mode, label):
                                yield case_of(layout, mode, rank, label, what, actions)


CASES: Final = tuple(all_cases())

# -- one rank


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """What this process has open."""

    sockets: int
    files: frozenset[str]
    children: int

    @classmethod
    def now(cls) -> Footprint:
        """Measure it."""
        targets = []
        for entry in os.listdir("/proc/self/fd"):
            try:
                targets.append(os.readlink(f"/proc/self/fd/{entry}"))
            except FileNotFoundError:
                continue  # the listing's own
        children = 0
        for thread in os.listdir("/proc/self/task"):
            try:
                with open(f"/proc/self/task/{thread}/children") as file:
                    children += len(file.read().split())
            except FileNotFoundError:
                continue  # a thread that has just ended
        return cls(
            sockets=sum(target.startswith("socket:") for target in targets),
            files=frozenset(target for target in targets if target.startswith("/") and "/dev/" not in target),
            children=children,
        )

    def left(self, before: Footprint) -> list[str]:
        """What is there now and was not before, in words."""
        found = [f"file {file}" for file in self.files - before.files]
        if self.sockets > before.sockets:
            found.append(f"{self.sockets - before.sockets} sockets")
        if self.children > before.children:
            found.append(f"{self.children - before.children} processes")
        return found


@dataclass(kw_only=True)
class Outcome:
    """How one rank ended."""

    losses: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    is_equal: bool = False
    kind: str = ""
    error: str = ""
    notes: str = ""
    ended: float = 0.0
    fault: float | None = None
    """When the fault happened."""
    left: list[str] = field(default_factory=list)


def run_rank(fabric: Fabric, case: Case) -> Outcome:
    """Train until something ends it."""
    before = Footprint.now()
    outcome = Outcome()
    assert isinstance(fabric, GlooFabric)
    store = fabric._store
    fabric.opening = OPENING
    try:
        _train(fabric, case, outcome, lambda at: store.set("fault", repr(at)))
    except Exception as error:  # it is what the test is about
        outcome.kind, outcome.error = type(error).__name__, str(error)
        outcome.notes = " ".join(getattr(error, "__notes__", ()))
    outcome.ended = time.monotonic()
    if store.check(["fault"]):
        outcome.fault = float(store.get("fault"))
    deadline = time.monotonic() + 2.0
    while True:
        gc.collect()
        outcome.left = Footprint.now().left(before)
        if not outcome.left or time.monotonic() > deadline:
            return outcome
        time.sleep(0.02)  # sockets close in threads of gloo


def _train(fabric: Fabric, case: Case, outcome: Outcome, note: Callable[[float], None]) -> None:
    config = config_of(case.layout, case.mode)
    stream = token_stream(config, TOKENS)
    injector = Injector(
        case.fault,
        note=note,
        parameters=lambda: {n: p for m in session._modules.values() for n, p in m.named_parameters()},
    )
    session = RankSession(config, RunKind.OWNER, injector.fabric(fabric))
    if fabric.rank == case.fault.rank:
        session.observe(injector)
    for step in range(STEPS):
        outcome.losses.append(session.train_step(stream.batch(step)).loss)
    outcome.is_equal = session.check()
    outcome.weights = session.weights()
    session.close()


# -- one device


@functools.cache
def one_device(mode: str, fault: Fault | None, rows_only: bool) -> tuple[list[float], dict[str, Tensor]]:
    """The same training in one process, whose gradient is poisoned before the step if `fault` says so."""
    config = config_of("dense", mode)
    model = GPTSource().build_model(config)
    parameters = list(model.parameters())
    named = dict(model.named_parameters(remove_duplicate=False))
    optimizer = optimizer_factory(config.optimizer, config.learning_rate)(parameters)
    losses = []
    for step in range(STEPS):
        batch = token_stream(config, TOKENS).batch(step)
        total = 0.0
        for ids, labels in zip(batch.ids, batch.labels, strict=True):
            logits = model(torch.from_numpy(ids))
            loss = lm_loss(logits, torch.from_numpy(labels), num_tokens=batch.num_tokens)
            torch.autograd.backward(loss)
            total += loss.item()
        if fault is not None and step == fault.step:
            rows = torch.from_numpy(np.unique(batch.ids)) if rows_only else slice(None)
            _poison(named[fault.parameter], fault.kind, rows)
        if config.clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters, config.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)
    return losses, {name: parameter.detach() for name, parameter in named.items()}


def _poison(parameter: torch.nn.Parameter, kind: FaultKind, rows: Any) -> None:  # noqa: ANN401 - an index
    scratch = torch.nn.Parameter(torch.zeros_like(parameter))
    poison(scratch, float(kind.value))
    assert parameter.grad is not None
    assert scratch.grad is not None
    parameter.grad[rows] += scratch.grad[rows]


def largest_difference(case: Case, outcomes: Mapping[int, Outcome]) -> float:
    """Between the run and one device, of losses and weights; infinite where one alone is not finite."""
    is_poisoned = case.what in ("nan", "inf")
    rows_only = (case.layout, case.rank) == ("rows", 0)
    losses, weights = one_device(case.mode, case.fault if is_poisoned else None, is_poisoned and rows_only)
    ranks = list(outcomes.values())
    found = [sum(shares) for shares in zip(*(each.losses for each in ranks), strict=True)]
    worst = _difference(torch.tensor(found), torch.tensor(losses))
    for each in ranks:
        for name, value in each.weights.items():
            worst = max(worst, _difference(value, weights[name]))
    return worst


def _difference(one: Tensor, two: Tensor) -> float:
    same = (one == two) | (one.isnan() & two.isnan())
    return float(torch.where(same, 0.0, (one - two).abs().nan_to_num(nan=float("inf"))).max())


# -- the check


def wrong_words(case: Case, rank: int, outcome: Outcome) -> list[str]:
    """What the error of a rank that is not at fault fails to name."""
    text, fault = outcome.error, case.fault
    # What a process has sent may be lost with it; a message too many is seen when the next one is due.
    steps = (-1, 0, 1) if case.what == "exit" else (0, 1, 2)
    found = re.match(r"(?P<where>.+?) of step (?P<step>\d+): ", text)
    if found is None or int(found["step"]) - fault.step not in steps:
        return [f"the action and step where rank {rank} failed"]
    missing = []
    if not re.search(rf"rank {rank}\b", text):
        missing.append(f"rank {rank}")
    if not set(map(int, re.findall(r"\d+", " ".join(re.findall(r"ranks? ([\d, ]+)", text))))) - {rank}:
        missing.append("the rank that it waited for")
    if "[" in found["where"] and TIE not in text:
        missing.append("the tie")
    failed = f"rank {fault.rank} failed first, at {fault.action} of step {fault.step}"
    if case.what == "raise" and failed not in text:
        missing.append("the rank, action and step of the fault")
    if case.what == "stop" and not text.endswith(f"rank {fault.rank} has reported nothing"):
        missing.append("the rank that has stopped")
    if case.what == "drop" and not re.search(rf"\branks? (?:\d+, )*{fault.rank}\b", text):
        missing.append("the rank that has dropped a message")
    return missing


RESULTS: Final[dict[Case, str]] = {}


def table() -> str:
    """All results so far: a line for each kind of action on each rank, a column for each fault."""
    lines = [f"{'layout':7}{'rank':10}{'action':21}" + "".join(f"{what:>9}" for what in WHATS)]
    shown: dict[tuple[str, str, str, str], dict[str, str]] = {}
    for case in CASES:
        if case in RESULTS:
            key = (case.layout, case.role, case.label, case.mode)
            shown.setdefault(key, {})[case.what] = RESULTS[case]
    for (layout, role, label, mode), results in shown.items():
        action = f"{label}{', split' if mode == 'split' else ''}"
        cells = "".join(f"{results.get(what, ''):>9}" for what in WHATS)
        lines.append(f"{layout:7}{role:10}{action:21}{cells}")
    wrong = sum(result == "WRONG" for result in RESULTS.values())
    lines.append(
        f"{len(RESULTS)} combinations, {wrong} wrong. Seconds from the fault until the last other rank has "
        "ended with an error that names what failed; right: the losses and weights of one device."
    )
    return "\n".join(lines)


@pytest.fixture(scope="module", autouse=True)
def _table(show_at_end: Callable[[str, Callable[[], str]], None]) -> None:
    show_at_end("faults", table)


def check(case: Case, outcomes: Mapping[int, Outcome]) -> str:
    """What the table says of a case that went as it must; an AssertionError otherwise."""
    for rank, outcome in outcomes.items():
        assert not outcome.left, f"rank {rank} left {outcome.left}"
    at = next(iter(outcomes.values())).fault
    assert at is not None, "the fault never happened"
    if case.what in HARMLESS:
        for rank, outcome in outcomes.items():
            assert not outcome.error, f"rank {rank}: {outcome.error}"
            assert outcome.is_equal
        assert largest_difference(case, outcomes) < 1e-10
        return "right"
    others = {rank: outcome for rank, outcome in outcomes.items() if rank != case.rank}
    assert len(others) == 2
    for rank, outcome in others.items():
        assert outcome.kind in ("PeerLostError", "PeerTimeoutError", "MessageMismatchError"), outcome.error
        missing = wrong_words(case, rank, outcome)
        assert not missing, f"rank {rank} does not name {missing}: {outcome.error}"
    seconds = max(outcome.ended for outcome in others.values()) - at
    assert seconds < LIMIT
    return f"{seconds:.1f}"


SAMPLE: Final = frozenset(
    (
        "dense-owner-plain-OWNER_STEP-raise",
        "dense-bystander-plain-SEND_B-raise",
        "rows-replica-plain-RECV_ROWS-raise",
        "rows-owner-split-CLIP-raise",
        "dense-replica-plain-SEND_GRAD-exit",
        "rows-owner-plain-OWNER_STEP-exit",
        "dense-bystander-plain-F-exit",
        "dense-replica-plain-RECV_WEIGHT-stop",
        "rows-bystander-split-W-stop",
        "dense-owner-plain-RECV_GRAD-pause",
        "rows-replica-plain-SEND_IDS-pause",
        "dense-owner-plain-OWNER_STEP-corrupt",
        "rows-owner-plain-SEND_ROWS-corrupt",
        "rows-bystander-plain-RECV_F-corrupt",
        "dense-replica-plain-SEND_GRAD-drop",
        "rows-owner-plain-SEND_B-repeat",
        "dense-owner-plain-B-nan",
        "rows-replica-plain-SEND_GRAD-nan",
        "rows-owner-split-CLIP-inf",
        "dense-bystander-plain-STEP-inf",
    )
)
"""Those that always run."""


def parameters() -> Iterable[Any]:
    for case in CASES:
        marks = () if case.name in SAMPLE else pytest.mark.slow
        yield pytest.param(case, id=case.name, marks=marks)


def test_the_sample_is_of_the_matrix() -> None:
    assert len(CASES) >= 120
    assert len(SAMPLE) == 20
    assert {case.name for case in CASES} >= SAMPLE


@pytest.mark.parametrize("case", list(parameters()))
def test_a_fault_ends_the_run_and_is_named_or_changes_nothing(rank_pool: RankPool, case: Case) -> None:
    RESULTS[case] = "WRONG"
    died: dict[int, RankFailure] = {}
    timeout = SHORT if case.what in WAITED_OUT else timedelta(seconds=20)
    try:
        results = dict(enumerate(rank_pool.run_within(3, run_rank, (case,), timeout=timeout, limit=40.0)))
    except RankFailures as failures:
        died, results = failures.failures, failures.results
    expected = {case.rank: "ProcessDied"} if case.what == "exit" else {}
    assert {rank: failure.kind for rank, failure in died.items()} == expected
    RESULTS[case] = check(case, results)
