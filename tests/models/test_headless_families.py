"""Families that bring no head draft in three ways, and every one of them leaves the tokens as they are: with n-grams,
with a smaller model of the same vocabulary, and with a head that was grafted."""

from pathlib import Path
from typing import Any

import pytest

from headlong import LLM, SamplingParams
from headlong.checkpoint.checkpoint import Checkpoint
from headlong.convert.extract import extract
from headlong.convert.graft import graft
from headlong.convert.strip import strip
from headlong.errors import HeadError
from support import tiny
from support.tiny import random_tokens

FAMILIES = ("qwen2", "qwen3", "qwen3_moe", "mistral", "llama", "kimi_k2")
VOCABULARY = 6
"""Of few tokens, so that what was said is said again and a foreign model's drafts may be right."""
SMALL: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "vocab_size": VOCABULARY,
}


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(
        tmp_path_factory.mktemp("smaller") / "qwen2", "qwen2", seed=1, head=False, **SMALL
    ).folder


@pytest.fixture(scope="module", params=FAMILIES)
def bare(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without its head, which lies apart beside the folder."""
    folder = tmp_path_factory.mktemp(request.param)
    made = Checkpoint.open(tiny.make(folder / "made", request.param, seed=2, vocab_size=VOCABULARY).folder)
    strip(made, folder / "bare")
    extract(made, folder / "mtp.safetensors")
    return folder / "bare"


def tokens(model: Path, **options: object) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], int]:
    """Without drafts and with them, greedy and sampled, and how many drafts were accepted."""
    llm = LLM(model, device="cpu", cache_tokens=2048, max_context=128, **options)  # type: ignore[arg-type]
    prompts = [random_tokens(VOCABULARY, 4 + 9 * number, seed=number) for number in range(4)]
    found, accepted = [], 0
    for drafts in (0, 3):
        params = [
            SamplingParams(
                max_tokens=16, ignore_eos=True, temperature=0.9 * (n % 2), seed=n, draft_tokens=drafts
            )
            for n in range(4)
        ]
        done = llm.generate(prompts, params)
        found.append([completion.token_ids for completion in done])
        accepted += sum(completion.stats.accepted for completion in done)
    return found[0], found[1], accepted


def test_three_ways_to_draft(bare: Path, smaller: Path, tmp_path: Path) -> None:
    graft(bare, bare.parent / "mtp.safetensors", tmp_path / "grafted")
    texts = []
    for model, options in (
        (bare, {"proposer": "ngram"}),
        (bare, {"drafter": str(smaller)}),
        (tmp_path / "grafted", {"mtp": "on"}),
    ):
        plain, drafted, accepted = tokens(model, **options)
        assert drafted == plain and accepted
        texts.append(plain)
    assert texts[0] == texts[1] == texts[2]


def test_a_head_of_another_family_is_refused(bare: Path, tmp_path: Path) -> None:
    """In a sentence that names both, and so is one of the same family and other sizes."""
    donor = tiny.make(tmp_path / "donor", "dense", seed=3, vocab_size=VOCABULARY).folder
    with pytest.raises(
        HeadError, match=r"is the head of a qwen3_5 model, but .*; a head fits only the model"
    ):
        graft(bare, donor, tmp_path / "out")
    family = Checkpoint.open(bare).config["model_type"]
    wider = tiny.make(tmp_path / "wider", family, seed=3, vocab_size=VOCABULARY, hidden_size=64).folder
    with pytest.raises(
        HeadError, match=r"hidden_size 64, but .* has 48; a head fits only the model it was made"
    ):
        graft(bare, wider, tmp_path / "out")
    assert not (tmp_path / "out").exists()
