"""What a tool's JSON schema says of its parameters' types. Reads schemas, never checks a value by them."""

from collections.abc import Mapping, Sequence
from typing import Any

JsonTypes = frozenset[str] | None
"""The JSON types a value may have; None means any."""

STRING: JsonTypes = frozenset({"string"})
JSON_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
_NOTES = frozenset({"title", "description", "default", "examples", "$comment", "deprecated"})
_FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
_NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_SCHEMAS = frozenset({"items", "prefixItems", "additionalProperties", "anyOf", "allOf", "oneOf", "not"})
_MAX_DEPTH = 16  # of schemas that refer to each other, perhaps in a circle


def tool_parameters(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Each tool's schema of its parameters, by the tool's name; whatever is malformed is left out."""
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            parameters = function.get("parameters")
            found[function["name"]] = parameters if isinstance(parameters, Mapping) else {}
    return found


def property_types(parameters: Mapping[str, Any], name: str) -> JsonTypes:
    """The types of one parameter. One that the schema does not mention is a string, as it was written."""
    properties = resolve(parameters, parameters).get("properties")
    if not isinstance(properties, Mapping) or name not in properties:
        return STRING
    return json_types(properties[name], parameters)


def json_types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> JsonTypes:
    """The types that a schema allows, as far as `type`, `enum`, `const`, unions and references tell."""
    schema = resolve(schema, root)
    if depth > _MAX_DEPTH:
        return None
    declared = schema.get("type")
    if declared is not None:
        names = frozenset([declared] if isinstance(declared, str) else _texts(declared))
        return names if names and names <= JSON_TYPES else None
    if "const" in schema:
        return frozenset({type_of(schema["const"])})
    if isinstance(schema.get("enum"), list):
        return frozenset(map(type_of, schema["enum"])) or None
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list):
            branches = [json_types(branch, root, depth + 1) for branch in schema[keyword]]
            known = [branch for branch in branches if branch is not None]
            return frozenset().union(*known) if known and len(known) == len(branches) else None
    if isinstance(schema.get("allOf"), list):
        known = [types for part in schema["allOf"] if (types := json_types(part, root, depth + 1))]
        return frozenset.intersection(*known) or None if known else None
    return None


def resolve(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema that a reference inside the same document stands for; empty where there is none."""
    for _ in range(_MAX_DEPTH):
        if not isinstance(schema, Mapping):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        schema = _lookup(reference, root)
    return {}


def without_notes(schema: Any) -> Any:
    """The schema without what it says to readers only: descriptions, which are most of its length, and the
    names of formats that nobody here can check."""
    if isinstance(schema, list):
        return [without_notes(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in _NAMED_SCHEMAS and isinstance(value, Mapping):
            kept[keyword] = {name: without_notes(part) for name, part in value.items()}
        elif keyword in _SCHEMAS:
            kept[keyword] = without_notes(value)
        elif keyword == "propertyNames" and without_notes(value) == {"type": "string"}:
            continue  # every name is a string
        elif keyword not in _NOTES and (keyword != "format" or value in _FORMATS):
            kept[keyword] = value
    return kept


def _lookup(reference: str, root: Mapping[str, Any]) -> Any:
    found: Any = root
    start, *path = reference.split("/")
    if start != "#":
        return None
    for key in path:
        key = key.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def type_of(value: Any) -> str:
    """The JSON type of a value that was read from JSON; a whole float is an integer too."""
    if value is None:
        return "null"
    for name, kinds in (
        ("boolean", bool),
        ("integer", int),
        ("string", str),
        ("object", Mapping),
        ("array", list),
    ):
        if isinstance(value, kinds):
            return name
    return "integer" if isinstance(value, float) and value.is_integer() else "number"


def _texts(values: Any) -> list[str]:
    return [value for value in values if isinstance(value, str)] if isinstance(values, list) else []
