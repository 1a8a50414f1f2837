"""What a model's folder says of text: tokenizer, chat template, recommended sampling; read and checked as for serving.

`Service` loads a model with it and `inspect` asks it for a verdict, so that both refuse the same. Knows no weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headlong.checkpoint import generation
from headlong.checkpoint.checkpoint import Checkpoint
from headlong.checkpoint.source import EMBEDDED
from headlong.config import EngineConfig
from headlong.errors import CheckpointError, ConfigError, RequestError
from headlong.params import SamplingParams
from headlong.text.gguf_tokenizer import tokenizer_from_gguf
from headlong.text.sentencepiece_tokenizer import tokenizer_from_sentencepiece
from headlong.text.template import ChatTemplate, read_template
from headlong.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Texts:
    """What was read; a folder without a tokenizer has no template either."""

    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    recommended: Mapping[str, Any]
    """The generation_config that says how to sample where a request does not."""

    @classmethod
    def read(cls, checkpoint: Checkpoint, config: EngineConfig) -> "Texts":
        """Reads all of it, or raises what is wrong with it."""
        recommended = generation.chosen(config.generation_config, checkpoint.generation_config)
        # A process that maps no files serves others, whom no file may end; what came with Headlong is known.
        tokenizer = _tokenizer(checkpoint, apart=not config.map_files and checkpoint.folder != EMBEDDED)
        return cls(tokenizer, _template(tokenizer, config.chat_template), recommended)


def recommended_params(recommended: Mapping[str, Any], folder: Path, **overrides: Any) -> SamplingParams:
    """Sampling as a generation_config recommends, with changes of one's own."""
    length = generation.output_tokens(recommended)
    given: dict[str, Any] = {} if length is None else {"max_tokens": length}
    try:
        return SamplingParams(**(given | generation.sampling(recommended) | overrides))
    except RequestError as error:
        raise ConfigError(f"generation_config.json of {folder} or the changes to it: {error}") from error


def _tokenizer(checkpoint: Checkpoint, *, apart: bool) -> Tokenizer | None:
    """A tokenizer.json in the folder, else what a GGUF file carries, else a SentencePiece model in the folder."""
    if checkpoint.folder.is_dir():
        found = Tokenizer.from_folder(checkpoint.folder, apart=apart)
        if found is not None:
            return found
    if not checkpoint.is_gguf:
        return tokenizer_from_sentencepiece(checkpoint.folder)
    try:
        return tokenizer_from_gguf(checkpoint.metadata)
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.folder}: {error}") from error


def _template(tokenizer: Tokenizer | None, wanted: str | None) -> ChatTemplate | None:
    """The model's own chat template, or the one that is wanted in its place: a file, or the template itself."""
    if tokenizer is None:
        return None
    own = tokenizer.chat_template
    if wanted is None:
        return ChatTemplate(own, tokenizer.special_tokens) if own else None
    try:
        return ChatTemplate(read_template(wanted), tokenizer.special_tokens)
    except RequestError as error:
        raise ConfigError(str(error)) from None
