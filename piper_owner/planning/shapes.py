"""The tensors of a language model by pipeline stage, and what a token costs in each of them. Pure.

`Architecture` is a decoder-only transformer by its sizes; `split_architecture` gives its stages, as
`ModelShapes`, which a front end may also fill from modules that it has measured.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, assert_never

from piper_owner.errors import ConfigError
from piper_owner.ownership import Tie, Use

__all__ = [
    "Architecture",
    "Crossing",
    "ModelShapes",
    "Norm",
    "Shape",
    "StageShapes",
    "TiedShape",
    "TiedUse",
    "count",
    "gpt_architecture",
    "layer_shapes",
    "num_parameters",
    "split_architecture",
]

Shape = tuple[int, ...]

_EMBED: Final = "embed.weight"
_HEAD: Final = "head.weight"


class Norm(enum.Enum):
    """What a normalisation learns: nothing, a scale, or a scale and a shift."""

    PLAIN = 0
    RMS = 1
    LAYER = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A decoder-only transformer with a tied head, by its sizes.

    ffn: width inside the MLP. kv_heads: heads of keys and values. gated: whether the MLP has a gate
    beside its expansion. norm: of every normalisation over the hidden size. norms: normalisations in a
    layer. qkv_bias, bias: whether queries, keys and values have one, and the other linear maps.
    qk_norm: whether queries and keys are normalised, head by head. fused: whether queries, keys and
    values are one tensor, as are gate and expansion. positions: rows of a learnt table of positions.

    Raises ConfigError for a size below 1, or heads that the heads of keys do not divide.
    """

    vocab: int
    hidden: int
    layers: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    gated: bool = True
    norm: Norm = Norm.RMS
    norms: int = 2
    qkv_bias: bool = False
    bias: bool = False
    qk_norm: bool = False
    fused: bool = False
    positions: int = 0

    def __post_init__(self) -> None:
        for name in ("vocab", "hidden", "layers", "ffn", "heads", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: a model needs at least 1")
        if self.heads % self.kv_heads:
            raise ConfigError(f"kv_heads={self.kv_heads} does not divide heads={self.heads}")

    @property
    def query(self) -> int:
        """Features of the queries of a token."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """Features of the keys of a token, and of its values."""
        return self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedUse:
    """One use of a tied tensor: under which name, in which stage, how."""

    name: str
    stage: int
    use: Use


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedShape:
    """A tied tensor; `uses` in the order of the tie's names."""

    tie: Tie
    shape: Shape
    uses: tuple[TiedUse, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShapes:
    """One pipeline stage.

    shapes: its trained tensors, but for the tied ones.
    multiplies: elements of the matrices that a token is multiplied with, tied ones included.
    attention: features by which a token attends to each token before it, all layers together.
    saved: elements that a token leaves for the backward, in the dtype of activations.
    saved_wide: those kept in float32 whatever the dtype, such as the log-probabilities of the loss.
    """

    shapes: tuple[Shape, ...]
    multiplies: int = 0
    attention: int = 0
    saved: int = 0
    saved_wide: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """Values that go from stage `early` to stage `late`: so many features of a token."""

    early: int
    late: int
    features: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShapes:
    """A model as pipeline stages; `hidden` features of a token go from each to the next.

    crossings: what goes between stages where they are no such chain.
    """

    name: str
    hidden: int
    stages: tuple[StageShapes, ...]
    ties: tuple[TiedShape, ...]
    crossings: tuple[Crossing, ...] | None = None

    @property
    def edges(self) -> dict[tuple[int, int], int]:
        """By (earlier stage, later stage), the features of a token that go from one to the other."""
        if self.crossings is None:
            return {(stage, stage + 1): self.hidden for stage in range(len(self.stages) - 1)}
        return {(each.early, each.late): each.features for each in self.crossings}

    @property
    def num_parameters(self) -> int:
        """Parameters, those of a tie once."""
        plain = sum(count(stage.shapes) for stage in self.stages)
        return plain + count(tied.shape for tied in self.ties)


def count(shapes: Iterable[Shape]) -> int:
    """Elements of tensors of these shapes."""
    return sum(map(math.prod, shapes))


def gpt_architecture(*, vocab: int, hidden: int, layers: int, heads: int, context: int) -> Architecture:
    """The GPT that `piper-owner train` trains (`models.gpt`)."""
    if hidden % max(heads, 1):
        raise ConfigError(f"--hidden {hidden} is not a multiple of --heads {heads}")
    return Architecture(
        vocab=vocab,
        hidden=hidden,
        layers=layers,
        ffn=4 * hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // max(heads, 1),
        gated=False,
        norm=Norm.LAYER,
        bias=True,
        fused=True,
        positions=context,
    )


def _norm_shapes(norm: Norm, size: int) -> tuple[Shape, ...]:
    match norm:
        case Norm.PLAIN | Norm.RMS | Norm.LAYER:
            return ((size,),) * norm.value
        case _:
            assert_never(norm)


def _linear(rows: Sequence[int], columns: int, *, bias: bool, fused: bool) -> list[Shape]:
    """Linear maps from one input, each of the outputs `rows`, as one tensor if `fused`."""
    outputs = [sum(rows)] if fused else list(rows)
    return [shape for out in outputs for shape in ([(out, columns), (out,)] if bias else [(out, columns)])]


def layer_shapes(model: Architecture) -> tuple[Shape, ...]:
    """The tensors of one layer: attention, MLP and normalisations."""
    inner = [model.ffn] * (1 + model.gated)
    return (
        *_linear([model.query, model.key, model.key], model.hidden, bias=model.qkv_bias, fused=model.fused),
        *_linear([model.hidden], model.query, bias=model.bias, fused=False),
        *_linear(inner, model.hidden, bias=model.bias, fused=model.fused),
        *_linear([model.hidden], model.ffn, bias=model.bias, fused=False),
        *_norm_shapes(model.norm, model.hidden) * model.norms,
        *(((model.head_dim,),) * 2 if model.qk_norm else ()),
    )


def num_parameters(model: Architecture) -> int:
    """All parameters: the table once, positions, layers, and the last normalisation."""
    rest = [(model.vocab, model.hidden), (model.positions, model.hidden)]
    final = _norm_shapes(model.norm, model.hidden)
    return model.layers * count(layer_shapes(model)) + count(rest) + count(final)


def _saved(model: Architecture) -> int:
    """Elements that a token leaves for the backward of a layer.

    Inputs and outputs of each normalisation, queries, keys and values as attention takes them and
    its output, and what the MLP multiplies and activates: a fused attention that keeps no scores.
    Without dropout. An estimate: kernels differ in what they keep.
    """
    norms = 2 * model.norms * model.hidden
    attention = 2 * model.query + 2 * model.key + (model.query + model.key if model.qk_norm else 0)
    return norms + attention + (4 if model.gated else 2) * model.ffn


def split_architecture(model: Architecture, counts: Sequence[int], *, name: str) -> ModelShapes:
    """`model` as stages of `counts` layers each: the embedding on the first, the head on the last."""
    layer = layer_shapes(model)
    matrices = count(shape for shape in layer if len(shape) == 2)
    table = (model.vocab, model.hidden)
    final = _norm_shapes(model.norm, model.hidden)
    stages = []
    for stage, layers in enumerate(counts):
        shapes = layer * layers
        multiplies, saved, saved_wide = layers * matrices, layers * _saved(model), 0
        if stage == 0 and model.positions:
            shapes = ((model.positions, model.hidden), *shapes)
        if stage == len(counts) - 1:
            shapes = (*shapes, *final)
            multiplies += math.prod(table)
            saved, saved_wide = saved + 2 * model.hidden, model.vocab
        stages.append(
            StageShapes(
                shapes=shapes,
                multiplies=multiplies,
                attention=layers * 2 * model.query,
                saved=saved,
                saved_wide=saved_wide,
            )
        )
    uses = (
        TiedUse(name=_EMBED, stage=0, use=Use.LOOKUP),
        TiedUse(name=_HEAD, stage=len(counts) - 1, use=Use.DENSE),
    )
    tied = TiedShape(tie=Tie((_EMBED, _HEAD)), shape=table, uses=uses)
    return ModelShapes(name=name, hidden=model.hidden, stages=tuple(stages), ties=(tied,))
