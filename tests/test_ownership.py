"""Ownership plans: who owns, who holds, what is refused, and that order does not matter."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import pytest
from dag_cases import Case, cases
from hypothesis import given, settings
from hypothesis import strategies as st

from piper_owner.errors import ConfigError, TieError
from piper_owner.ownership import (
    Holder,
    Layout,
    LayoutChoice,
    OwnerChoice,
    OwnershipPlan,
    ParameterUse,
    Tie,
    Use,
    elect_owner,
    plan_ownership,
)

EMBED, HEAD = "embed.weight", "lm_head.weight"


def _use(name: str, rank: int, stage: int | None = None, **changes: Any) -> ParameterUse:  # noqa: ANN401
    values: dict[str, Any] = {"shape": (8, 2), "dtype": "float32", **changes}
    return ParameterUse(name=name, rank=rank, stage=rank if stage is None else stage, **values)


def _plan(*uses: ParameterUse, owner: Any = "auto", world_size: int = 4) -> OwnershipPlan:  # noqa: ANN401
    return plan_ownership([(EMBED, HEAD)], uses, world_size=world_size, owner=owner)


class TestTie:
    def test_the_first_name_is_canonical(self) -> None:
        tie = Tie([EMBED, HEAD])  # type: ignore[arg-type]
        assert tie.names == (EMBED, HEAD)
        assert tie.name == EMBED
        assert hash(tie) == hash(Tie((EMBED, HEAD)))

    @pytest.mark.parametrize(
        ("names", "message"),
        [
            ((), "at least one parameter name"),
            ((EMBED, EMBED), r"each name once; repeated in \('embed.weight', 'embed.weight'\)"),
            ((EMBED, ""), "made of parameter names, not ''"),
            ((EMBED, 3), "made of parameter names, not 3"),
            (EMBED, "give a tuple of names"),
        ],
    )
    def test_what_is_no_tie_is_refused(self, names: Any, message: str) -> None:  # noqa: ANN401
        with pytest.raises(TieError, match=message):
            Tie(names)


class TestElectOwner:
    TIE = Tie((EMBED, HEAD))
    HOLDERS = (
        Holder(rank=1, stages=(2,), names=(HEAD,), use=Use.DENSE),
        Holder(rank=3, stages=(0, 5), names=(EMBED,), use=Use.LOOKUP),
    )

    @pytest.mark.parametrize(("choice", "rank"), [("auto", 3), ("first", 3), ("last", 1), (1, 1), (3, 3)])
    def test_choices(self, choice: OwnerChoice, rank: int) -> None:
        assert elect_owner(self.TIE, self.HOLDERS, choice) == rank
        assert elect_owner(self.TIE, self.HOLDERS[::-1], choice) == rank

    def test_the_lowest_rank_wins_between_equal_stages(self) -> None:
        holders = [dataclasses.replace(holder, stages=(0,)) for holder in self.HOLDERS]
        assert elect_owner(self.TIE, holders) == 1

    def test_a_rank_that_holds_nothing_cannot_own(self) -> None:
        with pytest.raises(ConfigError, match=r"rank 2 cannot own 'embed.weight'.*one of the ranks \[1, 3\]"):
            elect_owner(self.TIE, self.HOLDERS, 2)

    @pytest.mark.parametrize("choice", ["middle", None, True, 1.0])
    def test_no_other_word_is_a_choice(self, choice: Any) -> None:  # noqa: ANN401
        with pytest.raises(ConfigError, match="choose one of auto, first, last, or a rank"):
            elect_owner(self.TIE, self.HOLDERS, choice)


class TestPlan:
    def test_the_earliest_stage_owns_and_the_other_is_a_replica(self) -> None:
        plan = _plan(_use(EMBED, 0, use=Use.LOOKUP), _use(HEAD, 3))
        tie = plan[EMBED]
        assert (tie.owner, tie.ranks, tie.replicas, tie.source) == (0, (0, 3), (3,), 0)
        assert (tie.shape, tie.dtype, tie.requires_grad) == ((8, 2), "float32", True)
        assert tie.holder(0).use is Use.LOOKUP
        assert tie.holder(3) == Holder(rank=3, stages=(3,), names=(HEAD,), use=Use.DENSE, layout=Layout.DENSE)
        assert plan.pairs == ((0, 3),)
        with pytest.raises(KeyError):
            tie.holder(1)
        with pytest.raises(KeyError):
            plan[HEAD]

    def test_ranks_outside_the_tie_hold_nothing(self) -> None:
        plan = _plan(_use(EMBED, 0), _use(HEAD, 3))
        assert [len(plan.held_by(rank)) for rank in range(4)] == [1, 0, 0, 1]

    def test_uses_on_one_rank_are_one_holder(self) -> None:
        plan = _plan(_use(EMBED, 0, 0, use=Use.LOOKUP), _use(HEAD, 0, 3))
        (holder,) = plan[EMBED].holders
        assert (holder.stages, holder.names, holder.use) == ((0, 3), (EMBED, HEAD), Use.DENSE)
        assert plan[EMBED].replicas == ()
        assert plan.pairs == ()

    def test_a_holder_looks_up_only_if_all_its_uses_do(self) -> None:
        lookups = [_use(EMBED, 0, 0, use=Use.LOOKUP), _use(HEAD, 0, 3, use=Use.LOOKUP)]
        assert _plan(*lookups)[EMBED].holder(0).use is Use.LOOKUP
        assert _plan(*lookups, _use(EMBED, 0, 2))[EMBED].holder(0).use is Use.DENSE

    def test_the_value_comes_from_the_canonical_name_whoever_owns(self) -> None:
        plan = _plan(_use(EMBED, 3), _use(HEAD, 0))
        assert (plan[EMBED].owner, plan[EMBED].source) == (0, 3)

    def test_the_owner_is_chosen_for_all_ties_or_by_name(self) -> None:
        uses = [_use("a", 0), _use("b", 1), _use("c", 1), _use("d", 2)]
        ties = [("c", "d"), ("a", "b")]
        plan = plan_ownership(ties, uses, world_size=3, owner="last")
        assert [(tie.name, tie.owner) for tie in plan.ties] == [("a", 1), ("c", 2)]
        plan = plan_ownership(ties, uses, world_size=3, owner={"c": 2})
        assert [(tie.name, tie.owner) for tie in plan.ties] == [("a", 0), ("c", 2)]
        assert plan.pairs == ((0, 1), (1, 2))

    @pytest.mark.parametrize(
        ("owner", "layout", "reason"),
        [
            ("auto", "dense", "of the stages that use it 0 is the earliest, where transfers can hide"),
            ("auto", "rows", "it uses all of it, and the others look up a few rows only"),
            ("last", "dense", "asked for, as the holder of 'lm_head.weight'"),
            (3, "dense", "asked for by its rank"),
        ],
    )
    def test_the_plan_says_why_and_is_equal_without(
        self, owner: OwnerChoice, layout: LayoutChoice, reason: str
    ) -> None:
        uses = [_use(EMBED, 0, use=Use.LOOKUP), _use(HEAD, 3)]
        plan = plan_ownership([(EMBED, HEAD)], uses, world_size=4, owner=owner, layout=layout)
        assert plan[EMBED].reason == reason
        silent = dataclasses.replace(plan, ties=(dataclasses.replace(plan[EMBED], reason=""),))
        assert silent == plan
        assert silent.digest == plan.digest
        assert "reason" not in plan[EMBED].to_dict()

    def test_five_holders(self) -> None:
        names = [f"w{i}" for i in range(5)]
        plan = plan_ownership([names], [_use(name, i) for i, name in enumerate(names)], world_size=5, owner=2)
        assert plan["w0"].replicas == (0, 1, 3, 4)
        assert plan.pairs == ((0, 2), (1, 2), (2, 3), (2, 4))

    def test_parameters_outside_ties_are_ignored(self) -> None:
        assert _plan(_use(EMBED, 0), _use(HEAD, 1), _use("other", 2)) == _plan(_use(EMBED, 0), _use(HEAD, 1))

    def test_no_ties_is_a_plan_too(self) -> None:
        plan = plan_ownership([], [], world_size=2)
        assert (plan.ties, plan.pairs, plan.held_by(0)) == ((), (), ())


class TestErrors:
    def test_an_unknown_name_suggests_the_nearest(self) -> None:
        with pytest.raises(
            TieError, match=r"no stage holds 'lm_head.weight'.*did you mean 'lm_head.weights'"
        ):
            _plan(_use(EMBED, 0), _use("lm_head.weights", 1))
        with pytest.raises(TieError, match=r"no stage holds 'zz'.*the names are \['embed.weight'\]"):
            plan_ownership([(EMBED, "zz")], [_use(EMBED, 0)], world_size=2)

    def test_a_name_in_two_ties(self) -> None:
        with pytest.raises(TieError, match=r"'lm_head.weight' stands in two ties"):
            plan_ownership(
                [(EMBED, HEAD), (HEAD, "x")], [_use(EMBED, 0), _use(HEAD, 1), _use("x", 1)], world_size=2
            )

    @pytest.mark.parametrize(
        ("what", "here", "there"),
        [("shape", (8, 2), (2, 8)), ("dtype", "float32", "bfloat16"), ("requires_grad", True, False)],
    )
    def test_unlike_partners_name_both_sides(self, what: str, here: Any, there: Any) -> None:  # noqa: ANN401
        with pytest.raises(TieError) as error:
            _plan(_use(EMBED, 0, **{what: here}), _use(HEAD, 3, 7, **{what: there}))
        for part in (what, str(here), str(there), EMBED, HEAD, "rank 0", "rank 3", "stage 7"):
            assert part in str(error.value)

    @pytest.mark.parametrize("rank", [-1, 4])
    def test_a_rank_out_of_range(self, rank: int) -> None:
        with pytest.raises(ConfigError, match=rf"'embed.weight' of stage 5 is placed on rank {rank}.*0 to 3"):
            _plan(_use(EMBED, rank, 5), _use(HEAD, 0))

    def test_a_world_without_ranks(self) -> None:
        with pytest.raises(ConfigError, match="at least one rank"):
            _plan(world_size=0)

    def test_an_owner_that_holds_nothing(self) -> None:
        with pytest.raises(ConfigError, match=r"rank 2 cannot own 'embed.weight'"):
            _plan(_use(EMBED, 0), _use(HEAD, 3), owner=2)

    def test_an_owner_for_a_tie_that_does_not_exist(self) -> None:
        with pytest.raises(ConfigError, match=r"\['lm_head.weight'\], which no tie has as its first name"):
            _plan(_use(EMBED, 0), _use(HEAD, 3), owner={HEAD: 0})


class TestDigest:
    def test_it_is_json_all_the_way(self) -> None:
        plan = _plan(_use(EMBED, 0, use=Use.LOOKUP), _use(HEAD, 3))
        written = json.loads(json.dumps(plan.to_dict()))
        assert written["world_size"] == 4
        assert written["ties"][0]["holders"][0] == {
            "rank": 0,
            "stages": [0],
            "names": [EMBED],
            "use": "lookup",
            "layout": "dense",
        }

    def test_it_is_the_same_in_every_process(self) -> None:
        digest = _plan(_use(EMBED, 0, use=Use.LOOKUP), _use(HEAD, 3)).digest
        assert digest == "0de014563a04787843e4686f03a3c9bf"

    @pytest.mark.parametrize(
        "change",
        [
            {"shape": (8, 3)},
            {"dtype": "float64"},
            {"requires_grad": False},
        ],
    )
    def test_every_part_of_a_parameter_counts(self, change: dict[str, Any]) -> None:
        base = _plan(_use(EMBED, 0), _use(HEAD, 3))
        other = _plan(_use(EMBED, 0, **change), _use(HEAD, 3, **change))
        assert base.digest != other.digest

    def test_owner_stage_use_names_and_world_count(self) -> None:
        uses = (_use(EMBED, 0), _use(HEAD, 3))
        plans = [
            _plan(*uses),
            _plan(*uses, owner="last"),
            _plan(*uses, world_size=5),
            _plan(_use(EMBED, 0, use=Use.LOOKUP), uses[1]),
            _plan(_use(EMBED, 0, 1), uses[1]),
            plan_ownership([(HEAD, EMBED)], uses, world_size=4, owner=0),
        ]
        assert len({plan.digest for plan in plans}) == len(plans)
        assert _plan(*uses).digest == plans[0].digest


@settings(max_examples=100, deadline=None)
@given(cases(), st.randoms(use_true_random=False))
def test_the_order_of_ties_and_uses_does_not_matter(case: Case, shuffler: random.Random) -> None:
    uses = [
        _use(name, holder.rank, int(name.rpartition("stage")[2]), use=holder.use)
        for tie in case.plan.ties
        for holder in tie.holders
        for name in holder.names
    ]
    ties = [tie.tie for tie in case.plan.ties]
    owners: dict[str, OwnerChoice] = {tie.name: tie.owner for tie in case.plan.ties}
    layouts: dict[str, LayoutChoice] = {
        tie.name: "rows" if tie.row_replicas else "dense" for tie in case.plan.ties
    }
    shuffler.shuffle(uses)
    shuffler.shuffle(ties)
    again = plan_ownership(ties, [*uses, *uses[:1]], world_size=case.num_ranks, owner=owners, layout=layouts)
    assert again == case.plan
    assert again.digest == case.plan.digest


@settings(max_examples=100, deadline=None)
@given(cases())
def test_a_plan_is_sorted_and_every_tie_has_one_owner(case: Case) -> None:
    plan = case.plan
    assert [tie.name for tie in plan.ties] == sorted(tie.name for tie in plan.ties)
    for tie in plan.ties:
        assert tie.ranks == tuple(sorted(set(tie.ranks)))
        assert sorted([tie.owner, *tie.replicas]) == list(tie.ranks)
        assert tie.source in tie.ranks
        assert tie.name in tie.holder(tie.source).names
        assert sorted(name for holder in tie.holders for name in holder.names) == sorted(tie.tie.names)
        for replica in tie.replicas:
            assert (min(tie.owner, replica), max(tie.owner, replica)) in plan.pairs
