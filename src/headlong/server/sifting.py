"""Sorts a body's fields before its schema reads it: what is honoured stays, under the schema's own names, and what has
no effect is noted and left out.

One rule for all dialects. A field that would change the answer and is not supported is refused with the reason; so is
one that looks like a known name misspelt. Other unknown fields are left out and noted, or refused where the settings
or the schema want that. Null asks for nothing, whatever the field. What belongs to a schema is read from the schema
and its `rules`; knows no endpoint, and reads nothing inside values that are the client's own, such as JSON schemas.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from annotated_types import MaxLen
from pydantic import AliasChoices, BaseModel, Discriminator

from headlong.server.errors import ApiError
from headlong.server.schemas.base import Strict
from headlong.server.schemas.rules import Renamed, Rule, Unsupported, WithoutEffect
from headlong.server.spelling import nearest

MAX_OBJECTS = 30_000
"""The most JSON objects of a body that schemas may concern."""
MAX_FIELDS = 1000
"""The most fields of one such object, unknown ones included."""
MAX_NOTED = 32
"""The most distinct names of each kind that are remembered; the others are counted."""
MAX_COMPARED = 8
"""The most distinct unknown names of one body that are compared with the known ones."""
MAX_NAME_CHARS = 64
Where = tuple[str | int, ...]


@dataclass(frozen=True)
class Shape:
    """Which schemas a value may have: `choose` finds that of an object, `items` is the shape of a list's entries."""

    choose: Callable[[dict[str, Any]], type[Strict] | None]
    items: "Shape | None"


@dataclass
class Noted:
    """Places of fields, without list indices, in the order in which they came."""

    places: list[str] = field(default_factory=list)
    more: int = 0
    """How many fields there were beyond those that `places` has room for."""

    def add(self, place: str) -> bool:
        """Notes a place; returns whether it is new."""
        if place in self.places:
            return False
        if len(self.places) >= MAX_NOTED:
            self.more += 1
            return False
        self.places.append(place)
        return True


@dataclass
class Sifted:
    """A body without the fields that were left out, and the names of those."""

    body: Any = None
    ignored: Noted = field(default_factory=Noted)
    """Known fields without effect here."""
    unknown: Noted = field(default_factory=Noted)
    renamed: dict[str, str] = field(default_factory=dict)
    """The body's own fields that were sent under another server's name, and that name."""


def sift(body: Any, schema: type[BaseModel], *, strict: bool = False) -> Sifted:
    """`strict` refuses fields that nobody has classified. Raises the ApiError to answer with."""
    sieve = _Sieve(strict)
    sifted = sieve.sifted
    sifted.body = (
        sieve.take(body, schema, (), "") if isinstance(body, dict) and issubclass(schema, Strict) else body
    )
    return sifted


class _Sieve:
    def __init__(self, strict: bool) -> None:
        self.sifted = Sifted()
        self._strict = strict
        self._objects = 0
        self._compared = 0

    def take(self, given: dict[str, Any], schema: type[Strict], where: Where, place: str) -> dict[str, Any]:
        self._objects += 1
        if self._objects > MAX_OBJECTS:
            raise ApiError(400, f"body: has more than {MAX_OBJECTS} objects; send less", code="invalid_value")
        if len(given) > MAX_FIELDS:
            raise _too_many(where, len(given), MAX_FIELDS, "fields")
        fields, rules, kept = fields_of(schema), rules_of(schema), {}
        most = most_of(schema)
        others: list[tuple[str, dict[str, Any]]] = []
        for name, value in given.items():
            if value is None:
                continue
            if name in fields:
                if isinstance(value, list | dict) and len(value) > most.get(name, math.inf):
                    raise _too_many((*where, name), len(value), most[name], "entries")
                shape = fields[name]
                kept[name] = value if shape is None else self._inside(value, shape, (*where, name), place)
            elif isinstance(rule := rules.get(name), Renamed):
                others.append((name, dict(rule.fields(value))))
            elif name in rules:
                self._apply(rules[name], name, value, where, place)
            else:
                self._unknown(name, schema, where, place)
        self._rename(others, kept, where)
        return kept

    def _rename(self, others: list[tuple[str, dict[str, Any]]], kept: dict[str, Any], where: Where) -> None:
        """Keeps what was sent under other names, unless it contradicts what else was sent."""
        names: dict[str, str] = {}
        for name, values in others:
            for one, value in values.items():
                if one in kept and kept[one] != value:
                    path, told = path_of((*where, name)), names.get(one, one)
                    raise ApiError(
                        400,
                        f"{path}: contradicts {told}; both say {one}; send one of them",
                        param=path,
                        code="invalid_value",
                    )
                kept[one] = value
                names.setdefault(one, name)
        if not where:
            self.sifted.renamed.update(names)

    def _inside(self, value: Any, shape: Shape, where: Where, place: str) -> Any:
        inner = f"{place}.{where[-1]}" if place else str(where[-1])
        return self._value(value, shape, where, inner)

    def _value(self, value: Any, shape: Shape, where: Where, place: str) -> Any:
        if isinstance(value, dict):
            schema = shape.choose(value)
            return value if schema is None else self.take(value, schema, where, place)
        if isinstance(value, list) and shape.items is not None:
            items, inner = shape.items, f"{place}[]"
            return [self._value(one, items, (*where, index), inner) for index, one in enumerate(value)]
        return value

    def _apply(self, rule: Rule, name: str, value: Any, where: Where, place: str) -> None:
        if isinstance(rule, Unsupported) and not rule.allows(value):
            path = path_of((*where, name))
            raise ApiError(
                400,
                f"{path}: {rule.why}",
                param=path,
                code="unsupported_parameter",
                details=rule.details,
            )
        self.sifted.ignored.add(f"{place}.{name}" if place else name)

    def _unknown(self, name: str, schema: type[Strict], where: Where, place: str) -> None:
        if self._strict or schema.closed:
            raise _unknown_field(name, schema, where)
        unknown = self.sifted.unknown
        if len(unknown.places) >= MAX_NOTED:
            unknown.more += 1
            return
        if not unknown.add(f"{place}.{name[:MAX_NAME_CHARS]}" if place else name[:MAX_NAME_CHARS]):
            return
        self._compared += 1
        if self._compared <= MAX_COMPARED and nearest(name, candidates_of(schema)) is not None:
            raise _unknown_field(name, schema, where)


