"""Trains small SentencePiece models and keeps them as test fixtures with what the libraries themselves encode.

    python release/sentencepiece_fixtures.py tests/data/sentencepiece

Needs sentencepiece 0.2.3 and transformers 5.23.0, which nothing else here does. `texts.json` has several hundred texts
and their ids by SentencePiece for each model; `chats.json` texts with special tokens and their ids by transformers, for
each way in which a tokenizer_config.json may ask for the space in front.
"""

import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import sentencepiece
from transformers import LlamaTokenizer

DOCS = Path(__file__).parent.parent / "docs"
OTHERS = (
    *("Der schnelle braune Fuchs springt über den faulen Hund.", "Où est-il allé ? À côté de l'école."),
    *(
        "El niño juega, ¿dónde está?",
        "日本語の文章を少し入れておく。",
        "Привет, мир! Как дела?",
        "안녕하세요 세계",
    ),
    *("def f(x):\n    return x + 1", "naïve café résumé"),
)
RULES = {
    "\u3000": " ",
    "\u00a0": " ",
    "\ufb01": "fi",
    "\uff21": "A",
    "\uff41": "a",
    "\u00bd": "1/2",
    "\u200b": "",
    "\uff8a": "\u30cf",
    "\uff8a\uff9f": "\u30d1",
    "\u1112\u1161": "\ud558",
    "\u1112\u1161\u11ab": "\ud55c",
    "e\u0301": "\u00e9",
    "\u2025\u2025\u2025": "!",
}
"""What is replaced by the models that replace anything: a table of a few bytes. Some keys have several characters, and
some are the beginning of others, as in the tables of NFKC."""
KINDS: dict[str, dict[str, Any]] = {
    "bpe": {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
        "split_digits": True,
        "user_defined_symbols": ["<tool>"],
        "control_symbols": ["<pad>"],
    },
    "unigram": {"model_type": "unigram", "byte_fallback": True, "user_defined_symbols": ["<tool>"]},
    "plain": {"model_type": "unigram", "byte_fallback": False, "add_dummy_prefix": False},
}
ODD = (
    *(
        "",
        " ",
        "  ",
        "\n",
        "a",
        " a",
        "a ",
        "  a  b  ",
        "▁",
        "▁a",
        " ▁a▁▁b ",
        "<0x41>",
        "a<0x0A>b<0",
        "\tx\ty",
    ),
    *(
        "é",
        "e\u0301",
        "e\u0301\u0323x",
        "\ufb01 ligature",
        "①②",
        "Ａａ　ｄ",
        "\u00a0x\u00a0y",
        "\u200b\u200dx\u200b",
        "\u200b",
    ),
    *(
        "👩\u200d👩\u200d👧 family",
        "🇩🇪🏳\ufe0f\u200d🌈",
        "字字字",
        "\u1112\u1161\u11ab",
        "नमस्ते",
        "שלום",
        "a\0b",
        "\ufeffbom",
        "x\r\ny",
    ),
    *(
        "…—–“”",
        "𝔘𝔫𝔦",
        "\U0010ffff",
        "ﷺ",
        "½ ¾",
        "ß ẞ ſ",
        "İıI",
        "a" * 13,
        "ab" * 6,
        "1234567890",
        "    in\n        more",
        "\n\n\n",
    ),
)
POOL = "abcdefghijklmnop  \n\t.,<>|#é字ü\u0301\u200d▁ΩЯ한🙂\u00a0ａ½"
JOINED = "ee\u0301\u0301\uff8a\uff9f\u1112\u1161\u11ab\u2025\u2025\u00bd\u200d a"
CHATS = (
    *(
        "<s>[INST] Hello world [/INST]",
        "Hello</s>world</s><s>again",
        "<tool>x<tool>y",
        "a<pad>b",
        "<new>then this",
    ),
    *("before <new>after", "<unk>here", "one\n<new>\ntwo", "<new>", "", "Hello  world "),
)
SPACED = (
    "Hello</s> world</s><s>again",
    "<tool>x<tool> y",
    "a<pad>  b",
    "before <new> after",
    "x<new>▁x",
    "<unk> here",
)
"""Texts with a space after a special token, which the library takes for the space that it was to put there."""
CONFIGS = {
    "legacy": {"legacy": True, "add_bos_token": True},
    "first": {"legacy": False, "add_bos_token": True},
    "never": {"legacy": False, "add_prefix_space": False, "add_bos_token": False},
    "ended": {"legacy": False, "add_bos_token": True, "add_eos_token": True},
}


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    lines = [
        line for file in sorted(DOCS.glob("*.md")) for line in file.read_text().splitlines() if line.strip()
    ]
    found = {}
    texts = list(_texts(lines))
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        (work / "corpus").write_text("\n".join([*lines, *OTHERS * 6]))
        rules = [[" ".join(f"{ord(c):X}" for c in side) for side in rule] for rule in RULES.items()]
        (work / "rules").write_text("".join("\t".join(rule) + "\n" for rule in rules))
        for name, how in KINDS.items():
            how = {"normalization_rule_tsv": str(work / "rules")} | how
            if "normalization_rule_name" in how:
                del how["normalization_rule_tsv"]
            sentencepiece.SentencePieceTrainer.train(
                input=str(work / "corpus"),
                model_prefix=str(out / name),
                vocab_size=600,
                hard_vocab_limit=False,
                num_threads=1,
                character_coverage=0.995,
                minloglevel=2,
                **how,
            )
            (out / f"{name}.vocab").unlink()
            model = sentencepiece.SentencePieceProcessor(model_file=str(out / f"{name}.model"))
            found[name] = [model.encode(text) for text in texts]
        (out / "texts.json").write_text(_lines({"texts": texts, **found}))
        (out / "chats.json").write_text(_lines(_chats(out / "bpe.model", work)))


def _texts(lines: list[str]) -> list[str]:
    chance = random.Random(5)
    some = [chance.choice(lines)[: chance.randint(5, 90)] for _ in range(120)]
    mixed = ["".join(chance.choice(POOL) for _ in range(chance.randint(1, 24))) for _ in range(120)]
    joined = ["".join(chance.choice(JOINED) for _ in range(chance.randint(1, 16))) for _ in range(80)]
    spans = ((1, 0x2FF), (0x300, 0xD7FF), (0xE000, 0x1FFFF))
    wild = [
        "".join(chr(chance.randint(*chance.choice(spans))) for _ in range(chance.randint(1, 8)))
        for _ in range(60)
    ]
    return [*ODD, *some, *mixed, *wild, *joined]


def _chats(model: Path, work: Path) -> dict[str, Any]:
    """By the library's own class for such folders."""
    found: dict[str, Any] = {}
    for name, config in CONFIGS.items():
        folder = work / name
        folder.mkdir()
        (folder / "tokenizer.model").write_bytes(model.read_bytes())
        size = len(sentencepiece.SentencePieceProcessor(model_file=str(model)))
        added = {str(size): {"content": "<new>", "special": False, "normalized": False}}
        config = {"tokenizer_class": "LlamaTokenizer", "added_tokens_decoder": added, **config}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        tokenizer = LlamaTokenizer.from_pretrained(folder)
        texts = CHATS if config["legacy"] else CHATS + SPACED
        found[name] = {"config": config, "ids": {text: tokenizer.encode(text) for text in texts}}
    return found


def _lines(found: dict[str, Any]) -> str:
    return json.dumps(found, ensure_ascii=True, separators=(",", ":")) + "\n"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
