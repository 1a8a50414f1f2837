"""Makes requests of prompts and sampling parameters, and refuses those that could never run.

Knows no engine: whoever has the description of one and the model's texts makes the same requests, on any machine.
"""

import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace

from headlong.engine.client import Drafting
from headlong.errors import RequestError
from headlong.params import SamplingParams
from headlong.text.grammar import GrammarCompiler
from headlong.types import Constraint, Request


@dataclass(frozen=True)
class RequestMaker:
    """Makes the requests of one model. Immutable, and safe to use from several threads."""

    origin: str
    """Where the model's files are; complaints name it."""
    drafting: Drafting
    eos_ids: frozenset[int]
    grammars: GrammarCompiler | None = None
    """None where there is no tokenizer."""

    def make(self, prompt: tuple[int, ...], params: SamplingParams, id_prefix: str) -> list[Request]:
        """One request per choice; they share the seed and differ in the choice. Compiling a grammar that was
        not seen lately may take a second; any thread may do it."""
        seed = secrets.randbits(63) if params.seed is None else params.seed
        first = self.fitted(Request(f"{id_prefix}.0", prompt, params, seed))
        return [replace(first, id=f"{id_prefix}.{choice}", choice=choice) for choice in range(params.n)]

    def fitted(self, request: Request) -> Request:
        """The request with all that follows from its parameters on this model's engine: how deep it drafts, which
        tokens end it, what its output must obey."""
        params = request.params
        draft_tokens, adaptive = self._drafts(params)
        return replace(
            request,
            draft_tokens=draft_tokens,
            adaptive=adaptive,
            stop_ids=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_ids),
            constraint=self._constraint(params),
        )

    def _drafts(self, params: SamplingParams) -> tuple[int, bool]:
        """How deep a request drafts at most, its own wish or the engine's, 0 where nobody drafts; and whether less
        will do where that pays."""
        drafting = self.drafting
        if params.draft_tokens is None:
            # What `ratio` and `block` emit depends on the depth: it must not hang on how fast steps are.
            adaptive = drafting.adaptive and params.free
            return (drafting.wanted if adaptive else drafting.usual), adaptive
        if drafting.deepest and params.draft_tokens > drafting.deepest:
            raise RequestError(
                f"draft_tokens {params.draft_tokens} is above this engine's maximum of {drafting.deepest}; "
                "start it with a larger max_draft_tokens"
            )
        return min(params.draft_tokens, drafting.deepest), False

    def _constraint(self, params: SamplingParams) -> Callable[[], Constraint] | None:
        if not params.constrained:
            return None
        name = "banned_strings" if params.grammar is None else "grammar"
        if self.grammars is None:
            raise RequestError(
                f"{name} needs to know the text of tokens, but {self.origin} has no tokenizer.json; add the file"
            )
        if params.grammar is None:
            return self.grammars.ban(params.banned_strings, skip_special_tokens=params.skip_special_tokens)
        return self.grammars.compile(params.grammar)


def check(request: Request, vocab_size: int, max_len: int) -> None:
    """Refuses what could never run, naming the field."""
    params, known = request.params, len(request.prompt) + len(request.resumed)
    if not request.prompt:
        raise RequestError("prompt is empty: it needs at least one token")
    if len(request.prompt) >= max_len:
        raise RequestError(
            f"prompt has {len(request.prompt)} tokens; this engine's context is {max_len}, "
            "of which at least one must be left for the output"
        )
    if request.resumed and (len(request.resumed) >= params.max_tokens or known >= max_len):
        raise RequestError(f"resumed has {len(request.resumed)} tokens, which leave none to add")
    if request.resumed and not params.free:
        raise RequestError(
            f"resumed cannot be combined with verify {params.verify!r}, whose tokens depend on how it drafted"
        )
    if params.constrained and request.constraint is None:
        name = "banned_strings" if params.grammar is None else "grammar"
        raise RequestError(
            f"{name} was not compiled; make the request with the service that has the tokenizer"
        )
    named = {
        "prompt": request.prompt,
        "resumed": request.resumed,
        "bad_token_ids": params.bad_token_ids,
        "stop_token_ids": params.stop_token_ids,
        "logit_bias": tuple(params.logit_bias),
    }
    for name, tokens in named.items():
        for token in tokens:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
                raise RequestError(f"{name}: {token!r} is not a token id; the vocabulary has {vocab_size}")
    banned = {*params.bad_token_ids, *(t for t, bias in params.logit_bias.items() if bias == -math.inf)}
    if len(banned | (request.stop_ids if params.min_tokens else set())) >= vocab_size:
        raise RequestError("bad_token_ids, logit_bias and min_tokens together leave no token to choose from")
