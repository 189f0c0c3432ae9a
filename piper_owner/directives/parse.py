"""The JSON of a schedule program, read directive by directive, so that an error can quote it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from piper_owner.directives.model import (
    MICROBATCH_TAG,
    PASS_TAG,
    Directive,
    Filter,
    Order,
    Pass,
    Place,
    Program,
    Replicate,
    Split,
    shorten,
)
from piper_owner.errors import DirectiveError

__all__ = ["MAX_NUMBER", "parse_program"]

MAX_NUMBER: Final = 2**31 - 1
"""The largest number that a directive may hold."""

_SPACE: Final = " \t\n\r"
_EXAMPLE: Final = '[{"op": "place", "filter": {}, "devices": [0]}]'
_FIELDS: Final = {
    "place": ("filter", "devices", "device", "stream"),
    "replicate": (
        "filter", "devices", "device", "reduce_stream", "gather_stream", "bucket_size", "shard_grads",
        "shard_params",
    ),
    "split": ("filter", "dim_name", "num_microbatches"),
    "order": ("filters",),
}  # fmt: skip
_REFUSED: Final = {
    "shard": "parameters are not sharded here; use \"place\" to spread regions over more devices, and "
    "\"replicate\" for data parallel copies of a region",
    "shard_tensor": "tensors are not split over devices here; use \"place\" to spread regions over more "
    "devices, and \"split\" for smaller microbatches",
}  # fmt: skip
_ZERO: Final = {
    "shard_grads": "gradients are not sharded over data parallel copies (ZeRO-2)",
    "shard_params": "parameters are not sharded over data parallel copies (ZeRO-3)",
}


@dataclass(frozen=True, slots=True)
class _Repeated:
    """An object in which a name stands twice."""

    name: str


@dataclass(frozen=True, slots=True)
class _Number:
    """A number that no field takes: a fraction, NaN, or one that is too large."""

    text: str


class _Wrong(Exception):
    """What is wrong with the directive at hand; becomes a DirectiveError that quotes it."""


def _object(pairs: list[tuple[str, Any]]) -> Any:  # noqa: ANN401
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        return _Repeated(next(name for name, _ in pairs if name in seen or seen.add(name)))  # type: ignore[func-returns-value]
    return value


def _integer(text: str) -> int | _Number:
    return int(text) if len(text) <= 11 else _Number(text)


_DECODER: Final = json.JSONDecoder(
    object_pairs_hook=_object, parse_int=_integer, parse_float=_Number, parse_constant=_Number
)


def parse_program(text: str, *, source: str = "program") -> Program:
    """The schedule program that the JSON `text` spells; `source` names it in errors. Pure.

    Only what a directive says by itself is checked here. Whether its filters pick something, and
    whether directives contradict each other, depends on the model: `lower_program` says so.

    Raises DirectiveError, with index and text of the directive, for anything that is no program:
    JSON that does not parse (with line and column), an unknown op or field, a wrong type, a name
    that stands twice, a number that is no integer of 0 to 2**31 - 1; and for ops and options that
    do not exist here (`shard`, `shard_tensor`, `shard_grads`, `shard_params`), with what to use
    instead.
    """
    text = text.removeprefix("\ufeff")
    if not text.strip():
        raise DirectiveError(f"{source}: it is empty; a program is a JSON array such as {_EXAMPLE}")
    if text.strip()[0] != "[":
        raise DirectiveError(
            f"{source}: a program is a JSON array of directives such as {_EXAMPLE}, but this starts with "
            f"{shorten(text.strip()[:40])}"
        )
    directives: list[Directive] = []
    filters: dict[object, Filter] = {}
    texts = []
    for index, (value, quoted) in enumerate(_elements(text, source)):
        try:
            directives.append(_directive(value, filters))
        except _Wrong as wrong:
            raise DirectiveError(f"{source}: directive[{index}] {shorten(quoted)}: {wrong}") from None
        texts.append(quoted)
    return Program(directives=tuple(directives), source=source, texts=tuple(texts))


def _elements(text: str, source: str) -> Iterable[tuple[Any, str]]:
    """Each value of the array that `text` is, and how it is spelled."""
    index = 0
    try:
        position = _skip(text, _skip(text, 0) + 1)
        if text[position : position + 1] != "]":
            while True:
                value, end = _DECODER.raw_decode(text, position)
                yield value, text[position:end]
                index += 1
                position = _skip(text, end)
                following = text[position : position + 1]
                if following == "]":
                    break
                if following != ",":
                    raise json.JSONDecodeError("Expecting ',' or ']'", text, position)
                position = _skip(text, position + 1)
        if _skip(text, position + 1) < len(text):
            raise json.JSONDecodeError("Extra data behind the array", text, _skip(text, position + 1))
    except json.JSONDecodeError as error:
        line = text[text.rfind("\n", 0, error.pos) + 1 : error.pos + 60].partition("\n")[0]
        raise DirectiveError(
            f"{source}: line {error.lineno}, column {error.colno}, near directive[{index}]: this is no JSON: "
            f"{error.msg}: {shorten(line) or 'end of the file'}"
        ) from None
    except RecursionError:
        raise DirectiveError(
            f"{source}: directive[{index}] is nested too deeply; a directive has at most an array of arrays "
            "of filters"
        ) from None


def _skip(text: str, position: int) -> int:
    while position < len(text) and text[position] in _SPACE:
        position += 1
    return position


def _directive(value: object, filters: dict[object, Filter]) -> Directive:
    fields = _checked_object(value, "a directive is a JSON object")
    if "op" not in fields:
        _wrong(f'it has no "op"; ops are {_list(_FIELDS)}')
    op = fields["op"]
    if not isinstance(op, str) or op not in _FIELDS:
        if isinstance(op, str) and op in _REFUSED:
            _wrong(f"{op} is not supported: {_REFUSED[op]}")
        _wrong(f'"op" is {_show(op)}; ops are {_list(_FIELDS)}')
    for name in fields:
        if name != "op" and name not in _FIELDS[op]:
            _wrong(f"{op} has no field {_show(name)}; its fields are {_list(_FIELDS[op])}")
    if op == "order":
        return Order(groups=_groups(fields, filters))
    if "filter" not in fields:
        _wrong(f'{op} needs a "filter"; an empty one, "filter": {{}}, picks every region')
    picked = _filter(fields["filter"], '"filter"', filters)
    match op:
        case "place":
            return Place(filter=picked, devices=_devices(op, fields), stream=_text(fields, "stream"))
        case "replicate":
            for option, reason in _ZERO.items():
                if _flag(fields, option):
                    _wrong(
                        f'"{option}" is not supported: {reason}; leave it out: replicate adds up whole '
                        'gradients. To hold less on a device, "place" regions on more of them'
                    )
            return Replicate(
                filter=picked,
                devices=_devices(op, fields),
                reduce_stream=_text(fields, "reduce_stream"),
                gather_stream=_text(fields, "gather_stream"),
                bucket_size=None
                if fields.get("bucket_size") is None
                else _number(fields["bucket_size"], '"bucket_size"', least=1),
            )
        case "split":
            return _split(fields, picked)
        case _:
            raise AssertionError(f"op {op} has no reader")


def _split(fields: Mapping[str, Any], picked: Filter) -> Split:
    if "num_microbatches" not in fields:
        _wrong('split needs "num_microbatches", the number of parts of the batch')
    name = _text(fields, "dim_name")
    if name == PASS_TAG:
        _wrong(f'"dim_name" is "{PASS_TAG}", which names passes; call the microbatches "{MICROBATCH_TAG}"')
    return Split(
        filter=picked,
        num_microbatches=_number(fields["num_microbatches"], '"num_microbatches"', least=1),
        dim_name=MICROBATCH_TAG if name is None else name,
    )


def _groups(fields: Mapping[str, Any], filters: dict[object, Filter]) -> tuple[tuple[Filter, ...], ...]:
    groups = fields.get("filters")
    form = 'order needs "filters", an array of at least two groups, each an array of filters'
    if not isinstance(groups, list):
        _wrong(form + ("" if groups is None else f", not {_show(groups)}"))
    read = []
    for at, group in enumerate(groups):
        if not isinstance(group, list) or not group:
            _wrong(f'group {at} of "filters" is {_show(group)}; a group is an array of at least one filter')
        read.append(tuple(_filter(value, f"a filter of group {at}", filters) for value in group))
    if len(read) < 2:
        _wrong(
            f"{form}; with {len(read)} group it orders nothing, for the filters of a group may interleave: "
            "write one group for each that comes later"
        )
    return tuple(read)


def _filter(value: object, what: str, filters: dict[object, Filter]) -> Filter:
    fields = _checked_object(value, f"{what} is a JSON object of tags")
    key = tuple(fields.items())
    try:
        known = filters.get((key, tuple(map(type, fields.values()))))
    except TypeError:  # an unhashable value: an array or object, which is refused below
        known = None
    if known is not None:
        return known
    part: Pass | None = None
    tags: list[tuple[str, int | None]] = []
    for name, index in fields.items():
        if name != PASS_TAG:
            if type(index) is not int or not 0 <= index <= MAX_NUMBER:
                index = None if index == "*" else _number(index, f"tag {_show(name)} of {what}")
            tags.append((name, index))
        elif index != "*":
            try:
                part = Pass(index)
            except ValueError:
                _wrong(f'"PASS" of {what} is {_show(index)}; passes are "F", "B", "BI", "BW", and "*"')
    made = Filter(tags=tuple(sorted(tags)), part=part)
    filters[key, tuple(map(type, fields.values()))] = made
    return made


def _devices(op: str, fields: Mapping[str, Any]) -> tuple[int, ...]:
    given = [name for name in ("devices", "device") if name in fields]
    if len(given) != 1:
        _wrong(
            f'{op} needs "devices", an array of device numbers'
            + (', once (it has "device" too)' if given else "")
        )
    value = fields[given[0]]
    numbers = value if isinstance(value, list) else [value]
    if not numbers:
        _wrong(f'"{given[0]}" is empty; name at least one device')
    devices = tuple(_number(number, f'"{given[0]}"') for number in numbers)
    if len(set(devices)) < len(devices):
        twice = next(device for at, device in enumerate(devices) if device in devices[:at])
        _wrong(f'"{given[0]}" lists device {twice} twice; every pipeline has a device of its own')
    return devices


def _number(value: object, what: str, *, least: int = 0) -> int:
    """An integer, or a string of its digits."""
    number = value
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 11:
        number = int(value)
    if type(number) is not int or not least <= number <= MAX_NUMBER:
        star = ' or "*"' if what.startswith("tag") else ""
        _wrong(f"{what} is {_show(value)}; give an integer of {least} to {MAX_NUMBER}{star}")
    return number


def _text(fields: Mapping[str, Any], name: str) -> str | None:
    value = fields.get(name)
    if value is not None and (not isinstance(value, str) or not value):
        _wrong(f'"{name}" is {_show(value)}; give a name, or leave it out')
    return value


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        _wrong(f'"{name}" is {_show(value)}; give true or false, or leave it out')
    return bool(value)


def _checked_object(value: object, form: str) -> Mapping[str, Any]:
    if isinstance(value, _Repeated):
        _wrong(f"the name {_show(value.name)} stands twice in one object; each name stands once")
    if not isinstance(value, dict):
        _wrong(f"{form}, not {_show(value)}")
    return value


def _wrong(what: str) -> NoReturn:
    raise _Wrong(what)


def _list(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names if name != "device")


def _show(value: object) -> str:
    """How JSON spells `value`, in a few words."""
    if isinstance(value, _Number):
        return f"the number {value.text if len(value.text) < 30 else value.text[:20] + '...'}"
    if isinstance(value, _Repeated):
        return "an object"
    kinds: tuple[tuple[type, Callable[[Any], str]], ...] = (
        (dict, lambda _: "an object"),
        (list, lambda items: "an array" if items else "an empty array"),
        (str, lambda text: f'"{shorten(text[:60])}"'),
        (bool, lambda flag: str(flag).lower()),
    )
    return next(
        (show(value) for kind, show in kinds if isinstance(value, kind)),
        "null" if value is None else str(value),
    )
