"""Folders with a tokenizer.model alone: ids of SentencePiece and of transformers, damaged files, a model that serves.

What the libraries encode is kept in tests/data/sentencepiece, written by `release/sentencepiece_fixtures.py`.
"""

import contextlib
import json
import random
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from headlong import LLM, SamplingParams
from headlong.checkpoint.source import EMBEDDED
from headlong.errors import CheckpointError, RequestError
from headlong.text.charsmap import Charsmap
from headlong.text.sentencepiece_model import read_model
from headlong.text.sentencepiece_tokenizer import SentencePieceTokenizer, tokenizer_from_sentencepiece

DATA = Path(__file__).parent.parent / "data" / "sentencepiece"
TEXTS = json.loads((DATA / "texts.json").read_text())
CHATS = json.loads((DATA / "chats.json").read_text())


def read_pieces(model: str) -> list[str]:
    return read_model(DATA / f"{model}.model").tokens


def built(folder: Path, model: str = "bpe", **files: Any) -> SentencePieceTokenizer:
    shutil.copy(DATA / f"{model}.model", folder / "tokenizer.model")
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    tokenizer = tokenizer_from_sentencepiece(folder)
    assert isinstance(tokenizer, SentencePieceTokenizer)
    return tokenizer


@pytest.mark.parametrize("model", ["bpe", "unigram", "plain"])
def test_ids_are_those_of_sentencepiece(tmp_path, model):
    tokenizer = built(tmp_path, model)
    replaces = bool(read_model(tmp_path / "tokenizer.model").charsmap)
    assert replaces == (model != "bpe") and len(TEXTS["texts"]) > 400
    for text, wanted in zip(TEXTS["texts"], TEXTS[model], strict=True):
        assert tokenizer.encode(text, add_special_tokens=False) == wanted, repr(text)


def test_the_longest_key_is_replaced_wherever_clusters_end(tmp_path):
    """The library itself takes the shortest, and what follows in the cluster is lost."""
    tokenizer = built(tmp_path, "plain")
    for text, meant in {
        "\u00bd\u0301": "1/2\u0301",
        "e\u0301\u0301": "\u00e9\u0301",
        "\u1112\u1161\u11ab\u11ab": "\ud55c\u11ab",
        "\u2025\u2025\u2025\u2025": "!\u2025",
        "\uff8a\uff8a\uff9f": "\u30cf\u30d1",
    }.items():
        normalizer = tokenizer._backend.normalizer
        assert normalizer is not None and normalizer.normalize_str(text) == meant


def test_any_bytes_are_a_table_or_none():
    """What a step of ours raised the library would swallow, so nothing may."""
    chance = random.Random(3)
    read = 0
    for _ in range(300):
        size = chance.randint(0, 30) * 4
        head = struct.pack("<I", chance.choice((size, size, 4, 7)))
        try:
            table = Charsmap(head + chance.randbytes(size + chance.randint(0, 9)))
        except ValueError:
            continue
        read += 1
        assert isinstance(table.replaced("any té\u0301xt\0\U0001f642"), str)
    assert read > 100


def test_special_tokens_that_replacements_would_make_are_text(tmp_path):
    """Replaced is what lies between special tokens, which were found before."""
    tokenizer = built(tmp_path, "plain", added_tokens={"1/2": len(read_pieces("plain"))})
    (special,) = tokenizer.encode("1/2", add_special_tokens=False)
    assert special not in tokenizer.encode("\u00bd", add_special_tokens=False)


def test_tokenizers_that_encode_alike_have_one_fingerprint(tmp_path):
    folders = [tmp_path / name for name in ("one", "two", "three")]
    for folder in folders:
        folder.mkdir()
    one, two = built(folders[0], "plain"), built(folders[1], "plain")
    assert one.fingerprint == two.fingerprint != built(folders[2], "unigram").fingerprint


def test_equally_likely_ways_are_told(tmp_path, caplog):
    built(tmp_path, "bpe")
    assert not caplog.text
    built(tmp_path, "plain")
    assert "equally likely" in caplog.text and caplog.text.count("\n") == 1


def test_text_comes_back(tmp_path):
    tokenizer = built(tmp_path)
    for text in TEXTS["texts"]:
        for longer in (text, text * 40):  # many tokens are decoded in another way
            assert tokenizer.decode(tokenizer.encode(longer)) == longer.replace("▁", " ")


