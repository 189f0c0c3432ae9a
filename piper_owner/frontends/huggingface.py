"""Split a causal language model of Hugging Face transformers into pipeline stages.

    stages = huggingface.split(model, num_stages=4)
    ties = huggingface.find_ties(model)

A stage is a shallow copy of the model whose list of layers keeps its length. Layers of other stages
are stood in for by modules that hand on what they are given, so the model's own forward runs: its
masks, rotary embeddings, layer types and soft-capping are the library's, and a layer's position in
the list is what it was. The stand-in just before a stage's first layer hands on the stage's input,
so whatever the model does to embeddings (scaling, positions, dropout) happens on stage 0 alone.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from piper_owner import ties as module_ties
from piper_owner.errors import InputError
from piper_owner.frontends.decoder import DecoderParts, find_parts
from piper_owner.ownership import Tie
from piper_owner.planning.balance import layer_counts

__all__ = ["HuggingFaceStage", "find_ties", "split"]

_TRIAL_TOKENS: Final = 4


class _PassOn(nn.Module):
    """Stands where another stage has a module: returns what it is given, as that module would."""

    def __init__(self, stood_for: nn.Module, *, in_tuple: bool = False) -> None:
        super().__init__()
        self._in_tuple = in_tuple
        # A decoder's loop may ask a layer for its kind, to choose a mask.
        for name, value in vars(stood_for).items():
            if isinstance(value, str | int | float) and not name.startswith("_") and name != "training":
                setattr(self, name, value)

    def forward(self, hidden_states: Tensor, *_: object, **__: object) -> Tensor | tuple[Tensor]:
        return (hidden_states,) if self._in_tuple else hidden_states


class _Entry(_PassOn):
    """Stands before a stage's first layer: returns the stage's input, whatever it is given."""

    inputs: Tensor | None = None

    def forward(self, hidden_states: Tensor, *_: object, **__: object) -> Tensor | tuple[Tensor]:
        return super().forward(hidden_states if self.inputs is None else self.inputs)


class _NoPositions(nn.Module):
    """Stands for an embedding of positions, which stage 0 has added already."""

    def forward(self, given: Tensor, *_: object, **__: object) -> Tensor:
        # An integer zero changes neither the value nor the dtype of what it is added to.
        return torch.zeros(1, dtype=torch.int8, device=given.device)


class HuggingFaceStage(nn.Module):
    """One stage of a split model; its parameters are named as in the full model.

    `layers` is the range of the layers it holds; stage 0 (`is_first`) has the embedding too, the
    last one (`is_last`) the final norm and the head.
    """

    def __init__(
        self,
        root: nn.Module,
        *,
        decoder: str,
        layers: range,
        entry: _Entry | None,
        is_first: bool,
        is_last: bool,
    ) -> None:
        super().__init__()
        self.training = root.training
        # One dict for both: a child that is replaced, moved or wrapped here is so in the copy too.
        self._modules = root._modules
        # Within tuples, so that they are no children: parameters have their names from this module.
        self._root = (root,)
        self._entry = (entry,)
        self._decoder = decoder
        self.layers = layers
        self.is_first = is_first
        self.is_last = is_last

    def forward(
        self, inputs: Tensor, *, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        """Logits (batch, sequence, vocabulary) on the last stage, else hidden states.

        inputs: int64 ids (batch, sequence) on the first stage, else the hidden states
            (batch, sequence, hidden size) that the stage before returned.
        attention_mask, position_ids: (batch, sequence), as for the model; the same on every stage.
        """
        options: dict[str, Any] = {"use_cache": False, "return_dict": True}
        if attention_mask is not None:
            options["attention_mask"] = attention_mask
        if position_ids is not None:
            options["position_ids"] = position_ids
        (root,), (entry,) = self._root, self._entry
        root.training = self.training
        run: Any = root if self.is_last else self.get_submodule(self._decoder)
        if self.is_first:
            output = run(input_ids=inputs, **options)
        elif entry is None:
            output = run(inputs_embeds=inputs, **options)
        else:
            entry.inputs = inputs
            try:
                output = run(inputs_embeds=inputs.detach(), **options)
            finally:
                entry.inputs = None
        result: Tensor = output.logits if self.is_last else output.last_hidden_state
        return result

    def extra_repr(self) -> str:
        """What `repr` shows of this stage."""
        first = "embedding, " if self.is_first else ""
        last = ", norm and head" if self.is_last else ""
        return f"{first}layers {self.layers.start} to {self.layers.stop} (not included){last}"


def split(
    model: nn.Module,
    num_stages: int,
    *,
    layers_per_stage: Sequence[int] | None = None,
    verify: bool = True,
) -> tuple[HuggingFaceStage, ...]:
    """Split a decoder-only causal LM into `num_stages` modules. Local.

    model: what `AutoModelForCausalLM` gives, on any device, also meta; it goes on working. Its
        parameters are those of the stages, not copied: drop the model and the stages of other
        ranks to free theirs. Compile, wrap and move stages, not the model. A stage that is filled
        after `to_empty` needs its buffers (rotary frequencies) filled too, as the model would.
    layers_per_stage: how many layers each stage gets. The first may have none (only the
        embedding, if nothing is done to its output before the layers), and the last (only norm
        and head). By default the layers are spread so that the slowest stage is as fast as can
        be, counting a stage's weights, with those of the head but not of the embedding.
    verify: after the model, run the stages once on four tokens, in eval mode, and compare. A
        model whose parts talk past the hidden states is found by that alone.

    Every stage takes and returns one tensor, see `HuggingFaceStage.forward`; chained they give
    the model's logits. A tied head is on the last stage under its own name: see `find_ties`.

    Raises InputError (a ValueError) for a model that cannot be split, saying which part is
    missing or not understood; ConfigError for a number of stages or layers that cannot be.
    """
    parts = find_parts(model)
    costs = [_num_weights(layer) for layer in model.get_submodule(parts.layers).children()]
    head = _num_weights(model.get_submodule(parts.head))
    counts = layer_counts(costs, num_stages, head=head, chosen=layers_per_stage)
    if counts[0] == 0 and num_stages > 1:
        _refuse_functional_dropout(model, parts)
    trial = _run_whole(model, parts)
    bounds = [0, *itertools.accumulate(counts)]
    stages = tuple(
        _make_stage(model, parts, number, range(start, stop), len(counts), in_tuple=trial.layers_in_tuple)
        for number, (start, stop) in enumerate(itertools.pairwise(bounds))
    )
    if verify:
        _verify(model, parts, stages, trial)
    return stages


def find_ties(model: nn.Module) -> tuple[Tie, ...]:
    """The ties of a transformers model: those of `piper_owner.find_ties`, and those it declares.

    A model that was made or emptied on the meta device may have lost the identity of tied
    parameters, but still declares them by its `_tied_weights_keys` and `tie_word_embeddings`.
    Names are in registration order, so the embedding's comes first. Local.
    """
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    groups = {name: {name} for name in names}
    found = [tie.names for tie in module_ties.find_ties(model)]
    for group in [*found, *_declared(model)]:
        if all(name in groups for name in group):
            merged = set().union(*(groups[name] for name in group))
            groups.update(dict.fromkeys(merged, merged))
    distinct = {id(group): group for group in groups.values() if len(group) > 1}
    return tuple(Tie(tuple(sorted(group, key=names.index))) for group in distinct.values())


def _declared(model: nn.Module) -> Iterator[tuple[str, ...]]:
    asked: Any = model
    declared = getattr(model, "all_tied_weights_keys", None)
    if isinstance(declared, Mapping):
        yield from ((str(source), str(target)) for target, source in declared.items())
    elif getattr(getattr(model, "config", None), "tie_word_embeddings", False):
        ends = (asked.get_input_embeddings(), asked.get_output_embeddings())
        yield tuple(
            f"{path}.weight"
            for end in ends
            for path, module in model.named_modules(remove_duplicate=False)
            if module is end
        )


# -- making a stage


def _make_stage(
    model: nn.Module, parts: DecoderParts, number: int, held: range, num_stages: int, *, in_tuple: bool
) -> HuggingFaceStage:
    is_first, is_last = number == 0, number == num_stages - 1
    slots: list[nn.Module] = []
    root = _shallow(model)
    decoder = root
    for name in parts.decoder.split("."):
        child = _shallow(decoder.get_submodule(name))
        decoder._modules[name] = child
        decoder = child
    for name, module in list(decoder._modules.items()):
        if module is None:
            continue
        path = f"{parts.decoder}.{name}"
        if path == parts.layers:
            slots = list(_slots(module, held, in_tuple=in_tuple))
            decoder._modules[name] = nn.ModuleList(slots)
        elif path == parts.norm:
            decoder._modules[name] = module if is_last else _PassOn(module)
        elif path in parts.positions:
            decoder._modules[name] = module if is_first else _NoPositions()
        elif path == parts.embedding or path in parts.input_norms or isinstance(module, nn.Dropout):
            decoder._modules[name] = module if is_first else _PassOn(module)
        else:
            # Its buffers move with this stage, maybe to another device than those of the others.
            decoder._modules[name] = copy.deepcopy(module)
    if not is_last:
        root._modules[parts.head] = _PassOn(model.get_submodule(parts.head))
    return HuggingFaceStage(
        root,
        decoder=parts.decoder,
        layers=held,
        entry=next((slot for slot in slots if isinstance(slot, _Entry)), None),
        is_first=is_first,
        is_last=is_last,
    )


def _refuse_functional_dropout(model: nn.Module, parts: DecoderParts) -> None:
    """With no layer on stage 0 its successor has no stand-in to enter at, so it runs the dropout too."""
    for name, value in vars(model.get_submodule(parts.decoder)).items():
        if "drop" in name and isinstance(value, float) and value > 0:
            raise InputError(
                f"cannot split {type(model).__name__} after its embedding: {parts.decoder}.{name}={value} "
                "would be applied twice; give the first stage a layer, or set it to 0"
            )


def _num_weights(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _slots(layers: nn.Module, held: range, *, in_tuple: bool) -> Iterator[nn.Module]:
    for index, layer in enumerate(layers.children()):
        if index in held:
            yield layer
        elif index == held.start - 1:
            yield _Entry(layer, in_tuple=in_tuple)
        else:
            yield _PassOn(layer, in_tuple=in_tuple)


def _shallow(module: nn.Module) -> nn.Module:
    """A module of the same class, parameters and children, whose children can be replaced."""
    copied = object.__new__(type(module))
    # Children, parameters, buffers and hooks are in dicts of the module's own.
    vars(copied).update(
        {
            name: copy.copy(value) if isinstance(value, dict | set) else value
            for name, value in vars(module).items()
        }
    )
    vars(copied).pop("_compiled_call_impl", None)  # made of the original's children
    return copied


# -- a trial


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """A forward of the whole model on a few tokens."""

    ids: Tensor
    mask: Tensor | None
    logits: Tensor
    layers_in_tuple: bool
    """Whether its layers return tuples."""


def _run_whole(model: nn.Module, parts: DecoderParts) -> _Trial:
    weight = model.get_submodule(parts.embedding).get_parameter("weight")
    ids = (torch.arange(_TRIAL_TOKENS, device=weight.device) % weight.shape[0]).unsqueeze(0)
    masks: list[Tensor | None] = [None]
    if weight.is_meta:
        # Without a mask most models look at values to see if they need one; a whole one is taken as is.
        masks.append(weight.new_zeros(1, 1, _TRIAL_TOKENS, _TRIAL_TOKENS))
    kinds: list[bool] = []
    layer = next(model.get_submodule(parts.layers).children())
    handle = layer.register_forward_hook(lambda _, __, output: kinds.append(isinstance(output, tuple)))
    run: Any = model
    failures: list[Exception] = []
    try:
        for mask in masks:
            kinds.clear()
            try:
                with _quietly(model):
                    output = run(input_ids=ids, attention_mask=mask, use_cache=False, return_dict=True)
                break
            except Exception as error:
                failures.append(error)
        else:
            raise InputError(
                f"cannot split {type(model).__name__}: it does not run on {_TRIAL_TOKENS} tokens on device "
                f"{weight.device}: {failures[-1]}"
            ) from failures[-1]
    finally:
        handle.remove()
    if len(kinds) != 1:
        raise InputError(
            f"cannot split {type(model).__name__}: the first of {parts.layers} runs {len(kinds)} times in a "
            "forward, where a pipeline's layers run once"
        )
    return _Trial(ids=ids, mask=mask, logits=output.logits, layers_in_tuple=kinds[0])


def _verify(model: nn.Module, parts: DecoderParts, stages: Sequence[HuggingFaceStage], trial: _Trial) -> None:
    why = ""
    cause = None
    tensor, logits = trial.ids, trial.logits
    try:
        with _quietly(*stages):
            for stage in stages:
                tensor = stage(tensor, attention_mask=trial.mask)
    except Exception as error:
        why, cause = f"its stages do not run: {error}", error
    else:
        if tensor.shape != logits.shape:
            why = f"its stages give {tuple(tensor.shape)} where the model gives {tuple(logits.shape)}"
        elif not logits.is_meta:
            # Nothing is rounded otherwise, but kernels may choose otherwise; a wrong split is far off.
            eps = torch.finfo(logits.dtype).eps
            scale = float(logits.abs().nan_to_num().max())
            if not torch.allclose(tensor, logits, rtol=0, atol=64 * eps * scale, equal_nan=True):
                why = "the logits of its stages differ from its own"
    if why:
        raise InputError(
            f"cannot split {type(model).__name__}: {why}; something other than hidden states "
            f"goes from layer to layer of {parts.layers}, or from the embedding to them"
        ) from cause


@contextmanager
def _quietly(*models: nn.Module) -> Iterator[None]:
    """Eval mode and no gradients inside; afterwards every module is in the mode it was."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    for module, _ in modes:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
