"""Find the parts of a decoder-only language model, by how the modules are nested and what they are.

Nothing here imports transformers: a model is asked for its `config`, `get_input_embeddings()` and
`get_output_embeddings()`, and the rest is read from its modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

from piper_owner.errors import InputError

__all__ = ["DecoderParts", "find_parts"]

_REMEDY: Final = "piper_owner splits an embedding, a list of layers, a final norm and a head"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderParts:
    """Where the parts are: module paths in the full model."""

    decoder: str
    """The module whose forward runs the layers; the others but the head are its children."""
    embedding: str
    layers: str
    num_layers: int
    norm: str
    head: str
    """The child of the model that turns hidden states into logits."""
    positions: tuple[str, ...]
    """Embeddings of positions, added to the token embedding."""
    input_norms: tuple[str, ...]
    """Norms between the embedding and the layers."""


def find_parts(model: nn.Module) -> DecoderParts:
    """The parts of `model`. Local.

    Raises InputError, which says which part is missing or not understood.
    """
    asked: Any = model
    if not hasattr(model, "config") or not hasattr(model, "get_input_embeddings"):
        raise InputError(
            f"{type(model).__name__} is not a transformers model: it has no config or no "
            "get_input_embeddings(). Give what AutoModelForCausalLM returns, without a wrapper around it"
        )
    _refuse_kind(model)
    paths = {id(module): path for path, module in model.named_modules()}
    embedding = paths.get(id(_or_none(asked.get_input_embeddings)))
    if embedding is None:
        raise _missing(model, "token embedding: get_input_embeddings() gives none of its modules")
    head_module = _or_none(getattr(asked, "get_output_embeddings", lambda: None))
    head = paths.get(id(head_module))
    if head_module is None or head is None:
        raise _missing(model, "head: get_output_embeddings() gives none; use AutoModelForCausalLM")
    layers, num_layers = _find_layers(model)
    decoder = layers.rpartition(".")[0]
    if not decoder:
        raise _missing(model, "decoder: its layers stand beside its head, in one module")
    if embedding.rpartition(".")[0] != decoder:
        raise _not_understood(
            model, [embedding], f"the token embedding is not beside the layers of {decoder}"
        )
    if _is_inside(head, decoder):
        raise _not_understood(model, [head], f"the head is inside {decoder}, which holds the layers")
    head = head.partition(".")[0]
    return _sort_children(model, decoder, embedding, layers, num_layers, head)


def _sort_children(
    model: nn.Module, decoder: str, embedding: str, layers: str, num_layers: int, head: str
) -> DecoderParts:
    """Give every module beside the path to the layers its place, or refuse it."""
    strange = [*_parameters_on_path(model, decoder), *_strangers_on_path(model, decoder, head)]
    positions: list[str] = []
    norms_before: list[str] = []
    norms_after: list[str] = []
    norms = norms_before
    for name, child in model.get_submodule(decoder).named_children():
        path = f"{decoder}.{name}"
        if path == layers:
            norms = norms_after
        elif path == embedding:
            continue
        elif "norm" in type(child).__name__.lower():
            norms.append(path)
        elif any(True for _ in child.parameters()):
            is_positions = isinstance(child, nn.Embedding) and (name == "wpe" or "pos" in name)
            (positions if is_positions else strange).append(path)
    if strange:
        raise _not_understood(model, strange, "no place in the pipeline is known for them")
    if not norms_after and len(norms_before) == 1:
        norms_after, norms_before = norms_before, norms_after
    if not norms_after:
        raise _missing(model, f"final norm: {decoder} has no norm after {layers}")
    if len(norms_after) > 1:
        raise _not_understood(model, norms_after, "more than one norm follows the layers")
    return DecoderParts(
        decoder=decoder,
        embedding=embedding,
        layers=layers,
        num_layers=num_layers,
        norm=norms_after[0],
        head=head,
        positions=tuple(positions),
        input_norms=tuple(norms_before),
    )


def _refuse_kind(model: nn.Module) -> None:
    """Refuse by the configuration what no look at the modules would tell as well."""
    config: Any = model.config
    text: Any = config.get_text_config() if hasattr(config, "get_text_config") else config
    if getattr(config, "is_encoder_decoder", False):
        raise _not_understood(model, ["encoder"], "it is an encoder-decoder")
    # Some text models keep the options of their attention in a configuration of its own.
    parts = [
        name
        for name in getattr(config, "sub_configs", ())
        if name != "text_config" and hasattr(getattr(config, name, None), "hidden_size")
    ]
    if parts:
        raise _not_understood(
            model,
            [name.removesuffix("_config") for name in parts],
            "it has vision, audio or other parts beside its text model; split a text-only causal LM",
        )
    if getattr(text, "hidden_size_per_layer_input", None):
        raise _not_understood(
            model, ["hidden_size_per_layer_input"], "each layer gets an input of its own made from the ids"
        )


def _find_layers(model: nn.Module) -> tuple[str, int]:
    config: Any = model.config
    text: Any = config.get_text_config() if hasattr(config, "get_text_config") else config
    count = getattr(text, "num_hidden_layers", None)
    if not isinstance(count, int) or count < 1:
        raise _missing(model, "number of layers: its config has no num_hidden_layers")
    found: list[str] = []
    for path, module in model.named_modules():
        outermost = not any(_is_inside(path, other) for other in found)
        if isinstance(module, nn.ModuleList) and len(module) == count and outermost:
            found.append(path)
    if not found:
        raise _missing(model, f"list of layers: it has no ModuleList of num_hidden_layers={count} modules")
    if len(found) > 1:
        raise _not_understood(model, found, f"each is a list of num_hidden_layers={count} modules")
    return found[0], count


def _parameters_on_path(model: nn.Module, decoder: str) -> Iterator[str]:
    """Parameters that belong to no child: of the model, the decoder, and those between."""
    for path in _path_to(decoder):
        module = model.get_submodule(path)
        if "forward" in vars(module):
            raise InputError(
                f"cannot split {type(model).__name__}: {path or 'the model'} has a forward of its own, as "
                "device_map= and patches leave behind, which would still run the whole model. Load without, "
                "split, then move or patch the stages"
            )
        yield from (
            f"{path}.{leaf}".lstrip(".") for leaf, value in module._parameters.items() if value is not None
        )


def _strangers_on_path(model: nn.Module, decoder: str, head: str) -> Iterator[str]:
    """Modules with parameters beside those that lead from the model to its decoder."""
    path = _path_to(decoder)
    for parent in path[:-1]:
        for name, child in model.get_submodule(parent).named_children():
            here = f"{parent}.{name}".lstrip(".")
            if here not in path and here != head and any(True for _ in child.parameters()):
                yield here


def _path_to(path: str) -> list[str]:
    """`a.b` -> ["", "a", "a.b"]."""
    names = path.split(".")
    return [".".join(names[:length]) for length in range(len(names) + 1)]


def _is_inside(path: str, other: str) -> bool:
    return path.startswith(f"{other}.")


def _or_none(ask: Any) -> nn.Module | None:  # noqa: ANN401 - a bound method of any model
    try:
        answer: nn.Module | None = ask()
    except (AttributeError, NotImplementedError):
        return None
    return answer


def _missing(model: nn.Module, what: str) -> InputError:
    return InputError(f"cannot split {type(model).__name__}: it has no {what}. {_REMEDY}")


def _not_understood(model: nn.Module, parts: list[str], why: str) -> InputError:
    return InputError(
        f"cannot split {type(model).__name__}: {', '.join(parts)} not understood: {why}. {_REMEDY}"
    )
