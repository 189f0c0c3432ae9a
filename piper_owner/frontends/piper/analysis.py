"""Run a captured graph once without values, and note of each operation what splitting has to know."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from piper_owner.errors import TraceError
from piper_owner.frontends.piper.capture import Captured, constants_on_meta
from piper_owner.frontends.piper.source_lines import line_of

__all__ = ["CONTEXTS", "Facts", "analyse", "is_tensor", "is_tensors"]

CONTEXTS: Final = frozenset(
    {
        torch._C._set_grad_enabled,
        torch.amp.autocast_mode._enter_autocast,
        torch.amp.autocast_mode._exit_autocast,
    }
)
"""Operations that change how later ones run, and compute nothing."""

_TRANSFORMS: Final = ("torch._functorch", "torch._C._functorch")
"""The modules of what transforms of functions leave in a graph."""

_STATISTICS: Final[dict[object, int]] = {functional.batch_norm: 5, functional.instance_norm: 5}
"""Functions that write their arguments 1 and 2 if the argument at this place is true."""


@dataclass(slots=True)
class Facts:
    """What running the graph has shown; all by node."""

    values: dict[fx.Node, Any] = field(default_factory=dict)
    """Results, with shape and dtype but without memory."""
    writes: dict[fx.Node, tuple[fx.Node, ...]] = field(default_factory=dict)
    """The arguments that an operation writes in place."""
    random: set[fx.Node] = field(default_factory=set)
    makers: dict[int, fx.Node] = field(default_factory=dict)
    """By memory, the node that made it."""
    written: set[int] = field(default_factory=set)
    """The memory that some operation writes."""

    def memory(self, node: fx.Node) -> set[int]:
        """The memory in which the result of `node` lies."""
        return {value.untyped_storage()._cdata for value in tensors_in(self.values[node])}

    def is_view(self, node: fx.Node) -> bool:
        """Whether the result of `node` is another look at something that was there."""
        return bool(self.memory(node)) and all(self.makers[key] is not node for key in self.memory(node))

    def is_written(self, node: fx.Node) -> bool:
        """Whether some operation writes into the result of `node`."""
        return bool(self.memory(node) & self.written)


def analyse(captured: Captured) -> Facts:
    """Run the graph of `captured` on tensors without memory. Local.

    Raises TraceError for an operation whose result depends on values, such as `.item()`, and for
    transforms of functions.
    """
    facts = Facts()
    _refuse_transforms(captured)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        mode = stack.enter_context(FakeTensorMode())
        stack.enter_context(_grad_mode_kept())
        if any(value.is_meta for value in captured.tensors.values()):
            stack.enter_context(constants_on_meta())
        runner = _Runner(captured, facts, mode)
        placeholders = [node for node in captured.graph.nodes if node.op == "placeholder"]
        runner.run(*(mode.from_tensor(captured.tensors[node]) for node in placeholders))
    return facts


def _refuse_transforms(captured: Captured) -> None:
    """In a graph they are switches of the process, to and fro, around tensors without memory of their own."""
    calls = [node for node in captured.graph.nodes if node.op == "call_function"]
    found = [
        node for node in calls if (getattr(node.target, "__module__", None) or "").startswith(_TRANSFORMS)
    ]
    if found:
        # The first of them may be switches, for which torch tells no line.
        node = next((node for node in found if node.meta.get("stack_trace")), found[0])
        raise TraceError(
            f"{line_of(node)}: torch.vmap, torch.func.grad and the like cannot be cut into stages; write "
            "the batch dimension out (broadcasting, einsum), and leave gradients to the training loop"
        )


@contextlib.contextmanager
def _grad_mode_kept() -> Iterator[None]:
    was = torch.is_grad_enabled()
    try:
        yield
    finally:
        torch.set_grad_enabled(was)


class _Runner(fx.Interpreter):
    """Runs the graph node by node and writes what it sees into `facts`."""

    def __init__(self, captured: Captured, facts: Facts, mode: FakeTensorMode) -> None:
        super().__init__(captured.root, garbage_collect_values=False, graph=captured.graph)
        self.extra_traceback = False  # errors are the user's, and name the user's line
        self._facts, self._mode = facts, mode

    def fetch_attr(self, target: str) -> Any:  # noqa: ANN401 - as in torch
        value = super().fetch_attr(target)
        return self._mode.from_tensor(value) if isinstance(value, Tensor) else value

    def run_node(self, n: fx.Node) -> Any:  # noqa: ANN401 - as in torch
        facts = self._facts
        before = [
            (node, value, value._version)
            for node in n.all_input_nodes
            for value in tensors_in(self.env[node])
        ]
        watch = _RandomWatch()
        try:
            with watch:
                result = super().run_node(n)
        except UnsupportedFakeTensorException as error:
            raise TraceError(f"{line_of(n)}: {error}") from error
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise TraceError(
                f"{line_of(n)}: its result is a Python number, or has a shape, that depends on the values "
                "of a tensor; stages are planned before there are values. Keep it a tensor, of a known shape"
            ) from error
        if n.op == "output":
            return result
        facts.values[n] = result
        for value in tensors_in(result):
            facts.makers.setdefault(value.untyped_storage()._cdata, n)
        written = {node for node, value, version in before if value._version != version}
        written |= set(_statistics_of(n))
        if written:
            facts.writes[n] = tuple(node for node in n.all_input_nodes if node in written)
            facts.written.update(key for node in written for key in facts.memory(node))
        if watch.seen:
            facts.random.add(n)
        return result


class _RandomWatch(TorchDispatchMode):
    """Sees whether an operation draws random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = False

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - as in torch
        self.seen |= torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        return func(*args, **(kwargs or {}))


def _statistics_of(node: fx.Node) -> Iterator[fx.Node]:
    """The running statistics that a norm updates, which does not count as a write in torch."""
    place = _STATISTICS.get(node.target) if node.op == "call_function" else None
    if place is None:
        return
    flag = "training" if node.target is functional.batch_norm else "use_input_stats"
    if node.args[place] if len(node.args) > place else node.kwargs.get(flag, flag == "use_input_stats"):
        given = (*node.args[1:3], node.kwargs.get("running_mean"), node.kwargs.get("running_var"))
        yield from (value for value in given if isinstance(value, fx.Node))


def tensors_in(value: object) -> list[Tensor]:
    """The tensors that a result is or holds."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [tensor for each in value for tensor in tensors_in(each)]
    return []


def is_tensor(value: object) -> bool:
    """Whether a result is one tensor."""
    return isinstance(value, Tensor)


def is_tensors(value: object) -> bool:
    """Whether a result is a tensor, or tuples or lists of nothing else."""
    if isinstance(value, tuple | list):
        return bool(value) and all(is_tensors(each) for each in value)
    return isinstance(value, Tensor)
