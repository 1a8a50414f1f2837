"""How schemas say no: fields that must stay empty, and lists whose entries come in kinds.

Both give the reason and the fix where pydantic would list what it tried.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import (
    BeforeValidator,
    Discriminator,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)


def refused(why: str, *allowed: Any) -> BeforeValidator:
    """For a field that other servers have and this one does not: nothing but null, or what is `allowed`."""

    def check(value: Any) -> Any:
        if value is not None and (type(value), value) not in [(type(one), one) for one in allowed]:
            raise ValueError(why)
        return value

    return BeforeValidator(check)


def told(wanted: str) -> WrapValidator:
    """For a field with several alternatives: one sentence for all of them instead of what each of them wanted."""

    def check(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        try:
            return validate(value)
        except ValidationError as error:
            raise ValueError(wanted) from error

    return WrapValidator(check)


def by_type(tags: Mapping[str, str], why: str, default: str | None = None) -> Discriminator:
    """Chooses a schema by its entry's `type`. Tags are the schemas' names, which error paths leave out."""

    def tag(value: Any) -> str | None:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        kind = default if kind is None else kind
        return tags.get(kind) if isinstance(kind, str) else None

    return Discriminator(tag, custom_error_type="unsupported", custom_error_message=why)


def failing_fast(schema: Any) -> Any:
    """The core schema with lists that stop at their first entry that is wrong: an error for each of a million entries
    would take gigabytes."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        for name, inner in schema.items():
            if name not in ("metadata", "serialization", "ref"):
                failing_fast(inner)
    elif isinstance(schema, list):
        for inner in schema:
            failing_fast(inner)
    return schema
