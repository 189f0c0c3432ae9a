"""What one training run is asked to do: one frozen value, checked when it is made."""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields
from typing import Any, Final

from piper_owner.directives import Program
from piper_owner.errors import ConfigError
from piper_owner.ownership import LayoutChoice, OwnerChoice, Scope

__all__ = [
    "DEVICES",
    "DTYPES",
    "LAYOUTS",
    "LEARNING_RATES",
    "LONGEST_TIMEOUT",
    "OPTIMIZERS",
    "PLACEMENTS",
    "SCHEDULES",
    "SCOPES",
    "RunKind",
    "TrainConfig",
]

PLACEMENTS: Final = ("loop", "v")
LAYOUTS: Final = ("auto", "rows", "dense")
SCHEDULES: Final = ("gpipe", "1f1b", "interleaved", "zbv", "dualpipev")
SCOPES: Final = tuple(scope.value for scope in Scope)
OPTIMIZERS: Final = ("adamw", "adam", "sgd", "adafactor")
LEARNING_RATES: Final = {"adamw": 1e-3, "adam": 1e-3, "sgd": 0.1, "adafactor": 1e-2}
LONGEST_TIMEOUT: Final = 30 * 86_400.0
_MOST: Final = {
    "stages": 4096,
    "devices": 4096,
    "microbatches": 2**20,
    "dp": 4096,
    "microbatch_size": 2**20,
    "sequence_length": 2**20,
    "vocab": 2**24,
    "hidden": 2**20,
    "layers": 10**5,
    "heads": 2**20,
    "steps": 2**31,
    "chunk_bytes": 2**40,
}
"""The most of each; a mistyped number is to be refused, not to fill the memory."""
_MOST_WORKERS: Final = 4096
_MOST_CELLS: Final = 2**20
DTYPES: Final = ("float32", "float64", "bfloat16")
DEVICES: Final = ("cpu", "cuda")


class RunKind(enum.Enum):
    """The ways to train the same model on the same data."""

    OWNER = "owner"
    REFERENCE = "reference"
    NAIVE = "naive"
    ALLREDUCE = "allreduce"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """A GPT with a tied head, a pipeline to train it on, and how long.

    A batch is `dp * microbatches * microbatch_size` sequences of `sequence_length` tokens: each of `dp`
    equal pipelines, of `devices` each, trains on its own part. `devices`
    defaults to one per stage under `loop` and to half the stages, rounded up, under `v`; `lr` to
    what suits the optimizer (LEARNING_RATES).
    `model` names what is trained, and how to get it is for a ModelSource to know; vocab, hidden, layers and
    heads are the GPT's. `program` says where stages run and in which order, in place of placement,
    devices, dp, schedule and microbatches.
    Every `check_every` steps (0: never) the ranks prove that all replicas are their owner's value.
    `timeout_seconds` bounds every wait of one rank for another.
    `device` is where stages and their optimizers run; with "cuda" each rank gets `gpus_per_rank` of a GPU,
    and ranks share one where that is less than 1.

    Raises ConfigError for a value that cannot work, naming the command's option.
    """

    stages: int = 4
    devices: int = 0
    placement: str = "loop"
    schedule: str = "1f1b"
    microbatches: int = 8
    microbatch_size: int = 2
    sequence_length: int = 128
    vocab: int = 8192
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    dp: int = 1
    scope: str = "pipeline"
    owner: OwnerChoice = "auto"
    layout: LayoutChoice = "auto"
    optimizer: str = "adamw"
    lr: float | None = None
    clip: float | None = None
    dtype: str = "float32"
    steps: int = 40
    seed: int = 0
    check_every: int = 0
    chunk_bytes: int = 4 * 2**20
    timeout_seconds: float = 120.0
    device: str = "cpu"
    gpus_per_rank: float = 1.0
    model: str = "gpt"
    program: Program | None = None

    def __post_init__(self) -> None:
        if self.devices == 0:
            default = self.stages if self.placement == "loop" else (self.stages + 1) // 2
            object.__setattr__(self, "devices", default)
        if self.lr is None and self.optimizer in LEARNING_RATES:
            object.__setattr__(self, "lr", LEARNING_RATES[self.optimizer])
        _check(self)

    @property
    def learning_rate(self) -> float:
        """The learning rate, given or default."""
        assert self.lr is not None, "set when the config is made"
        return self.lr

    def to_dict(self) -> dict[str, Any]:
        """The options as JSON has them; of a program, where it comes from."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        program = values.pop("program")
        return {**values, "directives": None if program is None else program.source}

    @property
    def num_ranks(self) -> int:
        """Workers of all pipelines: rank r of pipeline p is worker `p * devices + r`."""
        return self.devices * self.dp

    @property
    def gpu_share(self) -> float:
        """The share of a GPU that a rank takes; 0 on CPUs."""
        return 0.0 if self.device == "cpu" else self.gpus_per_rank

    @property
    def all_microbatches(self) -> int:
        """Microbatches of all pipelines: pipeline p trains on those from `p * microbatches`."""
        return self.microbatches * self.dp

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step trains on."""
        return self.all_microbatches * self.microbatch_size * self.sequence_length


