"""One pipeline stage cut out of a traced model: a module with the model's own parameters and names."""

from __future__ import annotations

import importlib
import linecache
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from piper_owner.frontends.piper.capture import Captured
from piper_owner.frontends.piper.naming import Lookup, Names, ParameterUse, Uses
from piper_owner.frontends.piper.regions import Modes, Split
from piper_owner.frontends.piper.wiring import Wiring
from piper_owner.stages import full_name

__all__ = ["Segment", "build_segment"]


class Segment(nn.Module):
    """One pipeline stage. `forward(*inputs)` takes and gives what the stage's ports say.

    Parameters are the model's own objects under their full names (see `naming.name_parameters`); what
    looks rows up is an nn.Embedding. Dropout and the like run as when the model was traced: `train()`
    and `eval()` change nothing. Can be copied and pickled.
    """

    _segment_title: str
    _segment_code: str
    _segment_scope: dict[str, Any]
    _segment_run: Callable[..., Any]

    def __init__(self, title: str) -> None:
        super().__init__()
        self._segment_title = title

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """The stage's output, or a tuple of its outputs."""
        outputs: Tensor | tuple[Tensor, ...] = self._segment_run(self, *inputs)
        return outputs

    def extra_repr(self) -> str:
        """What it was cut out of."""
        return self._segment_title

    def _take_graph(self, graph: fx.Graph) -> None:
        code = graph.python_code("self")
        self._segment_code, self._segment_scope = code.src, dict(code.globals)
        self._compile()

    def _compile(self) -> None:
        file, code, scope = f"<{self._segment_title}>", self._segment_code, dict(self._segment_scope)
        exec(compile(code, file, "exec"), scope)
        self._segment_run = scope["forward"]
        # So that an error inside shows the line.
        linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(vars(self))
        del state["_segment_run"]
        state["_segment_scope"] = {name: _to_name(value) for name, value in self._segment_scope.items()}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        scope = {name: _from_name(value) for name, value in state["_segment_scope"].items()}
        super().__setstate__({**state, "_segment_scope": scope})  # type: ignore[no-untyped-call]
        self._compile()


@dataclass(frozen=True, slots=True)
class _ByName:
    """A module, or what a module holds, for what cannot be pickled itself, such as torch's functions."""

    module: str
    path: str = ""


def _to_name(value: object) -> object:
    if isinstance(value, types.ModuleType):
        return _ByName(value.__name__)
    if not callable(value):
        return value
    module, _, path = fx.node._get_qualified_name(value).rpartition(".")
    named = _ByName(module or "builtins", path)
    try:
        return named if _from_name(named) is value else value
    except (ImportError, AttributeError):
        return value


def _from_name(value: object) -> object:
    if not isinstance(value, _ByName):
        return value
    parts = value.module.split(".")
    found: object = importlib.import_module(parts[0])
    for index, part in enumerate(parts[1:], 2):
        if not hasattr(found, part):
            importlib.import_module(".".join(parts[:index]))
        found = getattr(found, part)
    return getattr(found, value.path) if value.path else found


def build_segment(
    model: nn.Module, captured: Captured, split: Split, wiring: Wiring, names: Names
) -> tuple[Segment, frozenset[str]]:
    """The module of one segment, and which of its nn.Embeddings cannot do with known rows. Local."""
    title = f"{type(model).__name__} {split.tag} {wiring.number}"
    return _Builder(Segment(title), model, captured, split, wiring, names).build()


