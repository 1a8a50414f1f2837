"""`/v1/models` and `/v1/model*`: which models there are, and loading and unloading them.

Callers without an admin key see what serves and nothing of what else is on the disk.
"""

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal, get_origin, get_type_hints

from pydantic import AliasChoices, Field, create_model
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from headlong.config import ENGINE_OPTIONS, EngineConfig
from headlong.errors import ConfigError
from headlong.option import Option, ValueType
from headlong.server.aliases import drafting
from headlong.server.body import read_json
from headlong.server.errors import as_api_error
from headlong.server.following import followed
from headlong.server.pool import Model, ModelPool
from headlong.server.reply import STREAM_HEADERS, JsonReply, event
from headlong.server.schemas.base import Ours

Count = Annotated[int, Field(ge=0, le=1 << 30)]
Name = Annotated[str, Field(min_length=1, max_length=512)]
MAX_OPTION_CHARS = 64
"""The most characters of an option that is a text, unless the option says otherwise."""


class DraftModel(Ours):
    """The fields with which tabbyAPI asks for drafting."""

    draft_mode: str | None = None
    draft_num_tokens: Count | None = None


class SpeculativeConfig(Ours):
    """The object with which vLLM asks for drafting."""

    method: str | None = None
    num_speculative_tokens: Count | None = None


class LoadBody(Ours):
    """A model's name, and other servers' ways to ask for drafting."""

    model_name: Name = Field(validation_alias=AliasChoices("model_name", "model"))
    draft_model: DraftModel | None = None
    speculative_config: SpeculativeConfig | None = None
    stream: bool = False
    """Whether to report progress as server-sent events."""

    def engine_options(self) -> dict[str, Any]:
        """The engine options that were sent, in whichever way."""
        given = self.model_dump(include=set(ENGINE_OPTIONS), exclude_none=True)
        for section in ("draft_model", "speculative_config"):
            part = getattr(self, section)
            if part is None:
                continue
            for name, value in drafting(section, part.model_dump(exclude_none=True), section).items():
                if given.setdefault(name, value) != value:
                    raise ConfigError(f"{section} contradicts {name} {given[name]!r}; send one of them")
        return given


def _load_field(name: str, option: Option) -> tuple[Any, Any]:
    """An engine option as a field of a load request. No file may be named over the network."""
    hint = get_type_hints(EngineConfig)[name]
    longest = MAX_OPTION_CHARS if option.high == math.inf else int(option.high)
    text = Annotated[str, Field(min_length=int(option.low) or None, max_length=longest)]
    types: dict[ValueType, Any] = {
        "whole": Count,
        "number": float,
        "switch": bool,
        "depth": Count | Literal["auto"],
        "tokens": Count,
        "choice": hint if get_origin(hint) is Literal else text,
        "text": text,
    }
    names = AliasChoices(name, *option.aliases) if option.aliases else None
    return types[option.type] | None, Field(default=None, validation_alias=names)


_LOAD_FIELDS: dict[str, Any] = {
    name: _load_field(name, option) for name, option in ENGINE_OPTIONS.items() if not option.local
}
LoadRequest = create_model(
    "LoadRequest",
    __base__=LoadBody,
    __doc__="A model's name, and engine options that differ from the server's own.",
    **_LOAD_FIELDS,
)


class UnloadRequest(Ours):
    """The name of the model to unload; without one, it is the model that serves by default."""

    model_name: Name | None = Field(default=None, validation_alias=AliasChoices("model_name", "model"))


async def list_models(request: Request) -> Response:
    pool, admin = _pool(request), request.state.caller.admin
    cards = [card for model in pool.loaded() for card in _cards(pool, model, admin)]
    if admin:
        cards += [_unloaded(name) for name in await asyncio.to_thread(pool.available)]
    return JsonReply({"object": "list", "data": cards})


async def show_model(request: Request) -> Response:
    pool, admin = _pool(request), request.state.caller.admin
    name = request.path_params["model"]
    served = pool.find(name) is not None
    if not served and admin and name in await asyncio.to_thread(pool.available):
        return JsonReply(_unloaded(name))
    if (model := pool.answering(name)) is not None:
        return JsonReply(model.card(admin) | {"id": name})
    raise pool.not_found(name)


async def current_model(request: Request) -> Response:
    model = _pool(request).current
    if model is None:
        raise _pool(request).not_found(None)
    return JsonReply(model.card(request.state.caller.admin))


async def load_model(request: Request) -> Response:
    """Answers when the model serves, or tells the progress meanwhile. The load goes on if the client leaves."""
    body = await read_json(request, LoadRequest)
    pool, options = _pool(request), body.engine_options()
    if body.stream:
        events = _progress_events(pool, body.model_name, options)
        return StreamingResponse(events, media_type="text/event-stream", headers=STREAM_HEADERS)
    model = await pool.load(body.model_name, options)
    return JsonReply(model.card(admin=True))


async def unload_model(request: Request) -> Response:
    body = await read_json(request, UnloadRequest, optional=True)
    model = _pool(request).unload(body.model_name)
    return JsonReply({"id": model.id, "object": "model", "unloaded": True, "running_requests": model.users})


async def _progress_events(pool: ModelPool, name: str, options: dict[str, Any]) -> AsyncIterator[str]:
    loading, reports = followed(lambda report: pool.load(name, options, report))
    async for label, done, total in reports:
        yield event({"status": "loading", "label": label, "done": done, "total": total})
    try:
        model = await loading
    except Exception as error:
        yield event(as_api_error(error).openai())
    else:
        yield event({"status": "finished", "model": model.card(admin=True)})
    yield "data: [DONE]\n\n"


def _pool(request: Request) -> ModelPool:
    return request.app.state.server.pool


def _cards(pool: ModelPool, model: Model, admin: bool) -> list[dict[str, Any]]:
    """Model cards, one for each name: clients look for their name in the list."""
    return [model.card(admin) | {"id": name} for name in (*model.names, *pool.aliases_of(model))]


def _unloaded(name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "headlong",
        "headlong": {"loaded": False},
    }
