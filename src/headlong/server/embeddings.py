"""`/v1/embeddings`: vectors made of the hidden states of the model that serves.

A model that was trained to write gives vectors of another quality than one that was trained for them; which one
serves is the client's affair. A text's vector does not depend on what else is computed at the time.
"""

import base64
import math
import struct
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headlong.errors import RequestError
from headlong.params import SamplingParams
from headlong.server.admission import admit
from headlong.server.body import read_json
from headlong.server.generation import Job, Result
from headlong.server.model import Model
from headlong.server.schemas.embeddings import EmbeddingsRequest

MAX_PLACES = 16
"""The most places in the queue that one request takes: its texts are read once each and leave at once."""


async def embeddings(request: Request) -> Response:
    body = await read_json(request, EmbeddingsRequest)
    make = partial(_job, body=body, job_id=f"embd-{request.state.id}")
    model, exchange = await admit(request, body.model, min(len(body.inputs), MAX_PLACES), make)
    return await exchange.whole(_Encoder(model, body))


def _job(model: Model, body: EmbeddingsRequest, job_id: str) -> Job:
    prompts = []
    for place, one in enumerate(body.inputs):
        tokens = model.client.text.encode(one)
        if not tokens:
            raise RequestError(f"input[{place}]: is empty; send a text")
        prompts.append(tokens)
    params = SamplingParams(max_tokens=1, draft_tokens=0, pooling=body.pooling)
    return Job(job_id, "embeddings", tuple(prompts), params)


class _Encoder:
    """Encodes vectors as OpenAI's list."""

    def __init__(self, model: Model, body: EmbeddingsRequest) -> None:
        self._model, self._body = model, body

    def whole(self, result: Result) -> dict[str, Any]:
        tokens = sum(completion.stats.prompt_tokens for completion in result.completions)
        data = [
            {"object": "embedding", "index": index, "embedding": self._vector(completion.embedding or ())}
            for index, completion in enumerate(result.completions)
        ]
        return {
            "object": "list",
            "data": data,
            "model": self._body.model or self._model.id,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }

    def _vector(self, embedding: tuple[float, ...]) -> list[float] | str:
        count = self._body.dimensions
        if count is not None and count > len(embedding):
            raise RequestError(
                f"dimensions: {count} is more than this model's {len(embedding)}; ask for fewer"
            )
        kept = embedding[:count]
        length = math.sqrt(math.fsum(number * number for number in kept)) or 1.0
        packed = struct.pack(f"<{len(kept)}f", *(number / length for number in kept))
        if self._body.encoding_format == "base64":
            return base64.b64encode(packed).decode()
        return list(struct.unpack(f"<{len(kept)}f", packed))
