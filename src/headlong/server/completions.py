"""`/v1/completions`: texts or token ids, continued. Several prompts in one request run side by side."""

import time
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headlong.errors import RequestError
from headlong.params import Grammar
from headlong.server import accounting
from headlong.server.admission import admit
from headlong.server.body import read_json
from headlong.server.errors import ApiError
from headlong.server.generation import Choice, Job, Piece, Result
from headlong.server.logprobs import prompt_shown
from headlong.server.model import Model
from headlong.server.prompting import (
    check_drafting,
    check_told,
    output_tokens,
    requested_grammar,
    sampling_fields,
    truncated,
)
from headlong.server.renaming import composed, fields_named
from headlong.server.reply import DONE, event
from headlong.server.schemas.completions import CompletionRequest
from headlong.server.settings import Settings
from headlong.server.trace import Tracer
from headlong.text.infill import fill_in
from headlong.text.tokenizer import Tokenizer
from headlong.types import ReadToken, TokenLogprobs

DEFAULT_TOKENS = 16
"""OpenAI's default of `max_tokens` for this endpoint."""


async def completions(request: Request) -> Response:
    body = await read_json(request, CompletionRequest)
    job_id = f"cmpl-{request.state.id}"
    settings = request.app.state.server.settings
    make = partial(_job, body=body, settings=settings, job_id=job_id)
    with fields_named(composed(sampling_fields(body), request.state.renamed)):
        model, exchange = await admit(request, body.model, len(body.prompts) * (body.n or 1), make)
    encoder = CompletionEncoder(model, body, exchange.job)
    return exchange.stream(encoder) if body.stream else await exchange.whole(encoder)


def _job(model: Model, body: CompletionRequest, settings: Settings, job_id: str) -> Job:
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise RequestError("best_of: must be equal to n; every choice is returned")
    check_drafting(model, body)
    echoed = body.logprobs if body.echo else None
    if body.stream and (echoed is not None or body.prompt_logprobs is not None):
        name = "prompt_logprobs" if echoed is None else "echo"
        raise RequestError(f"{name}: log-probabilities of a prompt are not for streams; set stream to false")
    prompts = tuple(
        truncated(model, _prompt(model, body, prompt), body.truncate_prompt_tokens) for prompt in body.prompts
    )
    grammar: Grammar | None = requested_grammar(body, body.response_format)
    params = body.params(
        model.sampling,
        max_tokens=output_tokens(model, settings, max(map(len, prompts)), body.max_tokens or DEFAULT_TOKENS),
        logprobs=body.logprobs,
        grammar=grammar,
    )
    if echoed is not None:
        params = replace(params, prompt_logprobs=max(echoed, body.prompt_logprobs or 0))
    check_told(prompts, params)
    return Job(job_id, "completions", prompts, params)


def _prompt(model: Model, body: CompletionRequest, prompt: str | list[int]) -> tuple[int, ...]:
    codec = model.client.text
    if not body.suffix:
        return codec.encode(prompt, body.add_special_tokens is not False)
    if body.echo:
        raise RequestError("echo: does not go with suffix; remove one of them")
    if codec.tokenizer is None:
        raise RequestError("suffix: this model has no tokenizer.json; remove it")
    return fill_in(codec.tokenizer, prompt, body.suffix, most=codec.most_tokens)


class CompletionEncoder:
    """Encodes answers as OpenAI's text completion objects; chunks have the same form."""

    def __init__(self, model: Model, body: CompletionRequest, job: Job) -> None:
        self._body = body
        self._prompts = job.prompts
        self._tokenizer = model.client.text.tokenizer
        self._head = {
            "id": job.id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model or model.id,
        }
        self._unfinished = len(body.prompts) * (body.n or 1)
        self._offsets: dict[int, int] = {}
        trace = body.speculative is not None and body.speculative.trace
        self._tracer = Tracer(self._tokenizer) if trace else None

    def start(self) -> str:
        if not self._body.echo:
            return ""
        return "".join(
            event(self._head | {"choices": [_choice(index, self._echo(index))]})
            for index in range(self._unfinished)
        )

    def piece(self, piece: Piece) -> str:
        extra = {} if self._tracer is None else self._tracer.step(piece)
        logprobs = self._logprobs(piece.index, piece.chunk.logprobs) if piece.chunk.logprobs else None
        text = ""
        if piece.chunk.text or logprobs or extra:
            text = event(
                self._head | {"choices": [_choice(piece.index, piece.chunk.text, logprobs=logprobs)]} | extra
            )
        if piece.chunk.finish_reason is None:
            return text
        self._unfinished -= 1
        # The last choice's end waits for `end`, which has the figures that belong to it.
        self._last = _choice(piece.index, "", finish_reason=piece.chunk.finish_reason)
        return text + (event(self._head | {"choices": [self._last]}) if self._unfinished else "")

    def end(self, result: Result) -> str:
        text = event(self._head | {"choices": [self._last]} | accounting.figures(result))
        options = self._body.stream_options
        if options is not None and options.include_usage:
            text += event(self._head | {"choices": [], "usage": accounting.usage(result, 0)})
        return text + DONE

    def error(self, error: ApiError) -> str:
        return event(error.openai()) + DONE

    def whole(self, result: Result) -> dict[str, Any]:
        choices = [self._whole_choice(choice) for choice in result.choices]
        usage = {"usage": accounting.usage(result, 0)}
        return self._head | {"choices": choices} | usage | accounting.figures(result)

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        done = choice.done
        read = done.prompt_logprobs if self._body.echo and self._body.logprobs is not None else None
        logprobs = None if done.logprobs is None else self._logprobs(choice.index, done.logprobs, read)
        text = (self._echo(choice.index) if self._body.echo else "") + choice.content
        told = _choice(choice.index, text, logprobs=logprobs, finish_reason=done.finish_reason)
        if self._body.prompt_logprobs is not None and done.prompt_logprobs is not None:
            told["prompt_logprobs"] = prompt_shown(self._tokenizer, done.prompt_logprobs)
        return told

    def _echo(self, index: int) -> str:
        prompt = self._body.prompts[index // (self._body.n or 1)]
        if isinstance(prompt, str):
            return prompt
        return "" if self._tokenizer is None else self._tokenizer.decode(prompt)

    def _logprobs(
        self,
        index: int,
        logprobs: tuple[TokenLogprobs, ...],
        read: tuple[ReadToken, ...] | None = None,
    ) -> dict[str, Any]:
        """Encodes log-probabilities in OpenAI's older form: lists side by side. Offsets go on from chunk to chunk. An
        echoed prompt was `read`; of its first token nothing is known."""
        first = [] if read is None else [self._prompts[index // (self._body.n or 1)][0]]
        logprobs = (*(one.logprobs for one in read or ()), *logprobs)
        names = [_name(self._tokenizer, token) for token in [*first, *(one.token_id for one in logprobs)]]
        offset, offsets = self._offsets.get(index, 0), []
        for name in names:
            offsets.append(offset)
            offset += len(name)
        self._offsets[index] = offset
        return {
            "tokens": names,
            "token_logprobs": [None] * len(first) + [max(one.logprob, -9999.0) for one in logprobs],
            "top_logprobs": [None] * len(first)
            + [
                {
                    _name(self._tokenizer, token): max(logprob, -9999.0)
                    for token, logprob in reversed(one.top[: self._body.logprobs])
                }
                for one in logprobs
            ],
            "text_offset": offsets,
        }


def _name(tokenizer: Tokenizer | None, token: int) -> str:
    return f"token_id:{token}" if tokenizer is None else tokenizer.token_text(token)


def _choice(
    index: int, text: str, *, logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
