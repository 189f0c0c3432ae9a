"""The command line of `piper-owner memory`; it needs no torch."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from piper_owner.errors import ConfigError
from piper_owner.executor.config import DTYPES, OPTIMIZERS, PLACEMENTS, SCHEDULES, TrainConfig
from piper_owner.ownership import OwnerChoice
from piper_owner.paths import check_outputs, path_option
from piper_owner.planning.config import Method

__all__ = ["MemoryOptions", "add_memory", "add_run", "read_memory", "read_run"]

_DEFAULTS: Final[dict[str, Any]] = {field.name: field.default for field in fields(TrainConfig)} | {"steps": 3}
_METHODS: Final = tuple(method.value for method in Method)

_DESCRIPTION: Final = """\
Train a few steps of a model with a tied table on Ray actors, in up to four ways,
and measure what each rank keeps: weights, gradients, masters, optimizer state,
rows and staging, by walking the tensors; and the most bytes of all tensors at
one time in a step. Beside each figure stands what was predicted from shapes and
plan alone, and the difference.

naive       two copies that are never synchronised, as in Piper
all-reduce  two copies, gradients added on both, as in Megatron-LM
dense       one owner; the other device has a working copy
rows        one owner; the embedding's device has the rows of a step
"""

_EXAMPLES: Final = """\
examples:
  piper-owner memory
      the four ways, four stages on four local workers
  piper-owner memory --runs all-reduce,rows --json FILE
      two of them, and all figures in a file
  piper-owner memory --plot memory.png --report memory.html
      stacked bars per rank and run; a page that needs no network

scripts/profile_memory.py measures the same without Ray, under torchrun.

exit status:
  0 done, 1 a run failed, 2 bad input (found before anything starts),
  130 interrupted
"""

_NUMBERS: Final = {
    "model": {
        "layers": "transformer blocks",
        "hidden": "width of the model, a multiple of --heads",
        "heads": "attention heads per block",
        "vocab": "tokens in the vocabulary, at least 256",
    },
    "pipeline": {
        "stages": "parts that the model is cut into",
        "microbatches": "pieces of a batch",
        "chunk_bytes": "size of the pieces in which gradients and weights of ties travel",
    },
    "training": {
        "steps": "optimizer steps of each run, at least 2; the first is kept apart",
        "seed": "start value of the random weights",
    },
    "data": {
        "microbatch_size": "sequences in a microbatch",
        "sequence_length": "tokens in a sequence",
    },
}
_CHOICES: Final[dict[str, dict[str, tuple[tuple[str, ...], str]]]] = {
    "model": {"dtype": (DTYPES, "of weights and arithmetic")},
    "pipeline": {
        "placement": (PLACEMENTS, "which device gets which stage, as in piper-owner train"),
        "schedule": (SCHEDULES, "order of the microbatches"),
    },
    "training": {"optimizer": (OPTIMIZERS, "how weights are updated; sgd has momentum 0.9")},
    "data": {},
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOptions:
    """What `piper-owner memory` was asked for. `methods` empty: all that are possible."""

    config: TrainConfig
    methods: tuple[Method, ...] = ()
    text: Path | None = None
    json: Path | None = None
    plot: Path | None = None
    report: Path | None = None
    address: str | None = None


def add_memory(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    memory = commands.add_parser(
        "memory",
        help="measure what each rank keeps, in four ways, beside what was predicted",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_run(memory)
    cluster = memory.add_argument_group("cluster")
    cluster.add_argument(
        "--address",
        default=None,
        metavar="HOST:PORT",
        help="a running Ray cluster to join, or auto for the one on this machine (default: start one)",
    )


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add what to run and what to write, for the command and for the script without Ray."""
    groups = {name: parser.add_argument_group(name) for name in _NUMBERS}
    groups["model"].add_argument(
        "--model",
        default=_DEFAULTS["model"],
        metavar="NAME",
        help="gpt, or module:function of an annotated model, as in piper-owner train (default: %(default)s)",
    )
    for name, group in groups.items():
        for option, text in _NUMBERS[name].items():
            _add(group, option, int, "N", text)
        for option, (choices, text) in _CHOICES[name].items():
            group.add_argument(
                f"--{option}",
                choices=choices,
                default=_DEFAULTS[option],
                help=f"{text} (default: %(default)s)",
            )
    groups["pipeline"].add_argument(
        "--devices", type=int, default=0, metavar="N", help="workers (default: as in piper-owner train)"
    )
    groups["pipeline"].add_argument(
        "--owner", default="auto", metavar="WHO", help="auto, first, last, or a rank (default: %(default)s)"
    )
    groups["data"].add_argument(
        "--text",
        type=path_option,
        default=None,
        metavar="PATH",
        help="a text file or folder to train on (default: the Python standard library's source)",
    )
    _add_output(parser)


