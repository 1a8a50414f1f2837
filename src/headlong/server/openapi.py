"""The OpenAPI description, made from the table of endpoints and their schemas."""

from collections.abc import Sequence
from typing import Any

from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from headlong.server.endpoint import Endpoint, Handler
from headlong.server.reply import JsonReply
from headlong.version import __version__

_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type"],
        }
    },
    "required": ["error"],
}


def describe(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    bodies = [one.body for one in endpoints if one.body is not None]
    _, definitions = models_json_schema(
        [(body, "validation") for body in bodies], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, Any] = {}
    for one in endpoints:
        paths.setdefault(one.path.replace(":path", ""), {})[one.method.lower()] = _operation(one)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Headlong", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": definitions.get("$defs", {}) | {"Error": _ERROR},
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def serve(description: dict[str, Any]) -> Handler:
    async def endpoint(_: Request) -> Response:
        return JsonReply(description)

    return endpoint


def _operation(one: Endpoint) -> dict[str, Any]:
    error = {"$ref": "#/components/schemas/Error"}
    operation: dict[str, Any] = {
        "summary": one.summary,
        "operationId": one.handler.__name__,
        "responses": {
            "200": {"description": "The answer; server-sent events where `stream` is true."},
            "default": {
                "description": "What is wrong, and with which field.",
                "content": {"application/json": {"schema": error}},
            },
        },
    }
    if one.access != "open":
        operation["security"] = [{"bearer": []}, {}]
    if "{" in one.path:
        name = one.path.split("{")[1].split(":")[0].split("}")[0]
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        ]
    if one.body is not None:
        schema = {"$ref": f"#/components/schemas/{one.body.__name__}"}
        operation["requestBody"] = {
            "required": not one.optional,
            "content": {"application/json": {"schema": schema}},
        }
    return operation
