"""The body of `/v1/embeddings`."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from headlong.params import Pooling
from headlong.server.schemas.base import Strict
from headlong.server.schemas.completions import Ids
from headlong.server.schemas.fields.peers import ADVICE
from headlong.server.schemas.rules import Rules, unsupported

MAX_INPUTS = 2048


class EmbeddingsRequest(Strict):
    """Texts or token ids, each of which becomes one vector of length 1."""

    rules: ClassVar[Rules] = {
        **ADVICE,
        **unsupported("send texts as input", "messages", "prompt", "content"),
        **unsupported(
            "prompts are never cut; send what fits the context", "truncate_prompt_tokens", "truncate"
        ),
        **unsupported(
            "vectors have length 1; leave it out", "normalize", "embd_normalize", harmless=(True, 2)
        ),
    }
    input: str | Ids | Annotated[list[str | Ids], Field(min_length=1, max_length=MAX_INPUTS)]
    model: str | None = Field(default=None, max_length=512)
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, ge=1, le=1 << 20)
    """How many of a vector's first numbers are kept; what is kept has length 1 again."""
    pooling: Pooling = "mean"
    """What a vector is made of: the mean of the model's last hidden states, or that of the last token."""

    @property
    def inputs(self) -> list[str | list[int]]:
        if isinstance(self.input, str):
            return [self.input]
        if isinstance(self.input[0], int):
            return [self.input]  # type: ignore[list-item]
        return self.input  # type: ignore[return-value]
