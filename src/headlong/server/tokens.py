"""`/tokenize` and `/detokenize` as vLLM and llama.cpp's server have them, `/v1/token/encode` and `/v1/token/decode` as
tabbyAPI does: the model's own tokenizer."""

import asyncio
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from headlong.errors import RequestError
from headlong.server.body import read_json
from headlong.server.model import Model
from headlong.server.prompting import render
from headlong.server.reply import JsonReply
from headlong.server.schemas.chat import ChatRequest
from headlong.server.schemas.completions import DecodeRequest, EncodeRequest
from headlong.server.schemas.tokens import DetokenizeRequest, TokenizeRequest
from headlong.text.tokenizer import Tokenizer

MAX_TEXT_BYTES = 8 << 20
"""The longest text that tokens are turned into."""


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
        pieces = (
            [{"id": token, "piece": _piece(tokenizer, token)} for token in tokens]
            if body.with_pieces
            else tokens
        )
        return JsonReply({"tokens": pieces})
    names = [tokenizer.token_text(token) for token in tokens] if body.return_token_strs else None
    told = {"count": len(tokens), "max_model_len": model.client.description.max_len}
    return JsonReply(told | {"tokens": tokens, "token_strs": names})


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
        return await asyncio.to_thread(_decoded, model, body.tokens, ("prompt", "content"))


async def encode(request: Request) -> Response:
    body = await read_json(request, EncodeRequest)
    pool, admin = request.app.state.server.pool, request.state.caller.admin
    async with pool.lease(body.model, admin=admin) as model:
        return await asyncio.to_thread(_encoded, model, body)


def _encoded(model: Model, body: EncodeRequest) -> Response:
    _tokenizer(model)
    tokens = model.client.text.encode(body.text, body.add_special_tokens)
    return JsonReply({"length": len(tokens), "tokens": tokens})


async def decode(request: Request) -> Response:
    body = await read_json(request, DecodeRequest)
    pool, admin = request.app.state.server.pool, request.state.caller.admin
    async with pool.lease(body.model, admin=admin) as model:
        skip = body.skip_special_tokens
        return await asyncio.to_thread(_decoded, model, body.tokens, ("text",), skip_special_tokens=skip)


def _decoded(
    model: Model, tokens: list[int], names: tuple[str, ...], *, skip_special_tokens: bool = False
) -> Response:
    """Answers with the text of tokens, all of which must be in the vocabulary, under each of the names."""
    tokenizer, left = _tokenizer(model), MAX_TEXT_BYTES
    for place, token in enumerate(tokens):
        if not tokenizer.is_known(token):
            raise RequestError(f"tokens[{place}]: {token} is not in the vocabulary of {tokenizer.vocab_size}")
        left -= len(tokenizer.token_bytes(token))
        if left < 0:
            raise RequestError(
                f"tokens: their text has more than {MAX_TEXT_BYTES} bytes; send fewer at a time"
            )
    return JsonReply(dict.fromkeys(names, tokenizer.decode(tokens, skip_special_tokens)))


def _tokenizer(model: Model) -> Tokenizer:
    tokenizer = model.client.text.tokenizer
    if tokenizer is None:
        raise RequestError("model: this one has no tokenizer.json")
    return tokenizer