def path_of(where: Where) -> str:
    """A field's path as clients write it."""
    text = ""
    for part in where:
        shown = f"{part[:MAX_NAME_CHARS]}…" if isinstance(part, str) and len(part) > MAX_NAME_CHARS else part
        text += f"[{shown}]" if isinstance(part, int) else f"{'.' if text else ''}{shown}"
    return text


def _too_many(where: Where, count: int, most: int, what: str) -> ApiError:
    path = path_of(where)
    told = f"{path or 'body'}: has {count} {what}, and at most {most} are taken; send less"
    return ApiError(400, told, param=path or None, code="invalid_value")


def _unknown_field(name: str, schema: type[Strict], where: Where) -> ApiError:
    path, near = path_of((*where, name)), nearest(name, candidates_of(schema))
    told = "this field is not supported; remove it" if near is None else f"is not known; did you mean {near}?"
    return ApiError(400, f"{path}: {told}", param=path, code="unknown_parameter")


@functools.cache
def fields_of(schema: type[Strict]) -> Mapping[str, Shape | None]:
    """The names under which a schema's fields are sent, and the shapes of those that schemas concern."""
    hints = get_type_hints(schema, include_extras=True)
    found: dict[str, Shape | None] = {}
    for name, info in schema.model_fields.items():
        alias = info.validation_alias or name
        names = alias.choices if isinstance(alias, AliasChoices) else [alias]
        found |= dict.fromkeys(map(str, names), _shape(hints[name]))
    return found


@functools.cache
def most_of(schema: type[Strict]) -> Mapping[str, int]:
    """How many entries the lists and objects of a schema's fields may have, by the names of `fields_of`."""
    found: dict[str, int] = {}
    for name, info in schema.model_fields.items():
        own = [one.max_length for one in info.metadata if isinstance(one, MaxLen)]
        lengths = own + _lengths(info.annotation)
        if lengths and _members(info.annotation)[0] != [str]:
            alias = info.validation_alias or name
            names = alias.choices if isinstance(alias, AliasChoices) else [alias]
            found |= dict.fromkeys(map(str, names), max(lengths))
    return found


def _lengths(annotation: Any) -> list[int]:
    """The bounds that a type's alternatives set to the lengths of lists."""
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        if get_origin(inner) in (list, dict):
            bounds = [(one, *getattr(one, "metadata", ())) for one in metadata]
            return [one.max_length for each in bounds for one in each if isinstance(one, MaxLen)]
        return _lengths(inner)
    if get_origin(annotation) in (Union, UnionType):
        return [length for one in get_args(annotation) for length in _lengths(one)]
    return []


@functools.cache
def rules_of(schema: type[Strict]) -> Mapping[str, Rule]:
    """The rules of a schema and of those that it extends, without the fields it honours."""
    found: dict[str, Rule] = {}
    for base in reversed(schema.__mro__):
        found |= vars(base).get("rules", {})
    return {name: rule for name, rule in found.items() if name not in fields_of(schema)}


@functools.cache
def candidates_of(schema: type[Strict]) -> tuple[str, ...]:
    """The names that a misspelt one may stand for: those that make a difference."""
    refused = [name for name, rule in rules_of(schema).items() if not isinstance(rule, WithoutEffect)]
    return (*fields_of(schema), *refused)


def _shape(annotation: Any) -> Shape | None:
    """The shape of a type's values; None where no schema is inside."""
    members, chooser = _members(annotation)
    schemas = {one.__name__: one for one in members if isinstance(one, type) and issubclass(one, Strict)}
    items = next(
        (shape for one in members if get_origin(one) is list if (shape := _shape(get_args(one)[0]))), None
    )
    if not schemas:
        return None if items is None else Shape(lambda _: None, items)
    if chooser is None:
        assert len(schemas) == 1, f"{sorted(schemas)} need a discriminator such as by_type"
        (only,) = schemas.values()
        return Shape(lambda _: only, items)
    return Shape(lambda value: schemas.get(str(chooser(value))), items)


def _members(annotation: Any) -> tuple[list[Any], Callable[[Any], Any] | None]:
    """The alternatives of a type, and who chooses among them."""
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        members, chooser = _members(inner)
        for one in metadata:
            if isinstance(one, Discriminator) and callable(one.discriminator):
                chooser = one.discriminator
        return members, chooser
    if get_origin(annotation) in (Union, UnionType):
        found, choosers = [], []
        for one in get_args(annotation):
            members, chooser = _members(one)
            found += members
            choosers += [chooser] if chooser is not None else []
        return found, choosers[0] if choosers else None
    return [annotation], None
