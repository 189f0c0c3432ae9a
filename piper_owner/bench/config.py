"""What a benchmark is asked to measure: one frozen value, its options, and where the two ranks run."""

from __future__ import annotations

import argparse
import enum
from dataclasses import dataclass, fields
from typing import Any, Final

from piper_owner.errors import ConfigError
from piper_owner.executor.config import LONGEST_TIMEOUT, TrainConfig
from piper_owner.ownership import LayoutChoice, OwnerChoice
from piper_owner.paths import path_option

__all__ = ["BenchConfig", "Host", "StepWay", "Way", "add_options", "config_of"]


class Way(enum.Enum):
    """The ways to keep two uses of one table in step."""

    ALLREDUCE = "allreduce"
    DENSE_SERIAL = "dense_serial"
    DENSE = "dense"
    ROWS = "rows"


class StepWay(enum.Enum):
    """The ways to train the whole pipeline; UNTIED has two tables that nothing keeps in step.

    DENSE is owned by the first stage, DENSE_LAST by the last one, and so is ROWS.
    """

    UNTIED = "untied"
    ALLREDUCE = "allreduce"
    DENSE = "dense"
    DENSE_LAST = "dense_last"
    ROWS = "rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Where one of the two ranks runs.

    command: put before the rank's command line, such as `ip netns exec NAME`.
    address: what the rank listens on, and its peer reaches.
    interface: its bytes are counted; None: the payload of the messages is counted in their place.
    """

    command: tuple[str, ...] = ()
    address: str = "127.0.0.1"
    interface: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """A table of `vocab` x `hidden` float32, the `tokens` that a step looks up, and how often.

    The `steps_*` are the whole training steps: a GPT of that vocabulary and width on two stages under 1F1B;
    `skip_steps` leaves them out. `rate` is that of the link in bits per second; None: it is measured.

    Raises ConfigError for a value that cannot work, naming the option.
    """

    vocab: int = 50_257
    hidden: int = 768
    tokens: int = 8192
    rounds: int = 5
    chunk_bytes: int = 4 * 2**20
    steps_vocab: int = 32_000
    steps_hidden: int = 512
    steps_layers: int = 2
    steps_microbatches: int = 4
    steps_microbatch_size: int = 2
    steps_sequence_length: int = 256
    skip_steps: bool = False
    rate: float | None = None
    timeout_seconds: float = 120.0

    def __post_init__(self) -> None:
        for name, (most, _) in _NUMBERS.items():
            value, option = getattr(self, name), name.replace("_", "-")
            if value < 1:
                raise ConfigError(f"--{option} {value}: at least 1 is needed")
            if value > most:
                raise ConfigError(f"--{option} {str(value)[:30]}: at most {most} is possible")
        for name in ("vocab", "steps_vocab"):
            if getattr(self, name) < 256:
                raise ConfigError(
                    f"--{name.replace('_', '-')} {getattr(self, name)}: a byte-level vocabulary has at "
                    "least 256 tokens"
                )
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise ConfigError(f"--rate {self.rate:g}: a positive, finite number of bits per second is needed")
        if not 0 < self.timeout_seconds <= LONGEST_TIMEOUT:
            raise ConfigError(
                f"--timeout {self.timeout_seconds}: a positive, finite number of seconds is needed"
            )
        if not self.skip_steps:
            self.train_config("dense")

    def train_config(self, layout: LayoutChoice, owner: OwnerChoice = "auto") -> TrainConfig:
        """The pipeline of the whole training steps."""
        return TrainConfig(
            stages=2,
            schedule="1f1b",
            microbatches=self.steps_microbatches,
            microbatch_size=self.steps_microbatch_size,
            sequence_length=self.steps_sequence_length,
            vocab=self.steps_vocab,
            hidden=self.steps_hidden,
            heads=max(heads for heads in (8, 4, 2, 1) if self.steps_hidden % heads == 0),
            layers=self.steps_layers,
            layout=layout,
            owner=owner,
            chunk_bytes=self.chunk_bytes,
            timeout_seconds=self.timeout_seconds,
        )


_NUMBERS: Final = {
    "vocab": (2**24, "rows of the table"),
    "hidden": (2**20, "columns of the table"),
    "tokens": (2**24, "contiguous tokens of the text that one step looks up"),
    "rounds": (10**6, "timed rounds; in each of them every way has its turn, and the figures are medians"),
    "chunk_bytes": (2**40, "size of the pieces in which gradients and weights travel"),
    "steps_vocab": (2**24, "vocabulary of the GPT whose training steps are timed"),
    "steps_hidden": (2**20, "its width"),
    "steps_layers": (10**5, "its transformer blocks"),
    "steps_microbatches": (2**18, "microbatches of one of its steps"),
    "steps_microbatch_size": (2**20, "sequences in a microbatch"),
    "steps_sequence_length": (2**20, "tokens in a sequence"),
}
"""The most of each option that is a number, and what it is."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a benchmark, but for the link's."""
    defaults = {field.name: field.default for field in fields(BenchConfig)}
    for name, (_, text) in _NUMBERS.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=int,
            default=defaults[name],
            metavar="BYTES" if name == "chunk_bytes" else "N",
            help=f"{text} (default: %(default)s)",
        )
    parser.add_argument(
        "--skip-steps", action="store_true", help="time no whole training steps (default: they are timed)"
    )
    parser.add_argument(
        "--text",
        type=path_option,
        metavar="PATH",
        help="a text file, or a folder of them, to take the tokens from (default: the Python standard "
        "library's source)",
    )
    parser.add_argument(
        "--timeout",
        dest="timeout_seconds",
        type=float,
        default=defaults["timeout_seconds"],
        metavar="SECONDS",
        help="longest wait of one rank for the other (default: %(default)g)",
    )
    parser.add_argument(
        "--json", type=path_option, metavar="FILE", help="write all figures to this file (default: none)"
    )


def config_of(arguments: argparse.Namespace, *, rate: float | None = None) -> BenchConfig:
    """What the parsed options ask for. Raises ConfigError for a value that cannot work."""
    names = {field.name for field in fields(BenchConfig)} - {"rate"}
    values: dict[str, Any] = {name: getattr(arguments, name) for name in names}
    return BenchConfig(**values, rate=rate)
