"""Schedule programs as JSON: what is read, and what is refused before any model is known."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper_owner.dag.nodes import parse_action
from piper_owner.directives import Program, format_program, lower_program, parse_program
from piper_owner.directives.model import Filter, Order, Pass, Place, Replicate, Split
from piper_owner.directives.parse import MAX_NUMBER
from piper_owner.errors import DirectiveError, InputError


def read(text: str) -> Program:
    return parse_program(text, source="s.json")


def one(**fields: object) -> str:
    return json.dumps([fields])


def test_every_field_is_read() -> None:
    program = read(
        """[
        {"op": "place", "filter": {"PP": 1, "EP": "*"}, "devices": [4, "7"], "stream": "pp"},
        {"op": "replicate", "filter": {}, "device": 3, "reduce_stream": "r", "gather_stream": "g",
         "bucket_size": 25, "shard_grads": false, "shard_params": null},
        {"op": "split", "filter": {}, "dim_name": "mb", "num_microbatches": "4"},
        {"op": "order", "filters": [[{"PP": "0", "MB": 0, "PASS": "F"}, {}], [{"PASS": "BI"}]]}
        ]"""
    )
    assert program.directives == (
        Place(filter=Filter(tags=(("EP", None), ("PP", 1))), devices=(4, 7), stream="pp"),
        Replicate(filter=Filter(), devices=(3,), reduce_stream="r", gather_stream="g", bucket_size=25),
        Split(filter=Filter(), num_microbatches=4, dim_name="mb"),
        Order(
            groups=(
                (Filter(tags=(("MB", 0), ("PP", 0)), part=Pass.FORWARD), Filter()),
                (Filter(part=Pass.BACKWARD_INPUT),),
            )
        ),
    )
    assert read(format_program(program)) == program


def test_optional_fields_may_be_missing_or_null() -> None:
    program = read(
        '[{"op":"place","filter":{"PP":0},"device":"2"},{"op":"split","filter":{},"num_microbatches":2,'
        '"dim_name":null}, {"op":"order","filters":[[{"PASS":"*"}],[{"PP":"*"}]]}]'
    )
    assert program.directives == (
        Place(filter=Filter(tags=(("PP", 0),)), devices=(2,)),
        Split(filter=Filter(), num_microbatches=2),
        Order(groups=((Filter(),), (Filter(tags=(("PP", None),)),))),
    )


def test_text_is_quoted_as_the_file_spells_it() -> None:
    program = read('[ {"op":"place",\n   "filter":{}, "devices":[0]} ]')
    assert program.quote(0) == 'directive[0] {"op":"place", "filter":{}, "devices":[0]}'
    long = read(one(op="order", filters=[[{"PP": number}] for number in range(999)]))
    assert long.quote(0).startswith('directive[0] {"op": "order", "filters": [[{"PP": 0}]')
    assert long.quote(0).endswith('[{"PP": 998}]]}')
    assert len(long.quote(0)) < 200


def test_program_without_a_file_is_quoted_from_its_directives() -> None:
    program = Program(directives=(Place(filter=Filter(), devices=(0,)),))
    assert program.quote(0) == 'directive[0] {"op": "place", "filter": {}, "devices": [0]}'


DIRECTIVE_ERRORS = [
    ("1", "a directive is a JSON object, not 1"),
    ("[]", "a directive is a JSON object, not an empty array"),
    ("null", "not null"),
    ("{}", 'has no "op"; ops are "place", "replicate", "split", "order"'),
    ('{"op":"plcae"}', '"op" is "plcae"; ops are "place"'),
    ('{"op":7}', '"op" is 7'),
    ('{"op":["place"]}', '"op" is an array'),
    ('{"op":"shard","filter":{},"devices":[0]}', 'shard is not supported: parameters are not sharded here'),
    ('{"op":"shard_tensor"}', "shard_tensor is not supported: tensors are not split over devices here; use"),
    (
        '{"op":"replicate","filter":{},"devices":[0],"shard_grads":true}',
        '"shard_grads" is not supported: gradients are not sharded over data parallel copies (ZeRO-2); leave',
    ),
    (
        '{"op":"replicate","filter":{},"devices":[0],"shard_params":true}',
        '"shard_params" is not supported: parameters are not sharded over data parallel copies (ZeRO-3)',
    ),
    ('{"op":"replicate","filter":{},"devices":[0],"shard_grads":1}', '"shard_grads" is 1; give true or'),
    ('{"op":"place","filter":{},"devices":[0],"gather_stream":"x"}', 'place has no field "gather_stream"'),
    ('{"op":"replicate","filter":{},"devices":[0],"stream":"x"}', 'replicate has no field "stream"'),
    ('{"op":"split","filter":{},"num_microbatches":2,"mb":1}', 'split has no field "mb"; its fields are'),
    ('{"op":"place","devices":[0]}', 'place needs a "filter"; an empty one'),
    ('{"op":"place","filter":{}}', 'place needs "devices", an array of device numbers'),
    ('{"op":"place","filter":{},"devices":[0],"device":0}', 'once (it has "device" too)'),
    ('{"op":"place","filter":{},"devices":[]}', '"devices" is empty'),
    ('{"op":"place","filter":{},"devices":[3,3]}', '"devices" lists device 3 twice'),
    ('{"op":"place","filter":{},"devices":null}', '"devices" is null; give an integer'),
    ('{"op":"place","filter":{},"devices":[true]}', '"devices" is true; give an integer of 0 to 2147483647'),
    ('{"op":"place","filter":{},"devices":[1.0]}', '"devices" is the number 1.0'),
    ('{"op":"place","filter":{},"devices":[NaN]}', '"devices" is the number NaN'),
    ('{"op":"place","filter":{},"devices":[-Infinity]}', '"devices" is the number -Infinity'),
    ('{"op":"place","filter":{},"devices":[-1]}', '"devices" is -1'),
    ('{"op":"place","filter":{},"devices":["-1"]}', '"devices" is "-1"'),
    ('{"op":"place","filter":{},"devices":["x"]}', '"devices" is "x"'),
    (f'{{"op":"place","filter":{{}},"devices":[{MAX_NUMBER + 1}]}}', '"devices" is 2147483648'),
    (f'{{"op":"place","filter":{{}},"devices":[{"9" * 5000}]}}', "is the number 99999999999999999999..."),
    ('{"op":"place","filter":{},"devices":[0],"stream":3}', '"stream" is 3; give a name'),
    ('{"op":"place","filter":[],"devices":[0]}', '"filter" is a JSON object of tags, not an empty array'),
    ('{"op":"place","filter":{"PP":true},"devices":[0]}', 'tag "PP" of "filter" is true; give an integer'),
    ('{"op":"place","filter":{"PP":null},"devices":[0]}', 'tag "PP" of "filter" is null; give an integer'),
    ('{"op":"place","filter":{"PP":[1]},"devices":[0]}', 'tag "PP" of "filter" is an array'),
    ('{"op":"place","filter":{"PP":{"a":1,"a":1}},"devices":[0]}', 'tag "PP" of "filter" is an object'),
    ('{"op":"place","filter":{"PP":"one"},"devices":[0]}', 'is "one"; give an integer of 0 to 2147483647 or'),
    ('{"op":"place","filter":{"PP":1,"PP":1},"devices":[0]}', 'the name "PP" stands twice in one object'),
    ('{"op":"place","op":"place","filter":{},"devices":[0]}', 'the name "op" stands twice'),
    ('{"op":"replicate","filter":{},"devices":[0],"bucket_size":0}', '"bucket_size" is 0; give an integer'),
    ('{"op":"split","filter":{}}', 'split needs "num_microbatches"'),
    ('{"op":"split","filter":{},"num_microbatches":0}', '"num_microbatches" is 0; give an integer of 1'),
    ('{"op":"split","filter":{},"num_microbatches":2,"dim_name":""}', '"dim_name" is ""; give a name'),
    ('{"op":"split","filter":{},"num_microbatches":2,"dim_name":"PASS"}', 'which names passes'),
    ('{"op":"order"}', 'order needs "filters", an array of at least two groups'),
    ('{"op":"order","filters":{}}', "of at least two groups, each an array of filters, not an object"),
    ('{"op":"order","filters":[]}', "with 0 group it orders nothing"),
    ('{"op":"order","filters":[[{},{}]]}', "with 1 group it orders nothing"),
    ('{"op":"order","filters":[[{}],[]]}', 'group 1 of "filters" is an empty array; a group is'),
    ('{"op":"order","filters":[{},{}]}', 'group 0 of "filters" is an object'),
    ('{"op":"order","filters":[[{}],[3]]}', "a filter of group 1 is a JSON object of tags, not 3"),
    ('{"op":"order","filters":[[{}],[{"PASS":"FWD"}]]}', 'passes are "F", "B", "BI", "BW", and "*"'),
    ('{"op":"order","filters":[[{}],[{"PASS":["F"]}]]}', '"PASS" of a filter of group 1 is an array'),
    ('{"op":"order","filters":[[{}],[{"PASS":0}]]}', '"PASS" of a filter of group 1 is 0'),
]  # fmt: skip


@pytest.mark.parametrize(("directive", "words"), DIRECTIVE_ERRORS)
def test_wrong_directive_is_refused_with_index_and_text(directive: str, words: str) -> None:
    good = '{"op":"place","filter":{},"devices":[0]}'
    with pytest.raises(DirectiveError) as raised:
        read(f"[{good},\n {directive}]")
    message = str(raised.value)
    assert message.startswith(f"s.json: directive[1] {directive[:100]}")
    assert words in message
    assert "\n" not in message
    assert len(message) < 600


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it is empty; a program is a JSON array"),
        (" \n\t", "it is empty"),
        ("\ufeff", "it is empty"),
        ("{}", "a program is a JSON array of directives"),
        ('"place"', "a program is a JSON array of directives"),
        ("null", "a program is a JSON array of directives"),
        ("[", "line 1, column 2, near directive[0]: this is no JSON: Expecting value"),
        ('[\n{"op":"place","filter":{},"device":0},\n  {]', "line 3, column 4, near directive[1]"),
        ('[{"op"', "line 1, column 7, near directive[0]"),
        ('[{"op":"x}]', "Unterminated string"),
        ('[{"op":"\\x"}]', "Invalid \\escape"),
        ("[{'op':1}]", "Expecting property name"),
        ('[{"op":"place","filter":{},"devices":[0]},]', "line 1, column 43, near directive[1]"),
        ('[{"op":"place","filter":{},"devices":[0]} 7]', "line 1, column 43, near directive[1]"),
        ('[{"op":"place","filter":{},"devices":[0]}', "Expecting ',' or ']': "),
        ("[] x", "line 1, column 4, near directive[0]: this is no JSON: Extra data behind the array"),
        ("[" * 100_000, "directive[0] is nested too deeply"),
        ('[{"a":' * 100_000, "directive[0] is nested too deeply"),
    ],
)
def test_text_that_is_no_array_is_refused_in_one_line(text: str, words: str) -> None:
    with pytest.raises(DirectiveError) as raised:
        read(text)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_directive_error_is_bad_input() -> None:
    assert issubclass(DirectiveError, InputError)
    assert issubclass(DirectiveError, ValueError)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["place", "split", "order", "replicate", "shard", "*", "F", "BI", "MB", "PP", 0, 1]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["op", "filter", "filters", "devices", "num_microbatches", "PP", "PASS"])
            | st.text(),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@given(JSON | st.lists(JSON))
def test_any_json_is_a_program_or_refused(value: object) -> None:
    try:
        program = parse_program(json.dumps(value))
    except DirectiveError:
        return
    assert parse_program(format_program(program)) == program


@given(st.text(alphabet='[]{}":, \n\\0129eE.-+nulltruefals', max_size=60))
def test_any_text_is_a_program_or_refused(text: str) -> None:
    with contextlib.suppress(DirectiveError):
        parse_program("[" + text)


def test_examples_of_the_reference_are_read_and_errors_are_as_it_shows() -> None:
    text = (Path(__file__).resolve().parent.parent / "docs" / "directives.md").read_text(encoding="ascii")
    blocks = re.findall(r"```json\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) == 5
    first = read(blocks[0])
    result = lower_program(first, tags=[{"PP": 0}, {"PP": 1}], stage_edges=[(0, 1)], buckets=())
    assert result.dag.programs[0] == tuple(map(parse_action, ["0F0", "0F1", "0B0", "0B1"]))
    ops = [type(directive) for block in blocks[1:] for directive in read(f"[{block}]").directives]
    assert ops == [Place, Place, Replicate, Split, Order]
    places = [{"op": "place", "filter": {"PP": 0}, "devices": [device]} for device in (0, 1)]
    twice = parse_program(json.dumps(places), source="schedule.json")
    with pytest.raises(DirectiveError) as raised:
        lower_program(twice, tags=[{"PP": 0}], stage_edges=[], buckets=())
    assert str(raised.value) in " ".join(text.split())
