"""Reads a request's body within bounds and turns it into its schema. Knows no endpoint."""

import asyncio
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from headlong.server.errors import ApiError, from_validation

Schema = TypeVar("Schema", bound=BaseModel)


async def read_json(request: Request, schema: type[Schema]) -> Schema:
    """The body as `schema`; an ApiError for anything it cannot be."""
    body = await read_body(request)
    try:
        return schema.model_validate_json(body)
    except ValidationError as error:
        raise from_validation(error) from None


async def read_body(request: Request) -> bytes:
    """All of it, unless it is too large or too slow."""
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