class _Builder:
    """Builds one Segment: its modules, then its graph, operation by operation."""

    def __init__(
        self,
        segment: Segment,
        model: nn.Module,
        captured: Captured,
        split: Split,
        wiring: Wiring,
        names: Names,
    ) -> None:
        self._segment, self._model, self._captured = segment, model, captured
        self._split, self._wiring, self._names = split, wiring, names
        self._graph = fx.Graph()
        self._made: dict[fx.Node, fx.Node] = {}
        self._attributes: dict[str, fx.Node] = {}
        self._settings: dict[str, Lookup] = {}
        self._modes = Modes()
        self._entered: list[fx.Node] = []

    def build(self) -> tuple[Segment, frozenset[str]]:
        """The segment, and the names of the embeddings without known rows."""
        dense = self._hold_parameters()
        buffers = self._hold_buffers()
        for node in self._wiring.inputs:
            self._made[node] = self._graph.placeholder(node.name)
        for node, name in buffers.items():
            self._made[node] = self._graph.get_attr(name)
        for node in self._wiring.nodes:
            self._turn(self._split.modes[node])
            self._made[node] = self._emit(node)
        self._turn(Modes())
        outputs = [self._argument(node, None) for node in self._wiring.outputs]
        self._graph.output(outputs[0] if len(outputs) == 1 else tuple(outputs))
        self._segment._take_graph(self._graph)
        self._segment.train(self._model.training)
        return self._segment, dense

    # -- modules

    def _hold_parameters(self) -> frozenset[str]:
        number, segment = self._wiring.number, self._segment
        tensors: dict[str, nn.Parameter] = {}
        whole: set[str] = set()
        looked_up: dict[str, Lookup] = {}
        for use in self._wiring.uses:
            name = self._name(use)
            value = self._captured.tensors[use.parameter]
            assert isinstance(value, nn.Parameter)
            tensors[name] = value
            can_be_module = use.lookup is not None and name.endswith(".weight")
            if can_be_module and use.lookup is not None:
                agreed = looked_up.setdefault(name, use.lookup)
                can_be_module = agreed.settings == use.lookup.settings
            if not can_be_module or use.uses is not Uses.KNOWN_ROWS:
                whole.add(name)
        lookup_only = {
            id(tensors[name]): lookup
            for name, lookup in looked_up.items()
            if not any(tensors[other] is tensors[name] for other in whole)
        }
        for name, parameter in self._names.extra.get(number, {}).items():
            tensors[name] = parameter
            if id(parameter) in lookup_only and name.endswith(".weight"):
                looked_up[name] = lookup_only[id(parameter)]
        for name, lookup in looked_up.items():
            _place(segment, name.removesuffix(".weight"), _embedding(lookup, tensors[name]))
        for name, parameter in tensors.items():
            holder, leaf = _holder(segment, name)
            holder.register_parameter(leaf, parameter)
        self._settings = looked_up
        return frozenset(whole & looked_up.keys())

    def _hold_buffers(self) -> dict[fx.Node, str]:
        """Give the segment its buffers; those that an earlier segment has too are not saved again."""
        known = {
            id(value): name
            for name, value in reversed(list(self._model.named_buffers(remove_duplicate=False)))
        }
        found = {}
        for index, node in enumerate(self._wiring.others):
            value = self._captured.tensors[node]
            name = full_name(known.get(id(value), f"_constant{index}"))
            persistent = self._is_saved(known.get(id(value))) and self._is_first(node)
            holder, leaf = _holder(self._segment, name)
            holder.register_buffer(leaf, value, persistent=persistent)
            found[node] = name
        return found

    def _is_saved(self, name: str | None) -> bool:
        if name is None:
            return False
        path, _, leaf = name.rpartition(".")
        return leaf not in self._model.get_submodule(path)._non_persistent_buffers_set

    def _is_first(self, node: fx.Node) -> bool:
        regions = (self._split.region_of.get(user) for user in node.users)
        return self._wiring.number == min((region for region in regions if region is not None), default=0)

    # -- graph

    def _name(self, use: ParameterUse) -> str:
        return self._names.by_use[self._wiring.number, use.node, use.parameter]

    def _emit(self, node: fx.Node) -> fx.Node:
        lookup = self._lookup_module(node)
        if lookup is not None:
            return self._graph.call_module(lookup[0], (self._argument(lookup[1].ids, node),))
        if node.op == "get_attr":
            name = f"_{node.target}"
            value = _attribute(self._captured.root, str(node.target))
            if isinstance(value, nn.Module):
                self._segment.add_module(name, value)
            else:
                self._segment.register_buffer(name, value, persistent=False)
            return self._graph.get_attr(name)
        copied = self._graph.node_copy(node, lambda source: self._argument(source, node))
        copied.meta = {}
        return copied

    def _lookup_module(self, node: fx.Node) -> tuple[str, Lookup] | None:
        for use in self._wiring.uses:
            if use.node is node and use.lookup is not None:
                name = self._name(use)
                held = self._settings.get(name)
                if held is not None and held.settings == use.lookup.settings:
                    return name.removesuffix(".weight"), use.lookup
        return None

    def _argument(self, source: fx.Node, user: fx.Node | None) -> fx.Node:
        name = self._names.by_use.get((self._wiring.number, user, source))
        if name is None:
            return self._made[source]
        if name not in self._attributes:
            self._attributes[name] = self._graph.get_attr(name)
        return self._attributes[name]

    def _turn(self, modes: Modes) -> None:
        """Leave and enter what it takes to run the next operation as it ran in the trace."""
        if modes.autocast != self._modes.autocast:
            shared = 0
            for ours, wanted in zip(self._modes.autocast, modes.autocast, strict=False):
                if ours is not wanted:
                    break
                shared += 1
            while len(self._entered) > shared:
                self._graph.call_function(torch.amp.autocast_mode._exit_autocast, (self._entered.pop(),))
            for enter in modes.autocast[shared:]:
                self._entered.append(
                    self._graph.call_function(torch.amp.autocast_mode._enter_autocast, tuple(enter.args))
                )
        if modes.grad != self._modes.grad:
            self._graph.call_function(torch._C._set_grad_enabled, (modes.grad,))
        self._modes = modes


def _embedding(lookup: Lookup, weight: nn.Parameter) -> nn.Embedding:
    rows, columns = weight.shape
    module = nn.Embedding(
        rows,
        columns,
        padding_idx=lookup.padding_idx,
        max_norm=lookup.max_norm,
        norm_type=lookup.norm_type,
        scale_grad_by_freq=lookup.scale_grad_by_freq,
        sparse=lookup.sparse,
        _weight=weight.detach(),
    )
    module.weight = weight
    return module


def _holder(segment: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module of `segment` that is to hold `name`, and the last part of it."""
    path, _, leaf = name.rpartition(".")
    module = segment
    for part in path.split(".") if path else []:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        child = module._modules[part]
        assert child is not None
        module = child
    return module, leaf


def _place(segment: nn.Module, path: str, module: nn.Module) -> None:
    holder, leaf = _holder(segment, path)
    holder.add_module(leaf, module)


def _attribute(root: nn.Module, target: str) -> Any:  # noqa: ANN401 - a submodule, or a tensor
    value: Any = root
    for part in target.split("."):
        value = getattr(value, part)
    return value