def _check_numbers(config: TrainConfig) -> None:
    """Each by itself, before anything is made as large as one of them says."""
    for name, most in _MOST.items():
        value, option = getattr(config, name), name.replace("_", "-")
        if value < 1:
            raise ConfigError(f"--{option} {value}: at least 1 is needed")
        if value > most:
            raise ConfigError(f"--{option} {str(value)[:30]}: at most {most} is possible")
    if config.devices * config.dp > _MOST_WORKERS:
        raise ConfigError(
            f"--devices {config.devices} with --dp {config.dp}: at most {_MOST_WORKERS} workers are possible"
        )
    if config.stages * config.microbatches > _MOST_CELLS:
        raise ConfigError(
            f"--stages {config.stages} with --microbatches {config.microbatches}: at most {_MOST_CELLS} "
            "together are possible"
        )


def _check(config: TrainConfig) -> None:
    _check_numbers(config)
    for name, known in (
        ("placement", PLACEMENTS),
        ("layout", LAYOUTS),
        ("schedule", SCHEDULES),
        ("scope", SCOPES),
        ("optimizer", OPTIMIZERS),
        ("dtype", DTYPES),
        ("device", DEVICES),
    ):
        value = getattr(config, name)
        if value not in known:
            raise ConfigError(f"--{name} {value}: choose one of {', '.join(known)}")
    if config.devices > config.stages:
        raise ConfigError(
            f"--devices {config.devices} with --stages {config.stages}: a device without a stage has "
            "nothing to do; use at most as many devices as stages"
        )
    if config.dp > 1 and config.scope == Scope.GLOBAL.value and config.layout == "rows":
        raise ConfigError(
            f"--layout rows with --scope global and --dp {config.dp}: one owner for all pipelines would have "
            "to serve each of them other rows; use --layout dense, or --scope pipeline"
        )
    if config.vocab < 256:
        raise ConfigError(f"--vocab {config.vocab}: a byte-level vocabulary has at least 256 tokens")
    if config.layers < config.stages - 2:
        raise ConfigError(
            f"--layers {config.layers} with --stages {config.stages}: every stage between the embedding's "
            f"and the head's needs a layer; give at least {config.stages - 2} layers or fewer stages"
        )
    if config.hidden % config.heads:
        raise ConfigError(f"--hidden {config.hidden} is not a multiple of --heads {config.heads}")
    if not 0 < config.learning_rate < float("inf"):
        raise ConfigError(f"--lr {config.lr}: a positive, finite learning rate is needed")
    if config.clip is not None and not 0 < config.clip < float("inf"):
        raise ConfigError(f"--clip {config.clip}: a positive, finite norm is needed")
    if not 0 <= config.seed < 2**63:
        raise ConfigError(f"--seed {config.seed}: a whole number from 0 to 2**63 - 1 is needed")
    _check_machine(config)


def _check_machine(config: TrainConfig) -> None:
    if not 0 < config.timeout_seconds <= LONGEST_TIMEOUT:
        raise ConfigError(
            f"--timeout {config.timeout_seconds}: a positive, finite number of seconds is needed"
        )
    if not 0 <= config.check_every <= _MOST["steps"]:
        raise ConfigError(f"--check-every {config.check_every}: a number of steps, or 0 for never, is needed")
    if not 0 < config.gpus_per_rank <= 1:
        raise ConfigError(
            f"--gpus-per-rank {config.gpus_per_rank:g}: a rank uses one GPU or a part of it; give more than "
            "0 and at most 1"
        )
