"""`/tokenize` and `/detokenize` as vLLM and llama.cpp's server have them, `/v1/token/encode` and `/v1/token/decode` as
tabbyAPI does: the model's own tokenizer."""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headlong.errors import RequestError
from headlong.server.body import read_json
from headlong.server.model import Model
from headlong.server.prompting import render
from headlong.server.reply import JsonReply, dumps
from headlong.server.schemas.chat import ChatRequest
from headlong.server.schemas.completions import DecodeRequest, EncodeRequest
from headlong.server.schemas.tokens import DetokenizeRequest, TokenizeRequest
from headlong.text.tokenizer import Tokenizer

PART = 1 << 13
"""The entries of a list that are written at once."""


async def tokenize(request: Request) -> Response:
    """Answers in the dialect whose field the text came in."""
    body = await read_json(request, TokenizeRequest)
    given = [name for name in ("prompt", "content", "messages") if getattr(body, name) is not None]
    if len(given) != 1:
        raise RequestError(
            f"{given[-1] if given else 'prompt'}: send exactly one of prompt, content and messages"
        )
    pool, admin = request.app.state.server.pool, request.state.caller.admin
    async with pool.lease(body.model, admin=admin) as model:
        return await asyncio.to_thread(_tokenized, model, body)


def _tokenized(model: Model, body: TokenizeRequest) -> Response:
    tokenizer, tokens = _tokenizer(model), _tokens(model, body)
    if body.content is not None:
        pieces = ({"id": token, "piece": _piece(tokenizer, token)} for token in tokens)
        return _listed({}, tokens=pieces if body.with_pieces else tokens)
    names = (tokenizer.token_text(token) for token in tokens)
    told = {"count": len(tokens), "max_model_len": model.client.description.max_len}
    if not body.return_token_strs:
        return _listed(told | {"token_strs": None}, tokens=tokens)
    return _listed(told, tokens=tokens, token_strs=names)


def _listed(told: dict[str, Any], **lists: Iterable[Any]) -> Response:
    """An answer with long lists, written part by part: other threads run in between."""
    text = dumps(told)[:-1]
    for name, items in lists.items():
        parts = [dumps(part)[1:-1] for part in _parts(items)]
        text += f'{"," if len(text) > 1 else ""}"{name}":[{",".join(parts)}]'
    return Response((text + "}").encode("utf-8", "replace"), media_type=JsonReply.media_type)


def _parts(items: Iterable[Any]) -> Iterator[list[Any]]:
    rest = iter(items)
    while part := list(islice(rest, PART)):
        yield part


def _tokens(model: Model, body: TokenizeRequest) -> Sequence[int]:
    codec = model.client.text
    if body.prompt is not None:
        return codec.encode(body.prompt, body.add_special_tokens is not False)
    if body.content is not None:
        return codec.encode(body.content, bool(body.add_special))
    if body.add_special_tokens:
        raise RequestError("add_special_tokens: the template writes those of messages; leave it out")
    asked = ("messages", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
    return render(model, ChatRequest(**{name: getattr(body, name) for name in asked})).tokens


def _piece(tokenizer: Tokenizer, token: int) -> str | list[int]:
    """A token's text, or its bytes where they are only a part of a character."""
    piece = tokenizer.token_bytes(token)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


async def detokenize(request: Request) -> Response:
    """Answers in both dialects: a request in one looks like a request in the other."""
    body = await read_json(request, DetokenizeRequest)
    pool, admin = request.app.state.server.pool, request.state.caller.admin
    async with pool.lease(body.model, admin=admin) as model:
        text = await asyncio.to_thread(_known_text, _tokenizer(model), body.tokens, skip_special_tokens=False)
    return JsonReply({"prompt": text, "content": text})


async def encode(request: Request) -> Response:
    body = await read_json(request, EncodeRequest)
    pool, admin = request.app.state.server.pool, request.state.caller.admin
    async with pool.lease(body.model, admin=admin) as model:
        return await asyncio.to_thread(_encoded, model, body)


def _encoded(model: Model, body: EncodeRequest) -> Response:
    _tokenizer(model)
    tokens = model.client.text.encode(body.text, body.add_special_tokens)
    return _listed({"length": len(tokens)}, tokens=tokens)


async def decode(request: Request) -> Response:
    body = await read_json(request, DecodeRequest)
    pool, admin = request.app.state.server.pool, request.state.caller.admin
    async with pool.lease(body.model, admin=admin) as model:
        text = await asyncio.to_thread(
            _known_text, _tokenizer(model), body.tokens, skip_special_tokens=body.skip_special_tokens
        )
    return JsonReply({"text": text})


def _known_text(tokenizer: Tokenizer, tokens: list[int], *, skip_special_tokens: bool) -> str:
    """The text of tokens, all of which must be in the vocabulary."""
    for place, token in enumerate(tokens):
        if not tokenizer.is_known(token):
            raise RequestError(f"tokens[{place}]: {token} is not in the vocabulary of {tokenizer.vocab_size}")
    return tokenizer.decode(tokens, skip_special_tokens)


def _tokenizer(model: Model) -> Tokenizer:
    tokenizer = model.client.text.tokenizer
    if tokenizer is None:
        raise RequestError("model: this one has no tokenizer.json")
    return tokenizer
