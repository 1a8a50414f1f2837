"""What a client is told when a request fails: one status, one sentence, the field it is about.

    HeadlongError
    └── ApiError       an answer with a status other than 2xx, in OpenAI's, Anthropic's or Ollama's form

Knows no endpoint. Errors of the engine become one of these in `as_api_error`; anything unforeseen becomes a 500
that says nothing of the inside.
"""

import re
import reprlib
from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from headlong.errors import (
    BusyError,
    CheckpointError,
    ConfigError,
    HarmfulError,
    HeadlongError,
    RequestError,
)

CLIENT_GONE = 499
"""The status of a request whose client left before its answer; nobody is sent it."""
MAX_SHOWN = 200
"""Characters of a client's own value that are repeated in a message."""
RETRY_SECONDS = 5
"""When to come back to a server that had no room for a request."""
_SHORT = reprlib.Repr()
"""Writes down the beginning of a value, however large it is."""
_SHORT.maxlevel = _SHORT.maxdict = _SHORT.maxlist = 4
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 2 * MAX_SHOWN
_SCALARS = ("str", "int", "float", "bool", "dict", "none")
"""Words that pydantic puts into paths for the alternatives of a union; no field has one of these names."""
_WORDS = {"ge": "from {}", "gt": "above {}", "le": "to {}", "lt": "below {}", "most": "and at most {}"}
"""How the bounds of a number are said."""
_FIELD = re.compile(r"[A-Za-z_][\w.\[\]]*")
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(HeadlongError):
    """An answer other than 2xx."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, Any] | None = None,
        reason: str | None = None,
    ) -> None:
        """`details` is for Anthropic's form; `reason` is for the log, where the message repeats what people wrote."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self.details = details
        self.reason = message if reason is None else reason

    def openai(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def ollama(self) -> dict[str, Any]:
        return {"error": self.message}

    def anthropic(self, request_id: str) -> dict[str, Any]:
        kind = _ANTHROPIC_TYPES.get(self.status, "api_error")
        error: dict[str, Any] = {"type": kind, "message": self.message}
        if self.details is not None:
            error["details"] = dict(self.details)
        return {"type": "error", "error": error, "request_id": request_id}


def as_api_error(error: BaseException) -> ApiError:
    """Returns the error to answer with after a failure of any kind."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ValidationError):
        return from_validation(error)
    if isinstance(error, RequestError):
        found = _FIELD.match(str(error))
        too_long = "this engine's context is" in str(error)
        return ApiError(
            400,
            str(error),
            param=found.group() if found else None,
            code="context_length_exceeded" if too_long else "invalid_value",
        )
    if isinstance(error, BusyError):
        return ApiError(
            503, str(error), type="server_error", code="busy", headers={"retry-after": str(RETRY_SECONDS)}
        )
    if isinstance(error, ConfigError | CheckpointError):
        return ApiError(400, str(error), code="model_not_usable")
    if isinstance(error, HarmfulError):
        # What the clients of OpenAI and Anthropic go by: they would send it again.
        return ApiError(
            500, str(error), type="server_error", code="engine_fault", headers={"x-should-retry": "false"}
        )
    if isinstance(error, HeadlongError):
        return ApiError(
            503,
            str(error),
            type="server_error",
            code="engine_unavailable",
            headers={"retry-after": str(RETRY_SECONDS)},
        )
    return ApiError(500, "the server failed on this request; its log says why", type="server_error")


def from_validation(
    error: ValidationError,
    renamed: Mapping[str, str] | None = None,
    schema: type[BaseModel] | None = None,
) -> ApiError:
    """The first fault of a body, with the field's path as clients write it; `renamed` are the fields that were sent
    under other names. With the schema the fault of a number names both of its bounds."""
    details = _most_telling(error.errors(include_url=False, include_context=False))
    field = str(details["loc"][0]) if details["loc"] else ""
    param = _path(details["loc"]) if renamed is None or field not in renamed else renamed[field]
    if details["type"] == "extra_forbidden":
        return ApiError(
            400, f"{param}: this field is not supported; remove it", param=param, code="unknown_parameter"
        )
    if details["type"] == "missing":
        return ApiError(400, f"{param}: is missing", param=param, code="missing_required_parameter")
    wanted = None if schema is None else _bounds(schema, details)
    given = _SHORT.repr(details.get("input"))
    shown = given if len(given) <= MAX_SHOWN else f"{given[:MAX_SHOWN]}…"
    reason = f"{param}: {wanted or details['msg'].removeprefix('Value error, ')}"
    return ApiError(400, f"{reason} (given: {shown})", param=param, code="invalid_value", reason=reason)


def _bounds(schema: type[BaseModel], details: ErrorDetails) -> str | None:
    """What a field of numbers takes; None for other fields, and for other faults."""
    info = schema.model_fields.get(str(details["loc"][0])) if len(details["loc"]) == 1 else None
    if info is None or not details["type"].startswith(("greater_than", "less_than", "int_", "float_")):
        return None
    bounds = {name: getattr(one, name) for one in info.metadata for name in _WORDS if hasattr(one, name)}
    if "gt" in bounds and "le" in bounds:
        bounds["most"] = bounds.pop("le")
    said = " ".join(_WORDS[name].format(bounds[name]) for name in _WORDS if name in bounds)
    kind = (
        "a whole number"
        if details["type"].startswith("int_") or int in get_args(info.annotation)
        else "a number"
    )
    return f"must be {kind} {said}".rstrip()


def _most_telling(errors: list[ErrorDetails]) -> ErrorDetails:
    """The most telling of the faults that a union reports, one for each alternative: the one that got furthest."""
    return max(
        errors, key=lambda details: (len(_plain(details["loc"])), details["type"] == "extra_forbidden")
    )


def _plain(loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Returns a path without the names that pydantic gives the alternatives of a union."""
    return tuple(part for part in loc if isinstance(part, int) or _is_field(part))


def _is_field(name: str) -> bool:
    return name.isidentifier() and name.islower() and name not in _SCALARS


def _path(loc: tuple[int | str, ...]) -> str:
    text = ""
    for part in loc if len(loc) == 1 else _plain(loc):
        shown = str(part) if len(str(part)) <= MAX_SHOWN else f"{str(part)[:MAX_SHOWN]}…"
        text += f"[{part}]" if isinstance(part, int) else f"{'.' if text else ''}{shown}"
    return text or "body"
