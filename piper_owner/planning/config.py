"""What a plan is asked for: the layout of devices, the optimizer, and the link. Frozen, checked. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from piper_owner.errors import ConfigError
from piper_owner.schedules import Placement, Schedule

__all__ = ["DTYPE_BYTES", "Method", "Optimizer", "PlanConfig", "Transfer"]

DTYPE_BYTES: Final = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_MOST_NODES: Final = 2**18
_FASTEST: Final = 1e24
_LONGEST_SECONDS: Final = 1e6


class Method(enum.Enum):
    """How the uses of a tied parameter on several devices are kept one; NAIVE does not."""

    NAIVE = "naive"
    ALL_REDUCE = "all-reduce"
    DENSE = "dense"
    ROWS = "rows"


class Optimizer(enum.Enum):
    """The optimizers of `piper-owner train`; `sgd` has momentum."""

    ADAMW = "adamw"
    ADAM = "adam"
    SGD = "sgd"
    ADAFACTOR = "adafactor"


class Transfer(enum.Enum):
    """When a dense gradient travels.

    EARLY: as soon as it is complete, while the schedule still runs, into a buffer of its size (`attach`).
    STREAMED: chunk by chunk when the owner steps (`piper-owner train`, and any loop without `attach`).
    """

    EARLY = "early"
    STREAMED = "streamed"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """A pipeline, `pipelines` times side by side, and what is known about its devices and their links.

    devices: of one pipeline; 0: one for each stage, or half as many, rounded up, under V.
    tokens: of a step of one pipeline. sequence: tokens in a sequence; 0: a microbatch is one.
    num_rows: different rows that a step looks up.
    dtype: of weights, gradients, activations and messages. master_dtype: of the masters, None without.
    bandwidth: bytes per second of a link, each way. latency: seconds that a message takes beside.
    flops, memory_bandwidth: floating-point operations, and bytes, per second that a device reaches.
    stage_seconds: forward of a microbatch, by stage; empty: by `flops`.
    backward_seconds: backward of a microbatch, by stage; empty: twice as long as the forward.
    barrier: whether all ranks wait for one another between steps, so that nothing hides behind the next one.
    device_memory: bytes of a device; None: not known.

    Raises ConfigError for a value that cannot work, naming the command's option.
    """

    stages: int = 4
    devices: int = 0
    placement: Placement = Placement.LOOP
    schedule: Schedule = Schedule.ONE_F_ONE_B
    microbatches: int = 8
    pipelines: int = 1
    optimizer: Optimizer = Optimizer.ADAMW
    dtype: str = "bfloat16"
    master_dtype: str | None = "float32"
    tokens: int = 16_384
    sequence: int = 0
    num_rows: int = 2_300
    bandwidth: float = 25e9
    latency: float = 1e-5
    flops: float = 2e14
    memory_bandwidth: float = 2e12
    stage_seconds: tuple[float, ...] = ()
    backward_seconds: tuple[float, ...] = ()
    barrier: bool = False
    device_memory: int | None = None
    chunk_bytes: int = 4 * 2**20
    transfer: Transfer = Transfer.EARLY

    def __post_init__(self) -> None:
        if self.devices == 0:
            half = self.placement is Placement.V
            object.__setattr__(self, "devices", (self.stages + 1) // 2 if half else self.stages)
        if self.sequence == 0:
            object.__setattr__(self, "sequence", self.microbatch_tokens)
        if self.master_dtype is not None and self.master_bytes <= self.itemsize:
            object.__setattr__(self, "master_dtype", None)
        _check(self)

    @property
    def itemsize(self) -> int:
        """Bytes of an element of weights, gradients and activations."""
        return DTYPE_BYTES[self.dtype]

    @property
    def master_bytes(self) -> int:
        """Bytes of an element of master weights; 0 without masters."""
        return 0 if self.master_dtype is None else DTYPE_BYTES[self.master_dtype]

    @property
    def state_itemsize(self) -> int:
        """Bytes of an element of optimizer state: the dtype of what is stepped."""
        return self.master_bytes or self.itemsize

    @property
    def microbatch_tokens(self) -> int:
        """Tokens of a microbatch, the largest one where they do not divide evenly."""
        return -(-self.tokens // max(self.microbatches, 1))

    @property
    def streams(self) -> bool:
        """Whether the owner steps chunk by chunk: exact for element-wise optimizers in 32 bits or more."""
        return self.optimizer is not Optimizer.ADAFACTOR and self.state_itemsize >= 4


def _check(config: PlanConfig) -> None:
    for name in ("stages", "devices", "microbatches", "pipelines", "tokens", "sequence"):
        value = getattr(config, name)
        option = "dp" if name == "pipelines" else "sequence-length" if name == "sequence" else name
        if not 1 <= value < 2**40:
            raise ConfigError(f"--{option} {value}: a whole number from 1 to 2**40 is needed")
    if config.devices > config.stages:
        raise ConfigError(
            f"--devices {config.devices} with --stages {config.stages}: a device without a stage has "
            "nothing to do; use at most as many devices as stages"
        )
    if config.tokens < config.microbatches:
        raise ConfigError(
            f"--tokens {config.tokens} with --microbatches {config.microbatches}: a microbatch has at least "
            "one token"
        )
    if config.stages * config.microbatches > _MOST_NODES:
        raise ConfigError(
            f"--stages {config.stages} with --microbatches {config.microbatches}: at most "
            f"{_MOST_NODES:,} forwards a step are planned; give fewer of one of them"
        )
    for name in ("bandwidth", "flops", "memory_bandwidth"):
        if not 1 <= getattr(config, name) <= _FASTEST:
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} {getattr(config, name)}: 1 to {_FASTEST:g} a second is needed")
    if not 0 <= config.latency <= _LONGEST_SECONDS:
        raise ConfigError(f"--latency {config.latency}: 0 to {_LONGEST_SECONDS:,.0f} seconds is needed")
    if config.chunk_bytes < 1:
        raise ConfigError(f"--chunk-bytes {config.chunk_bytes}: at least 1 is needed")
    if not _are_seconds(config.stage_seconds, config.stages):
        raise ConfigError(
            f"--stage-seconds: give {config.stages} positive times, one for the forward of each stage, with "
            "commas between them"
        )
    if not _are_seconds(config.backward_seconds, config.stages):
        raise ConfigError(
            f"backward_seconds: give {config.stages} positive times, one for the backward of each stage"
        )


def _are_seconds(given: tuple[float, ...], stages: int) -> bool:
    """Whether `given` is empty, or a time for each of `stages`."""
    return not given or (len(given) == stages and all(0 < each <= _LONGEST_SECONDS for each in given))
