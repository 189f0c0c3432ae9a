"""Actions: their text form, and what they refuse."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper_owner.dag.nodes import (
    Action,
    BucketStep,
    Collective,
    CollectiveKind,
    Compute,
    ComputeKind,
    Sync,
    SyncKind,
    Transfer,
    TransferKind,
    parse_action,
)
from piper_owner.errors import DagParseError

_SMALL = st.integers(0, 10**6)
_NAME = st.text(min_size=1, max_size=12)


def _sync(kind: SyncKind, bucket: str, peer: int) -> Sync:
    return Sync(kind=kind, bucket=bucket, peer=None if kind is SyncKind.OWNER_STEP else peer)


def _collective(kind: CollectiveKind, ranks: set[int], bucket: str) -> Collective:
    name = None if kind is CollectiveKind.CLIP else bucket
    return Collective(kind=kind, ranks=tuple(sorted(ranks)), bucket=name)


ACTIONS: st.SearchStrategy[Action] = st.one_of(
    st.builds(Compute, kind=st.sampled_from(ComputeKind), stage=_SMALL, microbatch=_SMALL),
    st.builds(
        Transfer,
        kind=st.sampled_from(TransferKind),
        stage=_SMALL,
        microbatch=_SMALL,
        peer_stage=_SMALL,
        peer=_SMALL,
    ),
    st.builds(BucketStep, bucket=_NAME),
    st.builds(_sync, st.sampled_from(SyncKind), _NAME, _SMALL),
    st.builds(_collective, st.sampled_from(CollectiveKind), st.sets(_SMALL, min_size=1, max_size=5), _NAME),
)


@given(ACTIONS)
def test_the_repr_of_an_action_parses_back(action: Action) -> None:
    text = repr(action)
    assert text.isascii()
    assert not any(character.isspace() for character in text)
    assert parse_action(text) == action


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2F0", Compute(kind=ComputeKind.FORWARD, stage=2, microbatch=0)),
        ("3W11", Compute(kind=ComputeKind.BACKWARD_WEIGHT, stage=3, microbatch=11)),
        (
            "0SEND_F2->1@3",
            Transfer(kind=TransferKind.SEND_ACTIVATION, stage=0, microbatch=2, peer_stage=1, peer=3),
        ),
        (
            "0RECV_B2<-1@3",
            Transfer(kind=TransferKind.RECV_INPUT_GRAD, stage=0, microbatch=2, peer_stage=1, peer=3),
        ),
        ("STEP[stage0]", BucketStep(bucket="stage0")),
        ("SEND_GRAD[embed.weight]->0", Sync(kind=SyncKind.SEND_GRAD, bucket="embed.weight", peer=0)),
        ("OWNER_STEP[a%20b]", Sync(kind=SyncKind.OWNER_STEP, bucket="a b")),
        ("ALL_REDUCE[w]{0,3}", Collective(kind=CollectiveKind.ALL_REDUCE, ranks=(0, 3), bucket="w")),
        ("CLIP{0,1}", Collective(kind=CollectiveKind.CLIP, ranks=(0, 1))),
    ],
)
def test_text_forms(text: str, action: Action) -> None:
    assert repr(action) == text
    assert parse_action(text) == action


@pytest.mark.parametrize(
    "text",
    [
        "",
        "2F",
        "2X0",
        "-1F0",
        "02F0",
        " 2F0",
        "2F0 ",
        "0SEND_F2<-1@3",
        "0RECV_F2->1@3",
        "0SEND_F2->1",
        "STEP[]",
        "STEP[a b]",
        "STEP[a%2]",
        "SEND_GRAD[w]<-0",
        "OWNER_STEP[w]->0",
        "ALL_REDUCE{0,1}",
        "CLIP[w]{0,1}",
        "CLIP{1,0}",
        "CLIP{}",
        "\u0663F0",
    ],
)
def test_what_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(DagParseError):
        parse_action(text)


def test_the_error_quotes_the_text_and_shows_how_actions_look() -> None:
    with pytest.raises(DagParseError, match=r"'2Q0' is no action; actions look like 2F0"):
        parse_action("2Q0")


def test_an_owner_step_has_no_peer_and_every_other_sync_has_one() -> None:
    with pytest.raises(DagParseError, match="takes no peer"):
        Sync(kind=SyncKind.OWNER_STEP, bucket="w", peer=1)
    with pytest.raises(DagParseError, match="every other sync node takes one"):
        Sync(kind=SyncKind.SEND_GRAD, bucket="w")


@pytest.mark.parametrize("ranks", [(), (1, 0), (0, 0)])
def test_the_ranks_of_a_collective_ascend(ranks: tuple[int, ...]) -> None:
    with pytest.raises(DagParseError, match="ascend"):
        Collective(kind=CollectiveKind.CLIP, ranks=ranks)


def test_an_all_reduce_names_its_bucket_and_a_clip_names_none() -> None:
    with pytest.raises(DagParseError, match="names the bucket"):
        Collective(kind=CollectiveKind.ALL_REDUCE, ranks=(0, 1))
    with pytest.raises(DagParseError, match="a clip names none"):
        Collective(kind=CollectiveKind.CLIP, ranks=(0, 1), bucket="w")


def test_actions_are_values() -> None:
    first = Compute(kind=ComputeKind.FORWARD, stage=1, microbatch=2)
    assert first == parse_action("1F2")
    assert len({first, parse_action("1F2"), parse_action("1B2")}) == 2
    with pytest.raises(AttributeError):
        first.stage = 3  # type: ignore[misc]
