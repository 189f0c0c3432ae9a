"""Decide for every operation of a captured graph which region, and so which stage, it belongs to."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from piper_owner.errors import TraceError
from piper_owner.frontends.piper.analysis import CONTEXTS, Facts, is_tensors
from piper_owner.frontends.piper.annotation import Entry
from piper_owner.frontends.piper.capture import Captured
from piper_owner.frontends.piper.source_lines import line_of

__all__ = ["Modes", "Split", "split_regions"]


@dataclass(frozen=True, slots=True)
class Modes:
    """How an operation runs: with gradients or without, and in which autocast contexts, outermost first."""

    grad: bool = True
    autocast: tuple[fx.Node, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """By operation: its region, or None for one that each region that needs it makes for itself."""

    tag: str
    regions: tuple[Entry, ...]
    region_of: Mapping[fx.Node, int | None]
    modes: Mapping[fx.Node, Modes]
    tags: tuple[Mapping[str, int], ...]
    """By region, its number, and those of other tags that hold for all of it."""


def split_regions(captured: Captured, facts: Facts, tag: str) -> Split:
    """Give each operation its region. Local.

    Operations outside regions before the first join the first one and those after the last the last one.
    One between two joins the one before it, if it takes values from no other. Outside regions, what follows
    from inputs and constants alone (positions, masks, slices of the ids), and views of parameters,
    belong to no region: every region that uses them makes them itself, so that they cross no edge.

    Raises TraceError, naming the line, for a model without regions, a region inside a region of the same
    tag, an empty one, other operations outside, and values other than tensors that cross.
    """
    regions = captured.regions
    _check_entries(captured, tag)
    marks = {entry.mark: number for number, entry in enumerate(regions)}
    region_of, modes = _Assignment(captured, facts, tag, marks).run()
    split = Split(
        tag=tag,
        regions=regions,
        region_of=region_of,
        modes=modes,
        tags=_tags_of(captured, tag, marks),
    )
    _check_nonempty(split)
    _check_crossing(captured, facts, split)
    return split


class _Assignment:
    """One walk over the graph, in the order of the trace."""

    def __init__(self, captured: Captured, facts: Facts, tag: str, marks: Mapping[int, int]) -> None:
        self._captured, self._facts, self._tag, self._marks = captured, facts, tag, marks
        self._region_of: dict[fx.Node, int | None] = {}
        self._modes: dict[fx.Node, Modes] = {}
        operations = [node for node in captured.graph.nodes if node.op in ("call_function", "call_method")]
        marked = [index for index, node in enumerate(operations) if self._mark(node) is not None]
        self._last_marked = operations[marked[-1]] if marked else None

    def _mark(self, node: fx.Node) -> int | None:
        mark = (node.meta.get("custom") or {}).get(self._tag)
        return None if mark is None else self._marks[mark]

    def run(self) -> tuple[dict[fx.Node, int | None], dict[fx.Node, Modes]]:
        """The region and the modes of each operation."""
        modes, current, is_over = Modes(), None, self._last_marked is None
        for node in self._captured.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            if node.op == "call_function" and node.target in CONTEXTS:
                modes = _after(node, modes)
                continue
            self._modes[node] = modes
            mark = self._mark(node)
            if node.op == "get_attr":
                self._region_of[node] = None
            elif node.target is operator.getitem and not _is_one_tensor(self._facts, node.args[0]):
                source = node.args[0]
                assert isinstance(source, fx.Node)
                self._region_of[node] = self._region_of[source]
            elif mark is not None:
                self._region_of[node] = current = mark
            else:
                self._region_of[node] = self._region_outside(node, current, is_over=is_over)
            is_over |= node is self._last_marked
        return self._region_of, self._modes

    def _region_outside(self, node: fx.Node, current: int | None, *, is_over: bool) -> int | None:
        if not is_tensors(self._facts.values[node]) and node not in self._facts.writes:
            raise TraceError(
                f"{line_of(node)}: outside every {self._tag} region, and makes no tensor; put it inside one"
            )
        if self._is_free(node):
            return None
        if current is None:
            return 0
        if is_over:
            return current
        sources = {
            region for source in node.all_input_nodes if (region := self._region_of.get(source)) is not None
        }
        if sources <= {current}:
            return current
        users = {self._mark(user) for user in node.users}
        if self._facts.is_view(node) and len(users) == 1 and None not in users:
            return users.pop()
        raise TraceError(
            f"{line_of(node)}: stands between {self._tag} regions {current} and {current + 1}, outside both, "
            f"and takes values of region {' and '.join(map(str, sorted(sources)))}, so that it is not "
            "clear which stage it belongs to; move it into one of the regions"
        )

    def _is_free(self, node: fx.Node) -> bool:
        """Whether every region may make the result itself: the same everywhere, and cheap to have twice."""
        facts = self._facts
        if node in facts.random or node in facts.writes or facts.is_written(node):
            return False
        for source in node.all_input_nodes:
            if source.op == "placeholder":
                if facts.is_written(source):
                    return False
            elif self._region_of[source] is not None:
                return False
        from_parameters = any(self._follows_from_parameters(source) for source in node.all_input_nodes)
        return facts.is_view(node) or not from_parameters

    def _follows_from_parameters(self, source: fx.Node) -> bool:
        """Whether a free operation looks at a parameter; what is computed from it belongs to a region."""
        if source.op == "placeholder":
            return isinstance(self._captured.tensors[source], nn.Parameter)
        return any(self._follows_from_parameters(each) for each in source.all_input_nodes)


def _is_one_tensor(facts: Facts, source: object) -> bool:
    """Whether `source` is a node whose result is one tensor."""
    return isinstance(source, fx.Node) and isinstance(facts.values[source], torch.Tensor)


def _after(node: fx.Node, modes: Modes) -> Modes:
    """The modes that hold after the context `node`."""
    if node.target is torch._C._set_grad_enabled:
        return Modes(bool(node.args[0]), modes.autocast)
    if node.target is torch.amp.autocast_mode._enter_autocast:
        return Modes(modes.grad, (*modes.autocast, node))
    return Modes(modes.grad, tuple(enter for enter in modes.autocast if enter is not node.args[0]))


def _check_entries(captured: Captured, tag: str) -> None:
    if not captured.regions:
        others = sorted({entry.tag for entry in captured.other_tags})
        found = f"; its regions are tagged {', '.join(others)}" if others else ""
        raise TraceError(
            f"the model has no region tagged {tag}{found}. Put `with piper_owner.annotate({tag!r}):` around "
            "the code of each stage"
        )
    for number, entry in enumerate(captured.regions):
        if tag in entry.around:
            raise TraceError(
                f"{entry.line}: a {tag} region begins inside another {tag} region, the one that began at "
                f"{captured.regions[number - 1].line}; end that one first, or give the inner one another tag"
            )


def _check_nonempty(split: Split) -> None:
    full = set(split.region_of.values())
    for number, entry in enumerate(split.regions):
        if number not in full:
            raise TraceError(
                f"{entry.line}: {split.tag} region {number} computes nothing; take it away, put an operation "
                "into it or, if it is inside what torch.utils.checkpoint runs, put it around that call"
            )


def _check_crossing(captured: Captured, facts: Facts, split: Split) -> None:
    """Only tensors cross, forwards, and nothing is written in place from another region."""
    used_by: dict[int, set[int]] = {}  # by memory that came from outside, the regions that use it
    region_of = split.region_of
    for node, here in region_of.items():
        for source in node.all_input_nodes:
            there = region_of.get(source)
            if here is None or there is None or here == there:
                continue
            if not isinstance(facts.values[source], torch.Tensor):
                raise TraceError(
                    f"{line_of(node)}: takes a {type(facts.values[source]).__name__} that {split.tag} region "
                    f"{there} makes at {line_of(source)}; between stages go tensors only. Compute it again "
                    f"in region {here}, or pass a tensor"
                )
            assert there < here, "a region takes values of earlier ones only"
    for node in captured.graph.nodes:
        for source in node.all_input_nodes:
            if source.op == "placeholder" and (here := region_of.get(node)) is not None:
                for key in facts.memory(source):
                    used_by.setdefault(key, set()).add(here)
    for node, written in facts.writes.items():
        here = region_of[node]
        assert here is not None
        for source in written:
            _check_write(captured, facts, split, node, source, used_by)


def _check_write(
    captured: Captured,
    facts: Facts,
    split: Split,
    node: fx.Node,
    source: fx.Node,
    used_by: Mapping[int, set[int]],
) -> None:
    for key in facts.memory(source):
        maker = facts.makers[key]
        if maker in captured.inputs:
            raise TraceError(
                f"{line_of(node)}: writes in place into input {captured.inputs[maker]} of the model, which "
                "other stages read too; write into a copy (.clone())"
            )
        if maker.op == "placeholder":
            name = captured.names.get(maker, "a tensor of the model")
            regions = sorted(used_by[key])
            if len(regions) == 1:
                continue
            if node.target is functional.embedding:
                raise TraceError(
                    f"{line_of(node)}: max_norm rewrites {name} inside forward, and the {split.tag} regions "
                    f"{regions} use it. Leave max_norm out, and clip or normalise after the step"
                )
            raise TraceError(
                f"{line_of(node)}: writes in place into {name}, which the {split.tag} regions {regions} use; "
                "what one stage writes does not reach another. Use it in one region"
            )
        elif split.region_of[maker] != split.region_of[node]:
            raise TraceError(
                f"{line_of(node)}: writes in place into a value that {split.tag} region "
                f"{split.region_of[maker]} made at {line_of(maker)}, and region {split.region_of[node]} has "
                "only received; write into a copy (.clone()), or leave the underscore or inplace=True out"
            )


def _tags_of(captured: Captured, tag: str, marks: Mapping[int, int]) -> tuple[Mapping[str, int], ...]:
    """By region, the numbers of the tags that stand on every marked operation of it."""
    numbers: dict[str, dict[int, int]] = {}
    for entry in captured.other_tags:
        known = numbers.setdefault(entry.tag, {})
        known[entry.mark] = len(known)
    found: list[set[tuple[str, int]] | None] = [None for _ in marks]
    for node in captured.graph.nodes:
        custom: dict[str, Any] = node.meta.get("custom") or {}
        if node.op in ("call_function", "call_method") and tag in custom:
            region = marks[custom[tag]]
            here = {(name, numbers[name][mark]) for name, mark in custom.items() if name in numbers}
            known_here = found[region]
            found[region] = here if known_here is None else known_here & here
    return tuple({tag: region, **dict(sorted(others or ()))} for region, others in enumerate(found))