@pytest.mark.parametrize("name", CHATS)
def test_special_tokens_in_a_text_as_transformers_finds_them(tmp_path, name):
    tokenizer = built(tmp_path, tokenizer_config=CHATS[name]["config"])
    for text, wanted in CHATS[name]["ids"].items():
        assert tokenizer.encode(text) == wanted, repr(text)


def test_older_files_beside_the_model(tmp_path):
    tokenizer = built(
        tmp_path,
        special_tokens_map={"pad_token": {"content": "<more>"}, "additional_special_tokens": ["<end>"]},
        added_tokens={"<end>": 601, "<more>": 600, "<word>": 602},
    )
    assert (
        tokenizer.special_tokens["pad_token"] == "<more>" and tokenizer.special_tokens["bos_token"] == "<s>"
    )
    assert tokenizer.encode("<end><more><word>", add_special_tokens=False) == [601, 600, 602]
    assert [tokenizer.is_special(id) for id in (600, 601, 602)] == [True, True, False]


def test_what_single_tokens_are(tmp_path):
    tokenizer = built(tmp_path)
    names = read_model(tmp_path / "tokenizer.model").tokens
    assert tokenizer.eos_token_id == names.index("</s>") and tokenizer.encode("")[0] == names.index("<s>")
    assert tokenizer.token_bytes(names.index("<0x0A>")) == b"\n"
    assert tokenizer.token_text(names.index("▁the")) == " the" and tokenizer.vocab_size == len(names)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"added_tokens": {"<far>": 700}}, "'<far>' cannot have the id 700: tokenizer.model has 600 pieces"),
        ({"added_tokens": {"<other>": 1}}, "'<other>' cannot have the id 1: .* that is '<s>'"),
        ({"tokenizer_config": {"bos_token": "<none>"}}, "add_bos_token is true, but bos_token '<none>'"),
        ({"tokenizer_config": {"added_tokens_decoder": {"x": 3}}}, "make no tokenizer"),
        ({"special_tokens_map": ["<s>"]}, "special_tokens_map.json: must hold a JSON object"),
    ],
)
def test_files_beside_it_that_do_not_fit(tmp_path, files, message):
    with pytest.raises(CheckpointError, match=message):
        built(tmp_path, **files)


def test_damaged_models_are_named(tmp_path):
    path = tmp_path / "tokenizer.model"
    whole = (DATA / "bpe.model").read_bytes()
    ranks = b"IQ== 0\nIg== 1\n"  # another kind of file that goes by this name
    piece = b"\x0a\x07\x0a\x05<unk>"
    wrong = [
        b"",
        ranks,
        whole[:5000],
        b"\xff" * 40,
        piece,
        piece + b"\x18\x02",
        whole + whole,
        piece[:3] + b"\xff" * 9,
    ]
    for data in wrong:
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=r"tokenizer\.model: not a readable SentencePiece model"):
            tokenizer_from_sentencepiece(tmp_path)
    for at in range(0, len(whole), 97):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        try:
            read_model(path)
        except CheckpointError:
            continue


@pytest.mark.parametrize("table", [b"\xff" * 9, b"\x04\0\0\0\xff\xff\xff\xffx"])
def test_a_table_of_replacements_that_is_none(tmp_path, table):
    """It lies where the library reads it: in the message that says how texts are normalised."""
    whole = (DATA / "bpe.model").read_bytes()
    message = b"\x12" + bytes([len(table)]) + table
    (tmp_path / "tokenizer.model").write_bytes(whole + b"\x1a" + bytes([len(message)]) + message)
    try:
        tokenizer = tokenizer_from_sentencepiece(tmp_path)
    except CheckpointError as error:
        assert "make no tokenizer" in str(error)
    else:
        with contextlib.suppress(RequestError):
            assert tokenizer is not None and tokenizer.encode("any text")


def test_a_model_with_nothing_else_takes_text(tmp_path):
    for file in EMBEDDED.iterdir():
        if "tokenizer" not in file.name:
            (tmp_path / file.name).symlink_to(file)
    shutil.copy(DATA / "bpe.model", tmp_path / "tokenizer.model")
    llm = LLM(tmp_path, device="cpu")
    params = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0)
    answers = [
        llm.generate([prompt], params)[0] for prompt in ("The tensors", built(tmp_path).encode("The tensors"))
    ]
    assert answers[0].token_ids == answers[1].token_ids and len(answers[0].token_ids) == 4
