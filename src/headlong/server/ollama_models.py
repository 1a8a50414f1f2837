"""`/api/tags`, `/api/show`, `/api/ps`, `/api/version`, `/api/pull`: which models there are, in Ollama's words.

Callers without an admin key see what serves and nothing of what else is on the disk.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from headlong.checkpoint import source
from headlong.server.body import read_json
from headlong.server.errors import ApiError, as_api_error
from headlong.server.following import followed
from headlong.server.library import Source
from headlong.server.model import Model
from headlong.server.ollama_encoder import NDJSON, line
from headlong.server.ollama_facts import FileFacts, facts_of
from headlong.server.ollama_names import served_name, tagged
from headlong.server.pool import ModelPool, in_thread
from headlong.server.reply import STREAM_HEADERS, JsonReply
from headlong.server.schemas.ollama import NamedModel, PullRequest
from headlong.version import __version__

FOLLOWED = "0.12.11"
"""The release of Ollama whose API this is: clients ask for it before they use what is newer."""
FOREVER = "2300-01-01T00:00:00Z"
"""When models that serve expire: nothing but another model or an admin unloads them."""
_HUB = ("hf.co/", "huggingface.co/")


async def tags(request: Request) -> Response:
    pool, admin = _pool(request), request.state.caller.admin
    return JsonReply({"models": await asyncio.to_thread(_listed, pool, pool.loaded(), admin)})


async def ps(request: Request) -> Response:
    return JsonReply({"models": await asyncio.to_thread(_running, _pool(request).loaded())})


async def show(request: Request) -> Response:
    name = _named(await read_json(request, NamedModel))
    pool = _pool(request)
    own = served_name(pool, name)
    model = pool.find(own)
    if model is not None:
        defaults = model.sampling
        return JsonReply(await asyncio.to_thread(_shown, model, dict(defaults)))
    path = (await asyncio.to_thread(_on_disk, pool)).get(own) if request.state.caller.admin else None
    if path is None:
        raise pool.not_found(name)
    return JsonReply(_described(own, await asyncio.to_thread(facts_of, own, path)))


async def version(_: Request) -> Response:
    return JsonReply({"version": FOLLOWED, "headlong": __version__})


async def pull(request: Request) -> Response:
    """Fetches a model into the cache of this machine. It goes on if the client leaves."""
    body = await read_json(request, PullRequest)
    wanted = _source_of(_pool(request), _named(body))
    if not body.stream:
        await in_thread(source.resolve, wanted.model)
        return JsonReply({"status": "success"})
    return StreamingResponse(_pulling(wanted), media_type=NDJSON, headers=STREAM_HEADERS)


async def not_here(request: Request) -> Response:
    """Refuses what Ollama's clients may ask for and this server has not."""
    raise ApiError(400, NOT_HERE[request.url.path])


_EMBEDDINGS = "embeddings are not to be had in Ollama's form; docs/api.md says what there is"
NOT_HERE = {
    "/api/delete": "models are not deleted from here; remove their files on the server's machine",
    "/api/embed": _EMBEDDINGS,
    "/api/embeddings": _EMBEDDINGS,
    "/api/create": "models are not made here; `headlong convert` and `headlong quantize` make them",
    "/api/copy": "models are not copied here; start the server with served_names for another name",
    "/api/push": "models are not uploaded from here; use `hf upload`",
}
"""Paths of Ollama's that say why there is nothing, instead of a bare 404."""


def _listed(pool: ModelPool, loaded: list[Model], admin: bool) -> list[dict[str, Any]]:
    known = {name: _path(model) for model in loaded for name in model.names}
    if admin:
        known = _on_disk(pool) | known
    return [_entry(name, facts_of(name, path)) for name, path in known.items()]


def _running(loaded: list[Model]) -> list[dict[str, Any]]:
    entries = []
    for model in loaded:
        engine = model.client.description
        taken = engine.memory.total_bytes
        more = {
            "size": taken,
            "size_vram": taken if engine.device.startswith("cuda") else 0,
            "expires_at": FOREVER,
            "context_length": engine.max_len,
        }
        entries += [_entry(name, facts_of(name, _path(model))) | more for name in model.names]
    return entries


def _on_disk(pool: ModelPool) -> dict[str, Path]:
    """The models of the library and of the cache by their names. For admins: it tells what is on the disk."""
    found = {one.name: one.path for one in source.list_local()}
    for name in pool.available():
        known = pool.source(name)
        if known is not None and isinstance(known.model, Path):
            found[name] = known.model
    return found


def _shown(model: Model, defaults: dict[str, Any]) -> dict[str, Any]:
    tokenizer, format = model.client.text.tokenizer, model.format
    facts = facts_of(model.id, _path(model))
    can = {"completion": True, "tools": format.tools is not None, "thinking": format.reasoning is not None}
    parameters = {name.replace("repetition_", "repeat_"): value for name, value in defaults.items()}
    described = _described(model.id, facts)
    if facts.architecture:
        described["model_info"][f"{facts.architecture}.context_length"] = model.client.description.max_len
    lines = [f"PARAMETER {name} {value}" for name, value in parameters.items()]
    return described | {
        "modelfile": "\n".join([f"FROM {model.id}", *lines]),
        "parameters": "\n".join(f"{name:<30} {value}" for name, value in parameters.items()),
        "template": (tokenizer.chat_template if tokenizer is not None else None) or "",
        "capabilities": [name for name, able in can.items() if able],
    }


def _described(name: str, facts: FileFacts) -> dict[str, Any]:
    info: dict[str, Any] = {"general.basename": name}
    if facts.architecture:
        info["general.architecture"] = facts.architecture
        info |= {f"{facts.architecture}.{key}": value for key, value in facts.info.items()}
    if facts.parameters is not None:
        info["general.parameter_count"] = facts.parameters
    return {
        "modelfile": f"FROM {name}",
        "parameters": "",
        "template": "",
        "details": facts.details,
        "model_info": info,
        "capabilities": ["completion"],
        "modified_at": _time(facts.modified),
    }


def _entry(name: str, facts: FileFacts) -> dict[str, Any]:
    return {
        "name": tagged(name),
        "model": tagged(name),
        "modified_at": _time(facts.modified),
        "size": facts.nbytes,
        "digest": facts.digest,
        "details": facts.details,
    }


def _source_of(pool: ModelPool, name: str) -> Source:
    plain = served_name(pool, name)
    for prefix in _HUB:
        plain = plain.removeprefix(prefix)
    found = pool.source(plain)
    if found is None:
        shown = repr(name[:200])
        raise ApiError(
            404,
            f"model: {shown} is no repository `owner/name` of Hugging Face nor one that Headlong knows by name; "
            "there is no registry of Ollama's here",
        )
    return found


async def _pulling(wanted: Source) -> AsyncIterator[str]:
    yield line({"status": "pulling manifest"})
    fetching, reports = followed(
        lambda report: in_thread(lambda: source.resolve(wanted.model, progress=report))
    )
    async for label, done, total in reports:
        digest = f"sha256:{hashlib.sha256(label.encode()).hexdigest()}"
        yield line({"status": label, "digest": digest, "total": total, "completed": done})
    try:
        await fetching
    except Exception as error:
        yield line(as_api_error(error).ollama())
    else:
        yield line({"status": "success"})


def _named(body: NamedModel) -> str:
    name = body.model or body.name
    if name is None:
        raise ApiError(400, "model: is missing", param="model", code="missing_required_parameter")
    return name


def _path(model: Model) -> Path:
    return Path(model.client.description.folder)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _pool(request: Request) -> ModelPool:
    return request.app.state.server.pool
