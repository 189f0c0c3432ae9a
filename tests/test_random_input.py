"""Random option sets and malformed files: each is accepted, or refused in one readable line."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import piper_owner as po
from piper_owner import cli
from piper_owner.checkpoint import read_index
from piper_owner.cli import plan, plan_options
from piper_owner.cli.options import build_parser
from piper_owner.data.text import read_text
from piper_owner.errors import DagError, InputError

LONGEST: Final = 20.0
"""Seconds that an answer may take; most take milliseconds."""

# -- values

NUMBERS: Final = (
    *(
        "1",
        "2",
        "3",
        "4",
        "8",
        "256",
        "0",
        "-1",
        "-0",
        "+2",
        " 2 ",
        "1_000",
        "1e3",
        "2.5",
        "0x10",
        "nan",
        "inf",
    ),
    *("-inf", "1e-400", "1e400", "NaN", "", " ", "\u0663", "\u00b2", "two", "2\n", "9" * 30, "-" + "9" * 30),
    *("9" * 400, "9" * 5000, str(2**31), str(2**63), str(2**64), "513", "1048576", "1.0", "--", "\x1b[31m"),
)
WORDS: Final = (
    *(
        "auto",
        "first",
        "last",
        "dense",
        "rows",
        "v",
        "loop",
        "1f1b",
        "gpipe",
        "zbv",
        "dualpipev",
        "interleaved",
    ),
    *(
        "sgd",
        "adamw",
        "adafactor",
        "float64",
        "bfloat16",
        "global",
        "pipeline",
        "reference",
        "naive,allreduce",
    ),
    *("none", "early", "streamed", "25GB/s", "10us", "1gbit", "llama-3.2-1b", "gpt2", "owner", "reference,,"),
    *(
        "caf\u00e9",
        "\udcff\udcfe",
        "\u202e",
        "a\nb",
        "\ttab",
        "'",
        '"',
        "%s %d",
        "{0}",
        "$HOME",
        "~",
        "-",
        "--help ",
    ),
    *("0", "7", "9" * 5000, "", " ", "x" * 3000),
)
MODELS: Final = (
    *("gpt", "gpt:", ":", ":gpt", "a:b:c", "math:pi", "math:sqrt", "json:loads", "builtins:print", "..:x"),
    *("builtins:exit", "nowhere.at.all:build", "os.path:join", "hf:", "hf:/nowhere", "\udcff:x", "x" * 5000),
)


@functools.cache
def places() -> dict[str, str]:
    """Paths of every odd kind, by name; made once."""
    folder = Path(tempfile.mkdtemp(prefix="odd-paths-"))
    files: dict[str, bytes] = {
        "text": b"some text to train on. " * 200,
        "empty": b"",
        "binary": bytes(range(256)) * 4,
        "utf16": "training_dag".encode("utf-16"),
        "bom": b"\xef\xbb\xbf[]",
        "program": b'[{"op": "place", "filter": {}, "devices": [0]}]',
        "deep": b"[" * 100_000,
        "deep object": b'{"a":' * 50_000,
        "numbers": b"[" + b"9" * 6000 + b", 1e999, NaN, -Infinity]",
        "twice": b'[{"op": "place", "op": "split", "filter": {}, "filter": {}}]',
        "csv": b"0F0,0F1\n1F0,1F1\n",
        "dag": b"training_dag ranks=1\n",
    }
    found = {}
    for name, content in files.items():
        (folder / name).write_bytes(content)
        found[name] = str(folder / name)
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "dangling").symlink_to(folder / "nowhere" / "x")
    (folder / "unreadable").write_text("secret")
    (folder / "unreadable").chmod(0)
    (folder / "closed").mkdir()
    (folder / "closed").chmod(0)
    (folder / "run").mkdir()
    (folder / "run" / "checkpoint.json").write_text("{}")
    (folder / "device").mkdir()
    (folder / "device" / "checkpoint.json").symlink_to("/dev/zero")
    for name in ("loop", "dangling", "unreadable", "closed", "run", "device"):
        found[name] = str(folder / name)
    found |= {
        "folder": str(folder),
        "missing": str(folder / "missing"),
        "no parent": str(folder / "no" / "parent"),
        "below a file": str(folder / "text" / "below"),
        "long": str(folder / ("n" * 300)),
        "nearly too long": str(folder / ("n" * 250)),
        "very long": "/" + "d/" * 3000,
        "nul": "a\0b",
        "nothing": "",
        "not text": str(folder / "\udcff"),
        "lines": str(folder / "a\nb"),
        "null": "/dev/null",
        "zero": "/dev/zero",
        "dot": ".",
        "dots": "..",
        "slash": "/",
    }
    return found


# -- option sets


def options_of(command: str) -> dict[str, bool]:
    """Every option of `command`, and whether it takes a value."""
    commands = next(action for action in build_parser()._actions if action.dest == "command")
    parser = commands.choices[command]  # type: ignore[index]
    return {
        action.option_strings[-1]: action.nargs != 0
        for action in parser._actions
        if action.option_strings and action.dest != "help"
    }


PATHS: Final = ("--json", "--text", "--trace", "--report", "--profile", "--checkpoint", "--directives")
PATHS_TOO: Final = ("--svg", "--emit-directives", "--plot")


def value_of(option: str, draw: random.Random) -> str:
    if option in PATHS or option in PATHS_TOO:
        return draw.choice(list(places().values()))
    if option == "--model":
        return draw.choice(MODELS)
    if option == "--address":
        # Where nobody listens is found by asking there, so no address of another machine.
        return draw.choice(
            ("127.0.0.1:1", "nowhere", "[::1]:1", ":", "http://127.0.0.1:1", "127.0.0.1:99999999", "")
        )
    return draw.choice(draw.choice((NUMBERS, WORDS)))


def command_line(seed: int) -> list[str]:
    """A command line, of options that exist and some that do not."""
    draw = random.Random(seed)
    command = draw.choice(("train", "train", "plan", "verify", "bench", "memory"))
    options = options_of(command)
    line = [command]
    for option in draw.sample(sorted(options), min(len(options), draw.choice((1, 1, 2, 3, 5)))):
        line.append(option)
        if options[option] and draw.random() < 0.97:
            value = value_of(option, draw)
            line[-1:] = [f"{option}={value}"] if draw.random() < 0.7 else [option, value]
    if command == "verify" and draw.random() < 0.95:
        line.append(draw.choice(list(places().values())))
    if draw.random() < 0.05:
        line.append(draw.choice((*WORDS, "--unknown", "--steps")))
    return line


class Answer:
    """How a command line ended: its status, None if it may start, and what it wrote."""

    def __init__(self, status: int | None, errors: str, seconds: float) -> None:
        self.status, self.errors, self.seconds = status, errors, seconds

    def check(self, what: object) -> None:
        """Raise AssertionError unless it was accepted, or refused in one readable line."""
        assert self.seconds < LONGEST, what
        assert "Traceback" not in self.errors, what
        if self.status in (None, 0):
            return
        assert self.status == 2, (what, self.status, self.errors)
        lines = [line for line in self.errors.splitlines() if not line.startswith((" ", "usage:"))]
        assert len(lines) == 1, (what, self.errors)
        assert lines[0].isprintable(), (what, lines)
        assert lines[0].partition(": ")[2].startswith("error: "), (what, lines)
        assert len(lines[0]) > 25, (what, lines)


def ask(line: Sequence[str]) -> Answer:
    """What the command does with `line` before it starts anything, and all of `plan` and `verify`."""
    out, errors, start, status = io.StringIO(), io.StringIO(), time.monotonic(), None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            work = cli.prepare(list(line))
            if line[0] == "verify":
                status = work()
            if line[0] == "plan":
                plan.plan(plan_options.read_plan(build_parser().parse_args(list(line))))
        except SystemExit as end:
            status = int(end.code or 0)
        except (InputError, DagError) as error:
            status = cli.refuse(error)
    return Answer(status, errors.getvalue(), time.monotonic() - start)


# -- files


def mutated(document: Any, draw: random.Random) -> Any:  # noqa: ANN401 - any JSON
    """`document` with one place in it changed, at any depth."""
    odd: list[Any] = [
        *(
            None,
            True,
            0,
            -1,
            1.5,
            2**31,
            2**63,
            10**400,
            "",
            "x",
            "\udcff",
            "a\nb",
            [],
            {},
            [[]],
            "PASS",
            "*",
            "9" * 40,
        ),
        *(float("nan"), float("inf"), {"op": "place"}, [0, 0], "\0", "../x", "float99", 2**62),
    ]
    if isinstance(document, dict) and document and draw.random() < 0.85:
        key = draw.choice(list(document))
        kind = draw.random()
        if kind < 0.1:
            return {name: value for name, value in document.items() if name != key}
        if kind < 0.2:
            return {**document, draw.choice(("new", "", "op", "\n")): draw.choice(odd)}
        return {**document, key: mutated(document[key], draw)}
    if isinstance(document, list) and document and draw.random() < 0.85:
        at = draw.randrange(len(document))
        kind = draw.random()
        if kind < 0.1:
            return [*document[:at], *document[at + 1 :]]
        if kind < 0.2:
            return [*document, document[at]]
        return [*document[:at], mutated(document[at], draw), *document[at + 1 :]]
    return draw.choice(odd)


def damaged(text: str, draw: random.Random) -> bytes:
    """The bytes of `text`, cut, changed or put another way."""
    raw = text.encode("utf-8", "surrogatepass")
    at = draw.randrange(len(raw) + 1)
    match draw.randrange(8):
        case 0:
            return raw[:at]
        case 1:
            return raw[:at] + bytes([draw.randrange(256)]) + raw[at + 1 :]
        case 2:
            return raw[:at] + raw
        case 3:
            return b"\xef\xbb\xbf" + raw
        case 4:
            return text.encode("utf-16", "surrogatepass")
        case 5:
            return raw[:at] + b"[" * 3000 + raw[at:]
        case _:
            return raw


PROGRAM: Final[list[Any]] = [
    {"op": "place", "filter": {"PP": 0}, "devices": [0]},
    {"op": "place", "filter": {"PP": 1}, "devices": [1], "stream": "main"},
    {"op": "split", "filter": {}, "dim_name": "MB", "num_microbatches": 2},
    {"op": "order", "filters": [[{"PP": 0, "MB": 0, "PASS": "F"}], [{"PP": 0, "MB": 1, "PASS": "F"}]]},
]
CSV: Final = "0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n"


@functools.cache
def dag_text() -> str:
    from piper_owner.dag.text import format_dag
    from piper_owner.executor.config import RunKind, TrainConfig
    from piper_owner.executor.plan import plan_run

    return format_dag(plan_run(TrainConfig(stages=2, microbatches=2, clip=1.0), RunKind.OWNER).dag)


INDEX: Final[dict[str, Any]] = {
    "kind": "piper-owner checkpoint",
    "version": 1,
    "step": 4,
    "data": "data-00000004-0123456789abcdef",
    "extra": {"run": {"model": "gpt"}, "losses": [1.0, 2.0]},
    "ties": [["embed.weight", "head.weight"]],
    "tensors": {
        "embed.weight": {
            "shape": [4, 2],
            "dtype": "float32",
            "chunks": [[[0, 0], [2, 2], "a.distcp", 0, 16], [[2, 0], [2, 2], "a.distcp", 16, 16]],
        }
    },
    "values": {"step": 4},
    "groups": [{"place": [0, 0], "parameters": ["embed.weight"], "options": {"lr": 0.1}}],
}


def answered(work: Callable[[], object]) -> Answer:
    """What `work` raises, as the command would show it."""
    errors, start, status = io.StringIO(), time.monotonic(), None
    with contextlib.redirect_stderr(errors):
        try:
            work()
        except (InputError, DagError) as error:
            status = cli.refuse(error)
    return Answer(status, errors.getvalue(), time.monotonic() - start)


def schedule_file(seed: int, folder: Path) -> Answer:
    draw = random.Random(seed)
    kind = draw.randrange(4)
    text = dag_text() if kind == 0 else CSV if kind == 1 else json.dumps(mutated(PROGRAM, draw))
    file = folder / "schedule"
    file.write_bytes(damaged(text, draw))
    if draw.random() < 0.3:
        return ask(["train", "--directives", str(file), "--stages", "2"])
    return ask(["verify", str(file), *draw.choice(([], ["--edges", "0-1"], ["--max-rows", "3"]))])


def checkpoint_file(seed: int, folder: Path) -> Answer:
    draw = random.Random(seed)
    document = INDEX
    for _ in range(draw.randrange(3)):
        document = mutated(document, draw)
    (folder / "checkpoint.json").write_bytes(damaged(json.dumps(document), draw))
    return answered(lambda: read_index(folder))


def ties_given(seed: int, folder: Path) -> Answer:
    """Ties by name, of a module that holds some of them."""
    draw = random.Random(seed)
    names: list[Any] = [
        "0.weight",
        "1.weight",
        "1.bias",
        "nowhere",
        "",
        "\n",
        3,
        None,
        "0.weight.",
        "a" * 3000,
        b"0",
    ]
    module = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=draw.random() < 0.5))
    ties: Any = [
        [draw.choice(names) for _ in range(draw.choice((0, 1, 2, 2, 2, 3)))]
        for _ in range(draw.choice((0, 1, 1, 2)))
    ]
    ties = draw.choice(
        (ties, ties, ties, [tuple(tie) for tie in ties], None, "0.weight", 7, {"0.weight": "1.weight"})
    )

    odd: dict[str, Sequence[Any]] = {
        "owner": (
            "auto",
            "first",
            "last",
            0,
            1,
            -1,
            10**30,
            "",
            None,
            1.5,
            {"0.weight": "last"},
            {"x": "first"},
            True,
        ),
        "layout": (
            "dense",
            "rows",
            "auto",
            "",
            None,
            3,
            {"0.weight": "rows"},
            {"x": "dense"},
            {"0.weight": 4},
        ),
        "uses": (None, {"0.weight": "dense"}, {"x": "lookup"}, {"0.weight": "both"}, {}, 4),
        "names": (None, {"0.weight": "1.weight"}, {"0.weight": "embed.weight"}, {}, 4),
        "timeout": (None, timedelta(seconds=1), timedelta(0), timedelta(days=-1), 3, float("nan"), "1"),
        "scope": ("pipeline", "global", "", None),
    }
    given = {name: draw.choice(values) for name, values in odd.items() if draw.random() < 0.3}

    def assign() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of copies that differ
            own = po.assign_owners(module, ties, **given)
        own.check()
        own.close()

    return answered(assign)


def text_file(seed: int, folder: Path) -> Answer:
    draw = random.Random(seed)
    if draw.random() < 0.3:
        path = Path(
            draw.choice([each for name, each in places().items() if name not in ("slash", "dots", "dot")])
        )
        return answered(lambda: read_text(path, limit_bytes=10_000))
    (folder / "text").write_bytes(damaged("some text, caf\u00e9 \U0001f600 " * 3, draw))
    return answered(lambda: read_text(folder / "text"))


KINDS: Final[Mapping[str, Callable[[int, Path], Answer]]] = {
    "options": lambda seed, folder: ask(command_line(seed)),
    "schedules": schedule_file,
    "checkpoints": checkpoint_file,
    "ties": ties_given,
    "texts": text_file,
}
SHARES: Final = {"options": 5, "schedules": 2, "checkpoints": 1, "ties": 1, "texts": 1}


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def children() -> set[str]:
    found: set[str] = set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError):
            found.update(Path("/proc/self/task", thread, "children").read_text().split())
    return found


MANY: Final = 1000


@pytest.mark.parametrize("num", [30, pytest.param(MANY, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", list(KINDS))
def test_whatever_is_given_is_accepted_or_refused_in_one_line(kind: str, num: int, tmp_path: Path) -> None:
    before = children()
    seen: set[int | None] = set()

    @settings(
        max_examples=num * SHARES[kind],
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
        derandomize=num < MANY,  # few of them could be all alike by chance
    )
    @given(st.integers(0, 2**40))
    def try_one(seed: int) -> None:
        answer = KINDS[kind](seed, tmp_path)
        answer.check((kind, seed, command_line(seed) if kind == "options" else ""))
        seen.add(0 if answer.status is None else answer.status)

    try_one()
    assert seen >= {0, 2}, "all alike proves little"
    assert children() == before


# -- through the real command

REAL: Final = (
    ["train", "--directives", "binary"],
    ["train", "--json={folder}", "--steps", "1"],
    ["verify", "deep"],
    ["train", "--stages", "9" * 400],
    ["train", "--stages=--"],
    ["train", "--owner", "9" * 5000],
    ["train", "--owner", "\u0663" * 20],
    ["train", "--microbatches", "1000000", "--stages", "64", "--layers", "64"],
    ["train", "--dp", "4000", "--devices", "4"],
    ["train", "--lr", "nan"],
    ["train", "--clip", "inf"],
    ["train", "--timeout", "1e300"],
    ["train", "--model", "builtins:exit"],
    ["train", "--model", "nowhere:build"],
    ["train", "--text", ""],
    ["train", "--text", "loop"],
    ["train", "--text", "utf16"],
    ["train", "--trace", "nearly too long"],
    ["train", "--checkpoint", "run", "--resume"],
    ["train", "--checkpoint", "device", "--resume"],
    ["train", "--address", "127.0.0.1:1"],
    ["train", "\udcff"],
    ["plan", "--preset", "a\nb"],
    ["plan", "--stage-seconds", "1,,nan"],
    ["plan", "--rows", "9" * 30],
    ["verify", "numbers", "--edges", "1-0"],
    ["verify", "zero"],
    ["verify", "lines"],
    ["bench", "--timeout", "1e300", "--skip-steps"],
    ["bench", "--tokens", "9" * 30, "--json", "below a file"],
)


def session_of(pid: int) -> int:
    """The session of a process, by which those that it has started are known; 0 where it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[3])
    except (OSError, ValueError):
        return 0


@pytest.mark.parametrize(
    "words", [pytest.param(words, marks=pytest.mark.slow if at > 2 else ()) for at, words in enumerate(REAL)]
)
def test_the_real_command_refuses_in_one_line_and_leaves_no_process(words: list[str]) -> None:
    found = places()
    line = [words[0], *(found.get(word, word.format(**found)) for word in words[1:])]
    start = time.monotonic()
    command = subprocess.Popen(
        [sys.executable, "-m", "piper_owner", *map(os.fsencode, line)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, errors = command.communicate(timeout=120.0)
        left = [
            pid
            for pid in map(int, filter(str.isdecimal, os.listdir("/proc")))
            if session_of(pid) == command.pid
        ]
    finally:
        command.kill()
    assert not left
    assert command.returncode == 2
    assert out == b"" or words[0] == "verify"
    Answer(2, errors.decode(), min(time.monotonic() - start, 1.0)).check(line)
