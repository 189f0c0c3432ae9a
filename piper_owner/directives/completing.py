"""The order in which ranks compute: what a program says, and where it says nothing, like 1F1B.

The step is played through in unit time (a forward 1, a backward 2, each half of it 1). A free
rank runs what it can: backwards first, then the earliest microbatch, then the stage that is
furthest on its way; a weight half when there is nothing else. The earliest microbatch of a stage is
the one that could run first, so that a stage follows the stage that feeds it. As in 1F1B, `min(M, S - s)`
microbatches are between forward and backward of stage s, unless a filter picks the forward or
nothing else could go on: so few activations are kept.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Final

from piper_owner.dag.nodes import Compute
from piper_owner.directives.ordering import OrderGraph

__all__ = ["complete"]

_FORWARD: Final = 0
_BACKWARD: Final = 1
_Key = tuple[int, int, int, int]


def complete(graph: OrderGraph, placement: Sequence[int], num_ranks: int) -> tuple[tuple[Compute, ...], ...]:
    """Per rank, its computes in an order that keeps every edge of `graph`.

    Deterministic, and N log N in its nodes. What it returns cannot deadlock: the order in which the
    computes start keeps every edge, on all ranks together.

    Raises DirectiveError where no order keeps them all.
    """
    return _Play(graph, placement, num_ranks).run()


class _Play:
    """The state of the play: what can run, what runs, what still waits for how many."""

    def __init__(self, graph: OrderGraph, placement: Sequence[int], num_ranks: int) -> None:
        self.graph = graph
        self.placement = placement
        self.waits = [0] * graph.num_nodes
        self.ready: list[list[_Key]] = [[] for _ in range(num_ranks)]
        # By stage: forwards put off, because enough microbatches are under way.
        self.put_off: list[list[_Key]] = [[] for _ in placement]
        # By part and stage: how many of its computes have become able to run.
        self.arrived = [0 for _ in range(3 * len(placement))]
        self.under_way = [0 for _ in placement]
        self.done = bytearray(graph.num_nodes)
        self.nodes: list[list[int]] = [[] for _ in range(num_ranks)]

    def run(self) -> tuple[tuple[Compute, ...], ...]:
        graph = self.graph
        self._count_waits()
        running: list[tuple[int, int, int]] = []  # (end, rank, node)
        busy = [False for _ in self.ready]
        touched = set(range(len(self.ready)))
        now = 0
        while True:
            for rank in sorted(touched):
                if not busy[rank]:
                    node = self._next(rank)
                    if node is not None:
                        self.nodes[rank].append(node)
                        busy[rank] = True
                        heapq.heappush(running, (now + self._time(node), rank, node))
            touched = set()
            if not running:
                released = self._release()
                if released is None:
                    break
                touched = {released}
                continue
            now = running[0][0]
            while running and running[0][0] == now:
                _, rank, node = heapq.heappop(running)
                busy[rank] = False
                touched.add(rank)
                touched.update(self._finish(node))
        stuck = self._stuck()
        if stuck:
            raise graph.contradiction(stuck)
        return tuple(tuple(map(graph.compute, nodes)) for nodes in self.nodes)

    def _count_waits(self) -> None:
        graph, waits = self.graph, self.waits
        for node in graph.computes():
            for later in graph.data_after(node):
                waits[later] += 1
        for targets in graph.edges.values():
            for later in targets:
                waits[later] += 1
        free = [node for node in graph.computes() if not waits[node]]
        barriers = [node for node in range(3 * graph.cells, graph.num_nodes) if not waits[node]]
        for node in free:
            self._make_ready(node)
        for node in barriers:
            self._finish(node)

    def _time(self, node: int) -> int:
        part, cell = divmod(node, self.graph.cells)
        return 2 if part == _BACKWARD and not self.graph.split[cell] else 1

    def _make_ready(self, node: int) -> int:
        """Let the rank of a compute run it; returns the rank."""
        part, cell = divmod(node, self.graph.cells)
        stage = cell // self.graph.num_microbatches
        rank = self.placement[stage]
        line = part * len(self.placement) + stage
        turn = self.arrived[line]
        self.arrived[line] += 1
        if part == _FORWARD:
            key = (1, turn, -stage, node)
        else:
            key = (0 if part == _BACKWARD else 2, turn, stage, node)
        heapq.heappush(self.ready[rank], key)
        return rank

    def _next(self, rank: int) -> int | None:
        """What `rank` runs next, if it can run anything; forwards beyond the limit are put off."""
        ready, graph = self.ready[rank], self.graph
        while ready:
            key = heapq.heappop(ready)
            node = key[3]
            if node >= graph.cells:
                return node
            stage = node // graph.num_microbatches
            if graph.ordered[node] or self.under_way[stage] < len(self.placement) - stage:
                self.under_way[stage] += 1
                return node
            heapq.heappush(self.put_off[stage], key)
        return None

    def _release(self) -> int | None:
        """Let the earliest forward run that was put off, now that nothing else can; its rank."""
        waiting = [keys[0] for keys in self.put_off if keys]
        if not waiting:
            return None
        node = min(waiting)[3]
        self.graph.ordered[node] = True
        return self._take_back(node // self.graph.num_microbatches)

    def _take_back(self, stage: int) -> int:
        """Let the rank of `stage` consider the first of the forwards put off again; the rank."""
        rank = self.placement[stage]
        heapq.heappush(self.ready[rank], heapq.heappop(self.put_off[stage]))
        return rank

    def _finish(self, ended: int) -> set[int]:
        """Count what ended, and barriers after it; the ranks that may have become able to run."""
        graph, waits = self.graph, self.waits
        touched: set[int] = set()
        stack = [ended]
        while stack:
            node = stack.pop()
            self.done[node] = True
            part = node // graph.cells
            if part == _BACKWARD:
                stage = node % graph.cells // graph.num_microbatches
                self.under_way[stage] -= 1
                if self.put_off[stage]:
                    touched.add(self._take_back(stage))
            for later in graph.after(node):
                waits[later] -= 1
                if not waits[later]:
                    if later < 3 * graph.cells:
                        touched.add(self._make_ready(later))
                    else:
                        stack.append(later)
        return touched

    def _stuck(self) -> set[int]:
        graph = self.graph
        every = (*graph.computes(), *range(3 * graph.cells, graph.num_nodes))
        return {node for node in every if not self.done[node]}
