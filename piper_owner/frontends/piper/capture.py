"""Trace a model with Dynamo: one graph, what its placeholders are, and which nodes the model returns."""

from __future__ import annotations

import contextlib
import inspect
import logging
import re
import threading
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, fx, nn
from torch._dynamo.exc import TorchDynamoException
from torch._subclasses.fake_tensor import fake_tensor_tls

from piper_owner.errors import TraceError
from piper_owner.frontends.piper.annotation import Entry, innermost_line, recording

__all__ = ["ONE_AT_A_TIME", "Captured", "capture", "constants_on_meta"]

ONE_AT_A_TIME: Final = threading.Lock()
"""For tracing, and for drawing the values of a model. Ranks may be threads of one process, and Dynamo keeps
what it annotates in a variable of the process, and puts the state of random numbers back when it is done."""

_FAKE_LOG: Final = logging.getLogger("torch._subclasses.fake_tensor")
_USAGE_LOG: Final = torch._C._log_api_usage_once
"""What making a module, such as a slice of a ModuleList, leaves in a graph; it computes nothing."""
_REMEDY: Final = (
    "A pipeline stage is one fixed graph: let forward branch on shapes and settings, not on the values of "
    "tensors (torch.where chooses by value), and keep printing and the like out of it"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """One forward of a model as a graph. Every tensor from outside the graph is a placeholder of it."""

    root: nn.Module
    """What the graph's get_attr nodes refer to."""
    graph: fx.Graph
    tensors: dict[fx.Node, Tensor]
    """By placeholder, the very tensor it stands for: an input, a parameter, a buffer, or another one."""
    names: dict[fx.Node, str]
    """The placeholders of parameters and buffers, and their first names in the model."""
    inputs: dict[fx.Node, int]
    """The placeholders of the model's inputs, and which input each is."""
    outputs: tuple[fx.Node, ...]
    regions: tuple[Entry, ...]
    """The regions of the tag asked for, in trace order."""
    other_tags: tuple[Entry, ...]
    """The regions of all other tags."""


def capture(model: nn.Module, inputs: Sequence[Tensor], tag: str) -> Captured:
    """Trace `model(*inputs)` without running it, on the meta device or any other. Local.

    Under ONE_AT_A_TIME, which `analyse` needs too.

    Raises TraceError, naming the line, for what is no fixed graph, for outputs that are not tensors, and
    for a tensor that the forward stores in an attribute.
    """
    _check_inputs(model, inputs)
    on_meta = any(value.is_meta for value in inputs)
    # Each its own object, also where the caller gives one tensor twice.
    given = [value.detach().clone().requires_grad_(value.requires_grad) for value in inputs]
    with contextlib.ExitStack() as stack:
        recorder = stack.enter_context(recording())
        stack.enter_context(_restored_attributes(model))
        stack.enter_context(_quiet())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if on_meta:  # tensors that forward makes from nothing have to be there too
            stack.enter_context(torch.device("meta"))
            stack.enter_context(constants_on_meta())
        stack.enter_context(torch._dynamo.config.patch(allow_rnn=True))
        backend = _Backend()
        traced = torch.compile(_fresh_call(model), backend=backend, fullgraph=True, dynamic=False)
        try:
            returned = traced(*given)
        except TorchDynamoException as error:
            raise _explain(model, error) from error
        other = tuple(entry for entry in recorder.entries if entry.tag != tag)
        regions = recorder.regions(tag)
    if backend.module is None:
        raise TraceError(
            f"{type(model).__name__} computes nothing with tensors that torch can trace, or Dynamo is "
            "switched off (TORCHDYNAMO_DISABLE)"
        )
    outputs = backend.outputs(model, returned, given)
    return Captured(
        root=backend.module,
        graph=backend.module.graph,
        tensors=backend.tensors,
        names=backend.named(model),
        inputs=backend.numbered(given),
        outputs=outputs,
        regions=regions,
        other_tags=other,
    )


class _Backend:
    """Keeps the graph, and answers with tokens, so that nothing runs and each output can be told apart."""

    def __init__(self) -> None:
        self.module: fx.GraphModule | None = None
        self.tensors: dict[fx.Node, Tensor] = {}
        self._tokens: list[Tensor] = []

    def __call__(self, module: fx.GraphModule, examples: list[Any]) -> Callable[..., list[Tensor]]:
        for node in module.graph.find_nodes(op="call_function", target=_USAGE_LOG):
            module.graph.erase_node(node)
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        self.module = module
        self.tensors = dict(zip(placeholders, examples, strict=True))
        self._tokens = [torch.empty(0, device="meta") for _ in self._results()]
        return lambda *_: self._tokens

    def _results(self) -> tuple[Any, ...]:
        assert self.module is not None
        results: Any = self.module.graph.output_node().args[0]
        return tuple(results)

    def named(self, model: nn.Module) -> dict[fx.Node, str]:
        """The placeholders of parameters and buffers of `model`, with their first names."""
        names = {id(value): name for name, value in (*model.named_parameters(), *model.named_buffers())}
        return {node: names[id(value)] for node, value in self.tensors.items() if id(value) in names}

    def numbered(self, given: Sequence[Tensor]) -> dict[fx.Node, int]:
        """The placeholders of `given`, with their index."""
        index = {id(tensor): number for number, tensor in enumerate(given)}
        return {node: index[id(value)] for node, value in self.tensors.items() if id(value) in index}

    def outputs(self, model: nn.Module, returned: object, given: Sequence[Tensor]) -> tuple[fx.Node, ...]:
        """The node of every tensor in `returned`; one that is returned as it came gets a placeholder."""
        node_of: dict[int, Any] = {id(value): node for node, value in self.tensors.items()}
        node_of |= {id(token): node for token, node in zip(self._tokens, self._results(), strict=True)}
        outside = {id(value): value for value in (*given, *model.parameters(), *model.buffers())}
        values = list(returned) if isinstance(returned, tuple | list) else [returned]
        named = type(model).__name__
        if isinstance(returned, tuple | list) and len(values) < 2:
            raise TraceError(
                f"{named} returns a {type(returned).__name__} of {len(values)}; return the tensor"
            )
        for value in values:
            if not isinstance(value, Tensor):
                raise TraceError(
                    f"{named} returns a {type(value).__name__} where a tensor is needed: between stages, and "
                    "to the loss, go tensors; return one, or a tuple of them"
                )
            if id(value) not in node_of:
                node_of[id(value)] = self._placeholder(outside[id(value)])
        stored = {id(token) for token in self._tokens} - {id(value) for value in values}
        if stored:
            raise TraceError(
                f"the forward of {named} keeps a tensor it makes, in an attribute or a list, for later; a "
                "stage hands on only what forward returns: return it"
            )
        return tuple(node_of[id(value)] for value in values)

    def _placeholder(self, value: Tensor) -> fx.Node:
        assert self.module is not None
        graph = self.module.graph
        with graph.inserting_before(next(iter(graph.nodes))):
            node = graph.placeholder(f"returned_{len(self.tensors)}")
        self.tensors[node] = value
        return node


def _fresh_call(model: nn.Module) -> Callable[..., object]:
    """A function that calls `model`, of which Dynamo has never seen the code.

    It keeps what it compiled with the code object; so no trace finds an earlier one, and nobody's
    compiled functions have to be forgotten.
    """

    def call(*inputs: Tensor) -> object:
        return model(*inputs)

    return types.FunctionType(
        call.__code__.replace(), call.__globals__, call.__name__, None, call.__closure__
    )


def _check_inputs(model: nn.Module, inputs: Sequence[object]) -> None:
    for index, value in enumerate(inputs):
        if not isinstance(value, Tensor):
            raise TraceError(
                f"input {index} for {type(model).__name__} is a {type(value).__name__}: a traced model takes "
                "tensors, by position; bind other arguments before (functools.partial, or an attribute)"
            )
    try:
        inspect.signature(model.forward).bind(*inputs)
    except TypeError as error:
        raise TraceError(
            f"forward of {type(model).__name__} is called with {len(inputs)} input"
            f"{'' if len(inputs) == 1 else 's'}, by position, and does not take that: {error}; further "
            "arguments need a default"
        ) from error


@contextlib.contextmanager
def _restored_attributes(model: nn.Module) -> Iterator[None]:
    """Undo what forward assigns to attributes: nothing has run. Raises TraceError if one is a tensor."""
    tables = [
        (path, table)
        for path, module in model.named_modules()
        for table in (vars(module), module._parameters, module._buffers)
    ]
    before = [dict(table) for _, table in tables]
    stored = []
    try:
        yield
    finally:
        for (path, table), old in zip(tables, before, strict=True):
            for name in [name for name in table if name not in old or table[name] is not old[name]]:
                if isinstance(table[name], Tensor):
                    stored.append(f"{path}.{name}" if path else name)
                if name not in old:
                    del table[name]
            table.update(old)
    if stored:
        raise TraceError(
            f"the forward of {type(model).__name__} stores a tensor in {', '.join(stored)}; a stage hands on "
            "only what forward returns: return it, or write into a buffer in place"
        )


@contextlib.contextmanager
def constants_on_meta() -> Iterator[None]:
    """Let a trace take what `torch.tensor` makes on the meta device, for which torch makes no fake."""
    before = fake_tensor_tls.allow_non_fake_inputs_override
    fake_tensor_tls.allow_non_fake_inputs_override = True
    try:
        yield
    finally:
        fake_tensor_tls.allow_non_fake_inputs_override = before


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from logging the traceback of an error that is raised and explained anyway."""
    was, _FAKE_LOG.disabled = _FAKE_LOG.disabled, True
    try:
        yield
    finally:
        _FAKE_LOG.disabled = was


def _explain(model: nn.Module, error: TorchDynamoException) -> TraceError:
    """Dynamo's page on why it cannot go on, as the user's line and the reason."""
    text = str(error)
    stack: Sequence[traceback.FrameSummary] = getattr(error, "real_stack", None) or [
        traceback.FrameSummary(file, int(number), function, lookup_line=False, line=line)
        for file, number, function, line in re.findall(r'File "(.+)", line (\d+), in (\S+)\n\s+(.*)', text)
    ]
    title = text.strip().partition("\n")[0]
    explanation = _after("Explanation:", text)
    where = f"cannot trace {type(model).__name__}, {innermost_line(stack)}"
    if title.startswith("Observed exception"):
        return TraceError(f"{where}: it {_after('Developer debug context:', text)}")
    if ": got " in explanation:
        return TraceError(f"{where}: {explanation.partition(': got ')[2].rstrip('.')}")
    reason = f"{title}: {explanation}".removesuffix(": ").rstrip(".")
    return TraceError(f"{where}: {reason}. {_REMEDY}")


def _after(label: str, text: str) -> str:
    return text.partition(label)[2].strip().partition("\n")[0].strip()
