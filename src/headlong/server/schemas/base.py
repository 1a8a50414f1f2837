"""What the request bodies of all endpoints share: strictness, sampling fields, drafting, output forms.

Schemas check types and names; ranges that the engine knows are checked by `SamplingParams`, once. What becomes of
fields that no schema has is said by the `rules` beside them.
"""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema

from headlong.errors import RequestError
from headlong.params import MIN_REPETITION_PENALTY, Grammar, GrammarKind, SamplingParams
from headlong.server.schemas.fields import openai as fields
from headlong.server.schemas.rules import Rules
from headlong.server.schemas.variants import failing_fast, told
from headlong.server.settings import SAMPLING_FIELDS

MAX_STOPS, MAX_STOP_CHARS = 16, 1000
MAX_BIASES, MAX_BANNED_TOKENS, MAX_BANNED_STRINGS, MAX_CHOICES = 10_000, 1 << 16, 1000, 10_000
MAX_PARTS = 10_000
"""The most parts of one message."""
MAX_IDS = 1 << 20
MAX_SCHEMA_CHARS = 1 << 18
MAX_GRAMMAR_CHARS = 1 << 16
"""A grammar's syntax is told by so much of it; no longer one is compiled."""
_GBNF_RULE = re.compile(r"^[^\S\n]*[\w-]+[^\S\n]*::=", re.MULTILINE)
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
TokenId = Annotated[int, Field(ge=0, le=2**31)]


class Strict(BaseModel):
    """No conversions, no NaN, and no fields but its own: `headlong.server.sifting` takes out the others first."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    rules: ClassVar[Rules] = {}
    """What becomes of fields that are not its own."""
    closed: ClassVar[bool] = False
    """Whether fields that have no rule either are refused: it is Headlong's own, or decides the output's form."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return failing_fast(handler(source))


class Ours(Strict):
    """An object of which every field counts."""

    closed: ClassVar[bool] = True


class Speculative(Ours):
    """Drafting for one request."""

    mtp: Annotated[
        Literal["auto", "on", "off"] | Annotated[int, Field(ge=0, le=2**31)],
        told("must be 'auto', 'on', 'off' or a whole number, 0 or more"),
    ] = "auto"
    """`auto`: the server's depth; `on`: refuse if this model cannot draft; K: this depth; `off` or 0: plain."""
    verify: Literal["coupled", "ratio", "block"] = "coupled"
    trace: bool = False
    """Whether chunks say which tokens were drafted and which drafts were refused."""

    @property
    def draft_tokens(self) -> int | None:
        if isinstance(self.mtp, int):
            return self.mtp
        return 0 if self.mtp == "off" else None


class JsonSchema(Strict):
    """OpenAI's wrapper around a schema. Output always follows the schema, strict or not."""

    name: str = Field(default="output", max_length=64)
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Ours):
    """The form of the output. The types `regex` and `grammar` go beyond OpenAI's API."""

    rules: ClassVar[Rules] = fields.RESPONSE_FORMAT

    type: Literal["text", "json_object", "json_schema", "regex", "grammar"]
    json_schema: JsonSchema | None = None
    pattern: str | None = None
    grammar: str | None = None
    syntax: Literal["lark", "gbnf"] = "lark"

    def as_grammar(self, field: str) -> Grammar | None:
        given = {name for name in ("json_schema", "pattern", "grammar") if getattr(self, name) is not None}
        wanted = {"json_schema": "json_schema", "regex": "pattern", "grammar": "grammar"}.get(self.type)
        if wanted is not None and wanted not in given:
            raise RequestError(f"{field}.{wanted} is missing; type {self.type!r} needs it")
        for name in given - {wanted}:
            raise RequestError(f"{field}.{name} does not go with type {self.type!r}; remove one of them")
        match self.type:
            case "text":
                return None
            case "json_object":
                return Grammar("json_object")
            case "json_schema":
                assert self.json_schema is not None
                if self.json_schema.schema_ is None:
                    raise RequestError(f"{field}.json_schema.schema is missing")
                return Grammar("json_schema", _dumped(self.json_schema.schema_, field))
            case "regex":
                return Grammar("regex", self.pattern or "")
            case "grammar":
                return Grammar(self.syntax, self.grammar or "")


