"""`/props` and `/slots`: what llama.cpp's server tells about itself, for the tools that ask for it."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headlong.server.model import Model
from headlong.server.reply import JsonReply
from headlong.version import __version__


async def props(request: Request) -> Response:
    """Tells of the model that serves by default. Where it lies is an admin's business."""
    admin = request.state.caller.admin
    model = _current(request)
    engine, tokenizer = model.client.description, model.client.text.tokenizer
    special = {} if tokenizer is None else tokenizer.special_tokens
    params = dict(model.sampling)
    return JsonReply(
        {
            "default_generation_settings": {"n_ctx": engine.max_len, "params": params},
            "total_slots": engine.max_rows,
            "model_alias": model.id,
            "model_path": engine.folder if admin else model.id,
            "modalities": {"vision": False, "audio": False},
            "chat_template": "" if model.client.text.template is None else model.client.text.template.source,
            "bos_token": special.get("bos_token", ""),
            "eos_token": special.get("eos_token", ""),
            "build_info": f"headlong {__version__}",
            "is_sleeping": False,
        }
    )


async def slots(request: Request) -> Response:
    """One entry for each sequence that can run at a time; those that run come first."""
    model = _current(request)
    engine, usage = model.client.description, model.client.stats().usage
    drafts = engine.drafting.refusal is None
    listed: list[dict[str, Any]] = [
        {"id": slot, "n_ctx": engine.max_len, "speculative": drafts, "is_processing": slot < usage.running}
        for slot in range(engine.max_rows)
    ]
    return JsonReply(listed)


def _current(request: Request) -> Model:
    pool = request.app.state.server.pool
    if pool.current is None:
        raise pool.not_found(None)
    return pool.current
