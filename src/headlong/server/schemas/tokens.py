"""The bodies of `/tokenize` and `/detokenize`, which vLLM and llama.cpp's server both have with other fields."""

from typing import Any, ClassVar

from pydantic import Field

from headlong.server.schemas.base import MAX_IDS, Strict, TokenId
from headlong.server.schemas.chat import MAX_TOOLS, Message, Tool
from headlong.server.schemas.fields.peers import ADVICE
from headlong.server.schemas.rules import Rules, unsupported


class TokenizeRequest(Strict):
    """A text as `prompt` (vLLM) or `content` (llama.cpp), or `messages`, which the chat template makes a text of."""

    rules: ClassVar[Rules] = {
        **ADVICE,
        **unsupported(
            "tokens that are written out are always read; leave it out", "parse_special", harmless=(True,)
        ),
        **unsupported("the checkpoint's own template serves; leave it out", "chat_template"),
    }
    model: str | None = Field(default=None, max_length=512)
    prompt: str | None = None
    content: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1, max_length=10_000)
    tools: list[Tool] | None = Field(default=None, max_length=MAX_TOOLS)
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    """Whether the tokenizer puts its special tokens around a `prompt`."""
    return_token_strs: bool | None = None
    add_special: bool | None = None
    """The same for `content`, for which it does not unless it is told to."""
    with_pieces: bool | None = None
    """Whether each token of `content` comes with its text."""


class DetokenizeRequest(Strict):
    rules: ClassVar[Rules] = ADVICE
    tokens: list[TokenId] = Field(max_length=MAX_IDS)
    model: str | None = Field(default=None, max_length=512)
