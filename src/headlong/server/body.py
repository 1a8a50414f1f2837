"""Reads a request's body within bounds and turns it into its schema. Knows no endpoint."""

import asyncio
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from headlong.server.errors import ApiError, from_validation
from headlong.server.sifting import Sifted, sift
from headlong.server.weighing import MAX_COST, cost

Schema = TypeVar("Schema", bound=BaseModel)
LARGE = 1 << 15
"""Bodies of so many bytes are read beside the event loop."""


async def read_json(request: Request, schema: type[Schema], *, optional: bool = False) -> Schema:
    """Returns the body as a `schema`; raises an ApiError for anything that cannot be one. What was left out of it is
    noted for the answer's headers and the log. `optional` takes no body for an empty object."""
    body = await read_body(request)
    if optional and not body:
        body = b"{}"
    server = request.app.state.server
    strict = server.settings.strict_fields
    if len(body) < LARGE:
        read, sifted = _read(body, schema, strict)
    else:
        read, sifted = await asyncio.to_thread(_read, body, schema, strict)
    server.left_out.note(request, sifted)
    request.state.renamed = sifted.renamed
    return read


def _read(body: bytes, schema: type[Schema], strict: bool) -> tuple[Schema, Sifted]:
    if cost(body) > MAX_COST:
        raise ApiError(
            400,
            "body: has more than a million values, or fifty thousand fields; send fewer",
            code="invalid_value",
        )
    try:
        given = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    sifted = sift(given, schema, strict=strict)
    try:
        return schema.model_validate(sifted.body), sifted
    except ValidationError as error:
        raise from_validation(error, sifted.renamed, schema) from None


async def read_body(request: Request) -> bytes:
    """Reads the whole body, unless it is too large or too slow."""
    settings = request.app.state.server.settings
    limit = settings.max_body_bytes
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit)
    body = bytearray()
    try:
        async with asyncio.timeout(settings.body_timeout):
            async for part in request.stream():
                body += part
                if len(body) > limit:
                    raise _too_large(limit)
    except TimeoutError:
        raise ApiError(
            408,
            f"the body did not arrive within {settings.body_timeout:g} s; send it at once",
            code="request_timeout",
            headers={"connection": "close"},
        ) from None
    except ClientDisconnect:
        raise ApiError(400, "the client left before its request was complete", code="client_closed") from None
    return bytes(body)


def _too_large(limit: int) -> ApiError:
    message = f"the body is larger than {limit} bytes; send less, or raise max_body_bytes"
    return ApiError(413, message, code="request_too_large", headers={"connection": "close"})
