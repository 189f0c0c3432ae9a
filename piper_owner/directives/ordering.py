"""What comes before what in a step: data dependencies and `order` directives, as one graph.

Nodes are integers. The first `3 * cells` are computes (a *cell* is `stage * num_microbatches +
microbatch`): `cell` is its forward, `cells + cell` its backward, or the input half of a split one,
`2 * cells + cell` the weight half of a split one. Behind them stand barriers, which take no time:
a filter that picks many computes has one that opens before them and one that closes after them,
and so has a group of several filters. So a program costs an edge for each compute that a
*different* filter picks, not one for each pair of computes that it orders.

Data edges are not stored: they follow from the stage edges.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

from piper_owner.dag.nodes import Compute, ComputeKind
from piper_owner.directives.model import Filter, Order, Pass
from piper_owner.directives.regions import Picked, Regions, Splitting
from piper_owner.errors import DirectiveError

__all__ = ["OrderGraph"]

_MEMBER: Final = -1
_DATA: Final = -2
_SHOWN: Final = 6
_TRIED: Final = 16


class OrderGraph:
    """The graph of one pipeline's step under a program.

    Attributes, read-only once made:

    - `num_nodes`, `cells`, `num_microbatches`;
    - `split`: by cell, whether its backward is split in two;
    - `edges`: by node, the nodes that an `order` directive or a barrier puts after it;
    - `ordered`: by node, whether a filter picks it, alone or with others.
    """

    def __init__(
        self, regions: Regions, splitting: Splitting, stage_edges: Sequence[tuple[int, int]]
    ) -> None:
        self.regions = regions
        self.program = regions.program
        self.splitting = splitting
        self.num_microbatches = splitting.num_microbatches
        self.num_stages = len(regions.tags)
        self.cells = self.num_stages * self.num_microbatches
        self.later: list[list[int]] = [[] for _ in regions.tags]
        self.earlier: list[list[int]] = [[] for _ in regions.tags]
        for early, late in stage_edges:
            self.later[early].append(late)
            self.earlier[late].append(early)
        self.split = [False] * self.cells
        self.edges: dict[int, list[int]] = {}
        # By edge, as source and target: the directive that makes it, or _MEMBER.
        self.causes: dict[tuple[int, int], int] = {}
        self.ordered = bytearray(3 * self.cells)
        self.num_nodes = 3 * self.cells
        self._spans: dict[Filter, tuple[int, int]] = {}
        self._split_backwards()
        for index, order in self.program.orders():
            self._add(index, order)

    # Building.

    def _split_backwards(self) -> None:
        """A cell that a filter on BI or BW picks has a split backward."""
        seen: set[Filter] = set()
        for index, order in self.program.orders():
            for group in order.groups:
                for picked in group:
                    if picked.part in (Pass.BACKWARD_INPUT, Pass.BACKWARD_WEIGHT) and picked not in seen:
                        seen.add(picked)
                        stages, microbatches = self.regions.picked(index, picked, self.splitting)
                        for cell in self._cells_of((stages, microbatches)):
                            self.split[cell] = True

    def _cells_of(self, picked: Picked) -> Iterator[int]:
        stages, microbatches = picked
        for stage in stages:
            for microbatch in microbatches:
                yield stage * self.num_microbatches + microbatch

    def _add(self, index: int, order: Order) -> None:
        before: int | None = None
        for group in order.groups:
            spans = [self._span(index, picked) for picked in group]
            if len(spans) == 1:
                start, end = spans[0]
            else:
                start, end = self._barrier(), self._barrier()
                for first, last in spans:
                    self._link(start, first, _MEMBER)
                    self._link(last, end, _MEMBER)
            if before is not None:
                self._link(before, start, index)
            before = end

    def _barrier(self) -> int:
        self.num_nodes += 1
        return self.num_nodes - 1

    def _link(self, source: int, target: int, cause: int) -> None:
        if (source, target) not in self.causes:
            self.causes[source, target] = cause
            self.edges.setdefault(source, []).append(target)

    def _span(self, index: int, picked: Filter) -> tuple[int, int]:
        """What is before all that a filter picks, and what is after; one compute is its own span."""
        span = self._spans.get(picked)
        if span is None:
            nodes = list(self._nodes_of(index, picked))
            for node in nodes:
                self.ordered[node] = True
            if len(nodes) == 1:
                span = (nodes[0], nodes[0])
            else:
                span = (self._barrier(), self._barrier())
                for node in nodes:
                    self._link(span[0], node, _MEMBER)
                    self._link(node, span[1], _MEMBER)
            self._spans[picked] = span
        return span

    def _nodes_of(self, index: int, picked: Filter) -> Iterator[int]:
        for cell in self._cells_of(self.regions.picked(index, picked, self.splitting)):
            if picked.part in (None, Pass.FORWARD):
                yield cell
            if picked.part in (None, Pass.BACKWARD, Pass.BACKWARD_INPUT):
                yield self.cells + cell
            if picked.part in (None, Pass.BACKWARD, Pass.BACKWARD_WEIGHT) and self.split[cell]:
                yield 2 * self.cells + cell

    # Reading.

    def data_after(self, node: int) -> Iterator[int]:
        """The computes that use what `node` makes; none for a barrier."""
        part, cell = divmod(node, self.cells)
        stage, microbatch = divmod(cell, self.num_microbatches)
        if part == 0:
            for late in self.later[stage]:
                yield late * self.num_microbatches + microbatch
            yield self.cells + cell
        elif part == 1:
            for early in self.earlier[stage]:
                yield self.cells + early * self.num_microbatches + microbatch
            if self.split[cell]:
                yield 2 * self.cells + cell

    def after(self, node: int) -> Iterator[int]:
        """Every node that waits for `node`; one may come twice, for two reasons."""
        if node < 3 * self.cells:
            yield from self.data_after(node)
        yield from self.edges.get(node, ())

    def computes(self) -> Iterator[int]:
        """Every compute node: a weight half only where the backward is split."""
        yield from range(2 * self.cells)
        yield from (2 * self.cells + cell for cell in range(self.cells) if self.split[cell])

    def compute(self, node: int) -> Compute:
        """The compute that a node stands for."""
        part, cell = divmod(node, self.cells)
        stage, microbatch = divmod(cell, self.num_microbatches)
        kind = (ComputeKind.FORWARD, ComputeKind.BACKWARD, ComputeKind.BACKWARD_WEIGHT)[part]
        if part == 1 and self.split[cell]:
            kind = ComputeKind.BACKWARD_INPUT
        return Compute(kind=kind, stage=stage, microbatch=microbatch)

    # Contradictions.

    def contradiction(self, stuck: set[int]) -> DirectiveError:
        """The error for nodes that wait for one another, quoting the directives of one circle."""
        circle = self._circle(stuck)
        causes = [self._cause(a, b) for a, b in zip(circle, [*circle[1:], circle[0]], strict=True)]
        directives = sorted({cause for cause in causes if cause >= 0})
        program = self.program
        repeated = self._repeated(directives[0]) if len(directives) == 1 else None
        if repeated is not None:
            return program.error(directives[0], repeated)
        words = self._words(circle, causes)
        if len(directives) == 1:
            return program.error(directives[0], f"it contradicts the data dependencies: {words}")
        others = " and ".join(program.quote(index) for index in directives[1:_SHOWN])
        data = " and the data dependencies" if _DATA in causes else ""
        return program.error(directives[0], f"it contradicts {others}{data}: {words}")

    def _repeated(self, index: int) -> str | None:
        """What is wrong with an order two groups of which pick one compute; None if they do not."""
        order = self.program.directives[index]
        assert isinstance(order, Order)
        groups: dict[int, int] = {}
        for at, group in enumerate(order.groups):
            for node in (node for picked in group for node in self._nodes_of(index, picked)):
                if groups.setdefault(node, at) != at:
                    return (
                        f"it contradicts itself: two of its groups, {groups[node]} and {at}, pick "
                        f"{self._name(node)}, which cannot come before itself; name it in one of them"
                    )
        return None

    def _words(self, circle: list[int], causes: list[int]) -> str:
        """The circle, compute by compute: what comes before what, and who says so."""
        first = next((at for at, node in enumerate(circle) if node < 3 * self.cells), 0)
        circle, causes = circle[first:] + circle[:first], causes[first:] + causes[:first]
        steps: list[str] = []
        start, why = circle[0], _MEMBER
        for node, cause in zip([*circle[1:], circle[0]], causes, strict=True):
            why = cause if cause != _MEMBER else why
            if node < 3 * self.cells:
                reason = "which needs its result" if why == _DATA else f"says directive[{why}]"
                steps.append(f"{self._name(start)} comes before {self._name(node)}, {reason}")
                start, why = node, _MEMBER
        if len(steps) > _SHOWN:
            steps = [*steps[:_SHOWN], f"... {len(steps)} steps in all"]
        return "; ".join(steps) + "; no order does all of that: change one"

    def _name(self, node: int) -> str:
        action = self.compute(node)
        part = {
            ComputeKind.FORWARD: "F",
            ComputeKind.BACKWARD: "B",
            ComputeKind.BACKWARD_INPUT: "BI",
            ComputeKind.BACKWARD_WEIGHT: "BW",
        }[action.kind]
        tags = " ".join(f"{name} {index}" for name, index in self.regions.tags[action.stage].items())
        return f"{part} of {tags} MB {action.microbatch}".encode("ascii", "backslashreplace").decode("ascii")

    def _cause(self, source: int, target: int) -> int:
        if source < 3 * self.cells and target in self.data_after(source):
            return _DATA  # whatever else says so too: this cannot be changed
        return self.causes[source, target]

    def _circle(self, stuck: set[int]) -> list[int]:
        """A short circle among `stuck`, nodes each of which has one of them before it."""
        before: dict[int, int] = {}
        for node in sorted(stuck):
            for later in self.after(node):
                if later in stuck:
                    before.setdefault(later, node)
        # Backwards from anywhere one comes into a circle.
        node, path, seen = min(stuck), [], set[int]()
        while node not in seen:
            seen.add(node)
            path.append(node)
            node = before[node]
        found = path[path.index(node) :][::-1]
        step = max(1, len(found) // _TRIED)
        return min((self._shortest(start, stuck) for start in found[::step]), key=len)

    def _shortest(self, start: int, stuck: set[int]) -> list[int]:
        came: dict[int, int] = {}
        queue = deque([start])
        while queue:
            node = queue.popleft()
            for later in self.after(node):
                if later == start:
                    circle = [node]
                    while circle[-1] != start:
                        circle.append(came[circle[-1]])
                    return circle[::-1]
                if later in stuck and later not in came:
                    came[later] = node
                    queue.append(later)
        raise AssertionError(f"node {start} is on no circle")
