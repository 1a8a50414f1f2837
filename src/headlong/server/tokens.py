"""`/v1/token/encode` and `/v1/token/decode`: the model's own tokenizer."""

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from headlong.errors import RequestError
from headlong.server.body import read_json
from headlong.server.model import Model
from headlong.server.reply import JsonReply
from headlong.server.schemas.completions import DecodeRequest, EncodeRequest
from headlong.text.tokenizer import Tokenizer


async def encode(request: Request) -> Response:
    body = await read_json(request, EncodeRequest)
    pool, admin = request.app.state.server.pool, request.state.caller.admin
    async with pool.lease(body.model, admin=admin) as model:
        tokens = await asyncio.to_thread(_tokenizer(model).encode, body.text, body.add_special_tokens)
    return JsonReply({"tokens": tokens, "length": len(tokens)})


async def decode(request: Request) -> Response:
    body = await read_json(request, DecodeRequest)
    pool, admin = request.app.state.server.pool, request.state.caller.admin
    async with pool.lease(body.model, admin=admin) as model:
        tokenizer = _tokenizer(model)
        for place, token in enumerate(body.tokens):
            if not tokenizer.is_known(token):
                raise RequestError(
                    f"tokens[{place}]: {token} is not in the vocabulary of {tokenizer.vocab_size}"
                )
        text = await asyncio.to_thread(tokenizer.decode, body.tokens, body.skip_special_tokens)
    return JsonReply({"text": text})


def _tokenizer(model: Model) -> Tokenizer:
    tokenizer = model.client.text.tokenizer
    if tokenizer is None:
        raise RequestError("model: this one has no tokenizer.json")
    return tokenizer
