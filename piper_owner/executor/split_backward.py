"""A backward in two parts: the gradients of a stage's inputs first, those of its parameters later.

The graph of a stage has a *spine*: the nodes on a way from an output to an input. What hangs off it
leads to parameters alone. The first part runs the spine, and notes the gradient that arrives at each
*joint*, a spine node from which something hangs off. The second part runs each joint once more, for
what hangs off it. Where joints lead to one parameter they run together, each with the gradient that
was noted: only there something of the spine is computed twice. The idea is that of Zero Bubble
Pipeline Parallelism (Qi et al., 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.utils.hooks import RemovableHandle

__all__ = ["WeightBackward", "backward_input"]

Grads = tuple[Tensor | None, ...]
"""A gradient for each output of a node; None where nothing depends on it."""


@dataclass(frozen=True, slots=True)
class WeightBackward:
    """What is left of a backward: add to the parameters' gradients what `backward_input` left out."""

    joints: Mapping[Node, Grads]
    """Spine nodes from which parameters hang off, and the gradients that arrived at their outputs."""
    spine: frozenset[Node]
    apart: Sequence[tuple[GradientEdge, Tensor | None]]
    """Outputs that depend on no input, and their gradients (None: a loss)."""

    def run(self) -> None:
        """Run the rest of the backward, once."""
        starts, grads = [], []
        for joints, leaves in _grouped({node: _leaves(node, self.spine) for node in self.joints}):
            edges = [GradientEdge(leaf, 0) for leaf in leaves]
            for edge, grad in zip(edges, self._run_joints(joints, edges), strict=True):
                if grad is not None:
                    starts.append(edge)
                    grads.append(grad)
        # From the parameters' own nodes, so that their hooks run.
        starts.extend(edge for edge, _ in self.apart)
        if starts:
            torch.autograd.backward(starts, [*grads, *(grad for _, grad in self.apart)])

    def _run_joints(self, joints: Sequence[Node], leaves: Sequence[GradientEdge]) -> Sequence[Tensor | None]:
        given = [
            (GradientEdge(joint, place), grad)
            for joint in joints
            for place, grad in enumerate(self.joints[joint])
            if grad is not None
        ]
        if not given:
            return [None] * len(leaves)
        handles: list[RemovableHandle] = []
        try:
            if len(joints) > 1:  # one may lead to another along the spine
                handles.extend(joint.register_prehook(_instead(self.joints[joint])) for joint in joints)
            return torch.autograd.grad(
                [edge for edge, _ in given],
                leaves,
                [grad for _, grad in given],
                retain_graph=True,
                allow_unused=True,
            )
        finally:
            for handle in handles:
                handle.remove()


def _instead(noted: Grads) -> Callable[[Grads], Grads]:
    """A hook that puts `noted` in the place of whatever arrives."""
    return lambda arriving: noted


def backward_input(
    outputs: Sequence[Tensor], grads: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> tuple[list[Tensor | None], WeightBackward]:
    """The gradients of `inputs`, leaves that require one (None: nothing depends on it), and the rest.

    `outputs` require gradients and have those of `grads` (None: the output is the loss itself). The
    graph stays for the rest. Local.
    """
    with torch.enable_grad():
        ends = {torch.autograd.graph.get_gradient_edge(value).node for value in inputs}
    starts = [torch.autograd.graph.get_gradient_edge(output) for output in outputs]
    spine = _spine([edge.node for edge in starts], ends)
    on = [edge.node in spine for edge in starts]
    apart = [(edge, grad) for edge, grad in zip(starts, grads, strict=True) if edge.node not in spine]
    if not any(on):
        return [None] * len(inputs), WeightBackward({}, spine, apart)
    joints: dict[Node, Grads] = {}

    def note(node: Node) -> RemovableHandle:
        return node.register_prehook(lambda arriving: joints.update({node: tuple(arriving)}))

    handles = [note(node) for node in spine if next(_hanging(node, spine), None) is not None]
    try:
        results = torch.autograd.grad(
            [output for output, is_on in zip(outputs, on, strict=True) if is_on],
            list(inputs),
            [grad for grad, is_on in zip(grads, on, strict=True) if is_on],
            retain_graph=True,
            allow_unused=True,
        )
    finally:
        for handle in handles:
            handle.remove()
    return list(results), WeightBackward(joints, spine, apart)


def _spine(starts: Iterable[Node], ends: set[Node]) -> frozenset[Node]:
    """The nodes on a way from one of `starts` to one of `ends`."""
    before: dict[Node, list[Node]] = {}
    seen: set[Node] = set()
    waiting = list(starts)
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        for child, _ in node.next_functions:
            if child is not None:
                before.setdefault(child, []).append(node)
                waiting.append(child)
    spine: set[Node] = set()
    waiting = [node for node in ends if node in seen]
    while waiting:
        node = waiting.pop()
        if node not in spine:
            spine.add(node)
            waiting.extend(before.get(node, ()))
    return frozenset(spine)


def _hanging(node: Node, spine: frozenset[Node]) -> Iterator[Node]:
    """What `node` leads to beside the spine."""
    return (child for child, _ in node.next_functions if child is not None and child not in spine)


def _leaves(joint: Node, spine: frozenset[Node]) -> list[Node]:
    """The ends of all that hangs off `joint`: where the gradients of parameters add up."""
    found: dict[Node, None] = {}
    seen: set[Node] = set()
    waiting = list(_hanging(joint, spine))
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        children = list(_hanging(node, spine))
        if not children:
            found[node] = None
        waiting.extend(children)
    return list(found)


def _grouped(leaves_of: Mapping[Node, Sequence[Node]]) -> list[tuple[list[Node], list[Node]]]:
    """(joints, their leaves): joints that have a leaf in common, directly or by others, are together."""
    groups: dict[Node, tuple[dict[Node, None], dict[Node, None]]] = {}
    for joint, leaves in leaves_of.items():
        joints, ends = {joint: None}, dict.fromkeys(leaves)
        for other in {id(group): group for leaf in leaves if (group := groups.get(leaf))}.values():
            joints.update(other[0])
            ends.update(other[1])
        groups.update(dict.fromkeys(ends, (joints, ends)))
    return [(list(joints), list(ends)) for joints, ends in {id(g): g for g in groups.values()}.values()]
