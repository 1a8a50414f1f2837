"""Closes the objects of a JSON schema that lists their members and leaves open whether there may be more.

Whoever lists members wants those. A weak model that may write others writes others for ever; what follows the closed
schema follows the open one, too. Knows no grammar.
"""

from collections.abc import Mapping
from typing import Any

_NAMED_SCHEMAS = ("properties", "$defs", "definitions")
_SCHEMAS = ("items", "prefixItems", "additionalProperties", "anyOf", "oneOf")
_JOINING = ("allOf", "if", "not", "dependentSchemas", "unevaluatedProperties", "$dynamicRef")
"""With these, parts of a schema hold together, and what one of them does not list, another may."""
_ANY_NAME = ("propertyNames", {"type": "string"})
"""Says nothing, for every name is a string; some libraries write it, and the grammar library knows no such keyword."""
_BESIDE = ("additionalProperties", "patternProperties", "$ref", "anyOf", "oneOf")


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without members that it does not list; as it is where parts of it hold together."""
    return schema if _joins(schema) else _closed(schema)


def _joins(schema: Any) -> bool:
    if isinstance(schema, list):
        return any(map(_joins, schema))
    if not isinstance(schema, dict):
        return False
    return any(word in schema for word in _JOINING) or any(map(_joins, schema.values()))


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {word: value for word, value in schema.items() if (word, value) != _ANY_NAME}
    for word in _NAMED_SCHEMAS:
        if isinstance(named := kept.get(word), dict):
            kept[word] = {name: _closed(part) for name, part in named.items()}
    for word in _SCHEMAS:
        if word in kept:
            kept[word] = _closed(kept[word])
    return kept | {"additionalProperties": False} if _lists_all(kept) else kept


def _lists_all(schema: Mapping[str, Any]) -> bool:
    """Whether an object can be written with the members that its schema lists."""
    listed, required = schema.get("properties"), schema.get("required", [])
    if (
        not isinstance(listed, dict)
        or not isinstance(required, list)
        or any(word in schema for word in _BESIDE)
    ):
        return False
    return listed.keys() >= {str(name) for name in required} and schema.get("minProperties", 0) in range(
        len(listed) + 1
    )
