"""The body of `/v1/completions`, and of the two token endpoints."""

from typing import Annotated, ClassVar

from pydantic import Field

from headlong.server.schemas.base import MAX_IDS, ResponseFormat, Sampling, StreamOptions, Strict, TokenId
from headlong.server.schemas.fields import openai as fields
from headlong.server.schemas.rules import Rules

MAX_PROMPTS = 128
Ids = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_IDS)]


class CompletionRequest(Sampling):
    """A request to OpenAI's older endpoint, which continues a text or token ids."""

    rules: ClassVar[Rules] = fields.COMPLETION
    prompt: str | Ids | Annotated[list[str | Ids], Field(min_length=1, max_length=MAX_PROMPTS)]
    model: str | None = Field(default=None, max_length=512)
    max_tokens: int | None = Field(default=None, ge=1, le=2**31)
    add_special_tokens: bool | None = None
    """Whether the tokenizer puts its special tokens around a text."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool | None = None
    suffix: str | None = Field(default=None, max_length=1 << 20)
    """The text after the gap that is filled, for models that were trained to."""
    best_of: int | None = Field(default=None, ge=1, le=128)
    response_format: ResponseFormat | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return self.prompt  # type: ignore[return-value]


class EncodeRequest(Strict):
    text: str
    model: str | None = Field(default=None, max_length=512)
    add_special_tokens: bool = True
    """Whether the tokenizer puts its special tokens around a text; those written out in the text are read either
    way."""


class DecodeRequest(Strict):
    tokens: list[TokenId] = Field(max_length=MAX_IDS)
    model: str | None = Field(default=None, max_length=512)
    skip_special_tokens: bool = False
