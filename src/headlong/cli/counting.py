"""What `headlong tune --draft-vocab` counts: the tokens of text files, or of the model's own answers."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from headlong.cli.prompts import BUILT_IN, encode
from headlong.cli.terminal import say
from headlong.errors import ConfigError
from headlong.params import SamplingParams

if TYPE_CHECKING:
    from headlong.llm import LLM

PART = 1 << 20
"""Characters that are encoded at once, up to the end of a line."""
ANSWER_TOKENS = 512


def count_and_store(llm: "LLM", size: int, files: list[str]) -> None:
    """Prints what was found. Counts that are stored already stay, unless files are given."""
    from headlong.engine.draft_vocab import count_tokens
    from headlong.speculate import frequencies

    tokenizer = llm.text.tokenizer
    if tokenizer is None:
        raise ConfigError(
            "--draft-vocab N counts tokens, but the model has no tokenizer.json; give a file of token ids"
        )
    known = None if files else frequencies.load(tokenizer.fingerprint)
    if known is not None:
        say(f"the {size} most frequent tokens by {frequencies.path_of(tokenizer.fingerprint)}")
        return
    counts = count_tokens(tokenizer, _parts(files)) if files else _answers(llm)
    total = counts.total()
    if not total:
        raise ConfigError("--text: nothing to count in there; give files with text")
    kept = sum(count for _, count in counts.most_common(size)) / total
    say(f"counted {total} tokens, {len(counts)} of them different; {size} make up {kept:.1%}")
    say(f"stored in {frequencies.save(tokenizer.fingerprint, counts)}")


def _parts(files: list[str]) -> Iterator[str]:
    for file in files:
        try:
            with Path(file).open(encoding="utf-8") as lines:
                while part := "".join(lines.readlines(PART)):
                    yield part
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--text {file}: cannot be read as text ({error})") from error


def _answers(llm: "LLM") -> Counter[int]:
    prompts = [encode(llm, prompt, raw=False) for prompt in BUILT_IN]
    room = min(llm.description.max_len - len(prompt) for prompt in prompts)
    params = SamplingParams(max_tokens=min(ANSWER_TOKENS, room), temperature=0.7, seed=0)
    counts: Counter[int] = Counter()
    for completion in llm.generate(prompts, params):
        counts.update(completion.token_ids)
    return counts