class StructuredOutputs(Ours):
    """vLLM's object for the form of the output; exactly one of its fields is given."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(default=None, max_length=MAX_CHOICES)
    grammar: str | None = None
    json_object: bool | None = None

    def as_grammar(self) -> Grammar:
        schema = self.json_
        if isinstance(schema, dict):
            schema = _dumped(schema, "structured_outputs.json")
        forms = {
            "json": None if schema is None else Grammar("json_schema", schema),
            "regex": None if self.regex is None else Grammar("regex", self.regex),
            "choice": None if self.choice is None else Grammar("choice", json.dumps(self.choice)),
            "grammar": None if self.grammar is None else Grammar(_syntax(self.grammar), self.grammar),
            "json_object": Grammar("json_object") if self.json_object else None,
        }
        given = [form for form in forms.values() if form is not None]
        if len(given) != 1:
            raise RequestError(f"structured_outputs must have exactly one of {', '.join(forms)}")
        return given[0]


class Sampling(Strict):
    """Sampling fields that OpenAI's endpoints and vLLM's extensions have in common."""

    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=2**31)
    """How many of the likeliest tokens are kept; -1 or 0 keeps all."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    presence_penalty: float | None = Field(default=None, ge=-100, le=100)
    frequency_penalty: float | None = Field(default=None, ge=-100, le=100)
    repetition_penalty: float | None = Field(default=None, ge=MIN_REPETITION_PENALTY, le=100)
    seed: int | None = Field(default=None, ge=0, le=2**63 - 1)
    """The seed of the noise; without it, each request draws a new one."""
    logit_bias: dict[str, float] | None = Field(default=None, max_length=MAX_BIASES)
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: list[TokenId] | None = Field(default=None, max_length=64)
    bad_token_ids: list[TokenId] | None = Field(default=None, max_length=MAX_BANNED_TOKENS)
    banned_strings: list[Stop] | None = Field(default=None, max_length=MAX_BANNED_STRINGS)
    """Strings that the answer never has, however its tokens cut them; small and capital letters count alike."""
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = Field(default=None, ge=0, le=20)
    """Log-probabilities of the prompt's tokens and of so many alternatives; not for streams."""
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1, le=2**31)
    """How many of the prompt's last tokens are read; -1 is as many as fit."""
    min_tokens: int | None = Field(default=None, ge=0, le=2**31)
    ignore_eos: bool | None = None
    n: int | None = Field(default=None, ge=1, le=128)
    priority: int | None = Field(default=None, ge=-1_000_000, le=1_000_000)
    """The urgency of the request: lower numbers go first."""
    speculative: Speculative | None = None
    structured_outputs: StructuredOutputs | None = None

    def params(
        self,
        defaults: Mapping[str, Any],
        *,
        max_tokens: int,
        logprobs: int | None,
        grammar: Grammar | None,
    ) -> SamplingParams:
        """The sampling parameters as the engine has them; what the request leaves open is taken from `defaults`."""
        given = {name: getattr(self, name) for name in SAMPLING_FIELDS if getattr(self, name) is not None}
        if given.get("top_k") == -1:
            given["top_k"] = 0
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        speculative = self.speculative or Speculative()
        return SamplingParams(
            **(dict(defaults) | given),
            max_tokens=max_tokens,
            seed=self.seed,
            logit_bias=_token_bias(self.logit_bias or {}),
            stop=tuple(stops),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            bad_token_ids=tuple(self.bad_token_ids or ()),
            banned_strings=tuple(self.banned_strings or ()),
            include_stop=bool(self.include_stop_str_in_output),
            skip_special_tokens=self.skip_special_tokens is not False,
            prompt_logprobs=self.prompt_logprobs,
            min_tokens=self.min_tokens or 0,
            ignore_eos=bool(self.ignore_eos),
            n=self.n or 1,
            priority=self.priority or 0,
            logprobs=logprobs,
            draft_tokens=speculative.draft_tokens,
            verify=speculative.verify,
            grammar=grammar,
        )


class StreamOptions(Strict):
    rules: ClassVar[Rules] = fields.STREAM_OPTIONS
    include_usage: bool = False


def _dumped(schema: dict[str, Any], field: str) -> str:
    """A schema as text, written piece by piece: other threads run in between, and one that is far too long is not
    written to its end."""
    pieces, length = [], 0
    for piece in _ENCODER.iterencode(schema):
        pieces.append(piece)
        length += len(piece)
        if length > MAX_SCHEMA_CHARS:
            raise RequestError(f"{field}: the schema has more than {MAX_SCHEMA_CHARS} characters; shorten it")
    return "".join(pieces)


_ENCODER = json.JSONEncoder()


def _syntax(grammar: str) -> GrammarKind:
    """GBNF has `::=` between a rule's name and what it stands for, Lark has `:`."""
    return "gbnf" if _GBNF_RULE.search(grammar, 0, MAX_GRAMMAR_CHARS) else "lark"


def _token_bias(bias: dict[str, float]) -> dict[int, float]:
    for token in bias:
        if not token.isascii() or not token.isdecimal() or len(token) > 10:
            raise RequestError(f"logit_bias: {token[:40]!r} is not a token id; keys are ids as digits")
    return {int(token): value for token, value in bias.items()}
