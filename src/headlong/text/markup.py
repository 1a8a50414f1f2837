"""The tokens by which models structure their output.

Some vocabularies list them as special, others do not. They are always text here, since reasoning and tool calls could
not be found in the output otherwise.
"""

from collections.abc import Iterable

from headlong.text.reasoning import MISTRAL, THINK
from headlong.text.tools import deepseek, dsml, glm, harmony, kimi, llama, mistral

MARKUP = frozenset(
    (
        *(THINK.start, THINK.end, MISTRAL.start, MISTRAL.end),
        *(*glm.MARKUP, *deepseek.MARKUP, *dsml.MARKUP, *kimi.MARKUP, *mistral.MARKUP, *llama.MARKUP),
    )
)
"""Tokens that have this meaning wherever they are."""


def markup_of(tokens: Iterable[str]) -> frozenset[str]:
    """The markup in a vocabulary of these added tokens. Some of harmony's have other meanings elsewhere, so they count
    only where all of them are."""
    known = frozenset(tokens)
    messages = frozenset(harmony.MARKUP)
    return MARKUP & known | (messages if messages <= known else frozenset())
