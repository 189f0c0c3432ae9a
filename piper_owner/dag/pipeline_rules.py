"""Rules about computes and pipeline transfers. Each yields what is broken; see `rules.RULES`."""

from __future__ import annotations

from collections.abc import Iterator

from piper_owner.dag.index import ABSENT, DagIndex, Violation

__all__ = ["compute_order", "computed_once", "messages_in_order", "transfer_positions", "transfers_present"]


def computed_once(index: DagIndex) -> Iterator[Violation]:
    """Each (stage, microbatch): one F, and one B or one I and one W, on the rank of its placement."""
    yield from index.misplaced_computes
    microbatches = index.dag.num_microbatches
    for cell in range(len(index.forward)):
        if index.forward[cell] != ABSENT and index.backward[cell] != ABSENT and index.weight[cell] != ABSENT:
            continue
        stage, microbatch = divmod(cell, microbatches)
        for kind, found in (("F", index.forward), ("B", index.backward), ("W", index.weight)):
            missing = found[cell] == ABSENT
            if kind == "W" and index.backward[cell] == ABSENT and missing:
                continue  # nothing of the backward is there: said once
            if missing:
                yield Violation(
                    rank=index.dag.placement[stage],
                    action=f"{stage}{kind}{microbatch}",
                    what="the program lacks it",
                    remedy="add it: every stage computes every microbatch, forward and backward, once",
                )


def compute_order(index: DagIndex) -> Iterator[Violation]:
    """F before its backward, I before W, and stages of one rank in the order that data takes."""
    dag, microbatches = index.dag, index.dag.num_microbatches
    for cell, forward in enumerate(index.forward):
        stage = cell // microbatches
        if index.backward[cell] != ABSENT and index.backward[cell] < forward:
            yield _early(index, stage, index.backward[cell], forward)
        if index.weight[cell] != ABSENT and index.weight[cell] < index.backward[cell]:
            yield _early(index, stage, index.weight[cell], index.backward[cell])
    for early, late in dag.stage_edges:
        if dag.placement[early] != dag.placement[late]:
            continue
        for microbatch in range(microbatches):
            a, b = early * microbatches + microbatch, late * microbatches + microbatch
            for first, second in (
                (index.forward[a], index.forward[b]),
                (index.backward[b], index.backward[a]),
            ):
                if ABSENT not in (first, second) and second < first:
                    yield _early(index, early, second, first)


def _early(index: DagIndex, stage: int, position: int, needed: int) -> Violation:
    rank = index.dag.placement[stage]
    program = index.dag.programs[rank]
    return Violation(
        rank=rank,
        action=repr(program[position]),
        what=f"it stands at {position}, before {program[needed]!r} at {needed}, whose result it uses",
        remedy="move it behind",
    )


def transfers_present(index: DagIndex) -> Iterator[Violation]:
    """Four transfers for each stage edge between two ranks and each microbatch, and no others."""
    yield from index.misplaced_transfers
    dag = index.dag
    for slot in range(index.num_slots):
        edge, microbatch = divmod(slot, dag.num_microbatches)
        early, late = index.remote_edges[edge]
        here, there = dag.placement[early], dag.placement[late]
        for found, rank, text in (
            (
                (index.send_activation, here, f"{early}SEND_F{microbatch}->{late}@{there}"),
                (index.recv_activation, there, f"{late}RECV_F{microbatch}<-{early}@{here}"),
                (index.send_input_grad, there, f"{late}SEND_B{microbatch}->{early}@{here}"),
                (index.recv_input_grad, here, f"{early}RECV_B{microbatch}<-{late}@{there}"),
            )
            if _incomplete(index, slot)
            else ()
        ):
            if found[slot] == ABSENT:
                yield Violation(
                    rank=rank,
                    action=text,
                    what=f"the program lacks it, but stage {early} feeds stage {late} on another rank",
                    remedy="add it, as insert_transfers does",
                )


def _incomplete(index: DagIndex, slot: int) -> bool:
    return (
        index.send_activation[slot] == ABSENT
        or index.recv_activation[slot] == ABSENT
        or index.send_input_grad[slot] == ABSENT
        or index.recv_input_grad[slot] == ABSENT
    )


def transfer_positions(index: DagIndex) -> Iterator[Violation]:
    """A send after the compute that makes its value, a recv before the one that uses it."""
    dag = index.dag
    for edge, (early, late) in enumerate(index.remote_edges):
        for microbatch in range(dag.num_microbatches):
            slot = edge * dag.num_microbatches + microbatch
            a, b = early * dag.num_microbatches + microbatch, late * dag.num_microbatches + microbatch
            for stage, first, second in (
                (early, index.forward[a], index.send_activation[slot]),
                (late, index.recv_activation[slot], index.forward[b]),
                (late, index.backward[b], index.send_input_grad[slot]),
                (early, index.recv_input_grad[slot], index.backward[a]),
            ):
                if second < first and second != ABSENT:
                    yield _early(index, stage, second, first)


def messages_in_order(index: DagIndex) -> Iterator[Violation]:
    """Each pair of ranks: the receiver awaits the messages in the order in which they are sent."""
    dag = index.dag
    for pair in sorted({*index.sent, *index.received}):
        sent, received = index.sent.get(pair, []), index.received.get(pair, [])
        if sent == received:
            continue
        source, target = divmod(pair, dag.num_ranks)
        at = next(
            (i for i, (a, b) in enumerate(zip(sent, received, strict=False)) if a != b),
            min(len(sent), len(received)),
        )
        yield Violation(
            rank=target,
            action=_message(index, received, at),
            what=f"it is message {at} that rank {target} awaits from rank {source}, which sends "
            f"{_message(index, sent, at)} there",
            remedy="receive in the order of the sends: messages of a pair are first in, first out",
        )


def _message(index: DagIndex, codes: list[int], at: int) -> str:
    if at >= len(codes):
        return "nothing"
    back, slot = divmod(codes[at], index.num_slots)
    edge, microbatch = divmod(slot, index.dag.num_microbatches)
    early, late = index.remote_edges[edge]
    if back:
        return f"the gradient B{microbatch} of stage {late} for stage {early}"
    return f"the activation F{microbatch} of stage {early} for stage {late}"
