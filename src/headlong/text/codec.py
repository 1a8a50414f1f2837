"""Translates what people write into tokens and back, for one model: its tokenizer and its chat template together.

Knows no engine: whoever has the model's files has this, on whatever machine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headlong.errors import RequestError
from headlong.text.template import ChatTemplate
from headlong.text.tokenizer import Tokenizer

_END = "\ue000headlong\ue001"
"""Marks the end of a message that is continued, wherever a template puts it: characters for private use."""
CONTEXTS = 4
"""The most tokens that a text is encoded to, as a multiple of the engine's context."""
Message = Mapping[str, Any]
Prompt = str | Sequence[int]


@dataclass(frozen=True)
class TextCodec:
    """Immutable, and safe to use from several threads."""

    origin: str
    """Where the model's files are; complaints name it."""
    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    max_len: int | None = None
    """The context of the engine that reads the tokens; None where nobody said."""

    @property
    def most_tokens(self) -> int | None:
        """The most tokens that a text may have. More than fit the context: whoever counts tokens or has prompts cut
        sends such texts."""
        return None if self.max_len is None else CONTEXTS * self.max_len

    def encode(self, prompt: Prompt, add_special_tokens: bool = True) -> tuple[int, ...]:
        """The tokens of a text; token ids are passed on as they are."""
        if not isinstance(prompt, Sequence):
            raise RequestError(f"prompt must be text or a list of token ids, not {prompt!r}")
        if not isinstance(prompt, str):
            return tuple(prompt)
        if self.tokenizer is None:
            raise RequestError(
                f"prompt is text, but {self.origin} has no tokenizer.json; pass token ids or add the file"
            )
        return self._encode(prompt, add_special_tokens)

    def encode_chat(self, messages: Sequence[Message], **variables: Any) -> tuple[int, ...]:
        """The tokens of a conversation; further keywords go to the chat template."""
        return self.encode_rendered(self.render_chat(messages, **variables))

    def render_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt's text, as the model's own template writes it."""
        if self.tokenizer is None or self.template is None:
            missing = "tokenizer.json" if self.tokenizer is None else "chat template"
            raise RequestError(
                f"messages need a chat template, but {self.origin} has no {missing}; pass a prompt"
            )
        return self.template.render(list(messages), add_generation_prompt=add_generation_prompt, **variables)

    def render_open(self, messages: Sequence[Message], **variables: Any) -> str:
        """The prompt's text up to the end of the last message's content, which is to be continued."""
        *others, last = messages
        marked = {**last, "content": f"{last.get('content') or ''}{_END}"}
        text = self.render_chat([*others, marked], add_generation_prompt=False, **variables)
        if text.count(_END) != 1:
            raise RequestError(
                "messages: the chat template does not show the last message as it is, so it cannot be continued; "
                "end with a user's message"
            )
        return text[: text.index(_END)]

    def encode_rendered(self, text: str) -> tuple[int, ...]:
        """The tokens of a text that a template wrote: special tokens are in it already."""
        return self._encode(text, False)

    def _encode(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        assert self.tokenizer is not None, "whoever has a text for it asked for one"
        return tuple(self.tokenizer.encode(text, add_special_tokens, most=self.most_tokens))