def _add_output(parser: argparse.ArgumentParser) -> None:
    output = parser.add_argument_group("comparison and output")
    output.add_argument(
        "--runs",
        default="",
        metavar="LIST",
        help=f"a comma list of {', '.join(_METHODS)} (default: all that the placement allows)",
    )
    _add_path(output, "json", "write all figures to this file (default: none)")
    _add_path(output, "plot", "draw stacked bars per rank and run, as .png, .svg or .pdf; needs matplotlib: "
              "pip install 'piper-owner[plot]' (default: none)")  # fmt: skip
    _add_path(
        output, "report", "write an HTML page that needs no network: bars and all figures (default: none)"
    )
    output.add_argument(
        "--timeout",
        dest="timeout_seconds",
        type=float,
        default=_DEFAULTS["timeout_seconds"],
        metavar="SECONDS",
        help="longest wait of one rank for another (default: %(default)g)",
    )


def _add(group: argparse._ArgumentGroup, name: str, kind: type, metavar: str, text: str) -> None:
    option = f"--{name.replace('_', '-')}"
    default = _DEFAULTS[name]
    group.add_argument(
        option, dest=name, type=kind, default=default, metavar=metavar, help=f"{text} (default: %(default)s)"
    )


def _add_path(group: argparse._ArgumentGroup, name: str, text: str) -> None:
    group.add_argument(f"--{name}", type=path_option, default=None, metavar="FILE", help=text)


def read_memory(arguments: argparse.Namespace) -> MemoryOptions:
    """What the parsed arguments ask for. Raises ConfigError for values that cannot work."""
    return read_run(arguments, address=arguments.address)


def read_run(arguments: argparse.Namespace, *, address: str | None = None) -> MemoryOptions:
    """What the arguments of `add_run` ask for. Raises ConfigError for values that cannot work."""
    values: dict[str, Any] = {name: getattr(arguments, name) for name in _DEFAULTS if name in arguments}
    values["owner"] = _owner(arguments.owner)
    if arguments.steps < 2:
        raise ConfigError(f"--steps {arguments.steps}: at least 2 are needed, as the first is kept apart")
    options = MemoryOptions(
        config=TrainConfig(**values),
        methods=_methods(arguments.runs),
        text=arguments.text,
        json=arguments.json,
        plot=arguments.plot,
        report=arguments.report,
        address=address,
    )
    check_outputs([("--json", options.json), ("--plot", options.plot), ("--report", options.report)])
    return options


def _methods(text: str) -> tuple[Method, ...]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in _METHODS:
            raise ConfigError(f"--runs {name[:60]}: choose among {', '.join(_METHODS)}")
    return tuple(method for method in Method if method.value in names)


def _owner(text: str) -> OwnerChoice:
    match text:
        case "auto" | "first" | "last":
            return text
        case _ if text.isascii() and text.isdecimal() and len(text) < 10:
            return int(text)
        case _:
            raise ConfigError(f"--owner {text[:60]}: choose auto, first, last, or the number of a rank")
