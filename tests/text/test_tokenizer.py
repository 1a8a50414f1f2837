"""The tokenizer against transformers', and what it says of single tokens."""

import importlib
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_samples import MODEL, STRINGS, byte_fallback_backend, metaspace_backend
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from headlong.errors import CheckpointError, RequestError
from headlong.text.markup import MARKUP
from headlong.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def oracle():
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    transformers = importlib.import_module("transformers")
    return transformers.AutoTokenizer.from_pretrained(MODEL)


@pytest.mark.parametrize("text", STRINGS)
def test_agrees_with_transformers(tale, oracle, text):
    for add in (True, False):
        ids = tale.encode(text, add_special_tokens=add)
        assert ids == oracle.encode(text, add_special_tokens=add)
    assert tale.decode(ids, False) == oracle.decode(ids, skip_special_tokens=False) == text
    # Markup is text here, though this vocabulary calls it special.
    unmarked = [i for i in ids if oracle.decode([i]) not in MARKUP]
    assert tale.decode(unmarked, True) == oracle.decode(ids, skip_special_tokens=True)


def test_facts_agree_with_transformers(tale, oracle):
    assert tale.vocab_size == len(oracle) == 8192
    assert tale.eos_token_id == oracle.eos_token_id == 2
    assert tale.special_tokens == oracle.special_tokens_map
    assert tale.chat_template == oracle.chat_template
    for i in oracle.all_special_ids:
        assert tale.is_special(i)
    assert not tale.is_special(100)


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, 8300), max_size=40), skip=st.booleans())
def test_bytes_add_up_to_decode(tale, ids, skip):
    joined = b"".join(tale.token_bytes(i) for i in ids if not (skip and tale.is_special(i)))
    assert joined.decode("utf-8", "replace") == tale.decode(ids, skip)


def test_every_byte_and_special_token(tale):
    text = "".join(STRINGS)
    assert b"".join(map(tale.token_bytes, tale.encode(text))) == text.encode()
    singles = {tale.token_bytes(i) for i in range(tale.vocab_size) if not tale.is_special(i)}
    assert {bytes([b]) for b in range(256)} <= singles
    assert tale.token_bytes(1) == b"<|im_start|>" and tale.token_text(1) == "<|im_start|>"
    assert tale.token_bytes(999_999) == b"" and tale.token_text(999_999) == ""
    assert not tale.is_known(999_999)
    part = next(i for i in range(tale.vocab_size) if tale.token_bytes(i) == b"\xf0")
    assert tale.token_text(part) == "\ufffd"


def test_added_tokens_outside_the_byte_alphabet():
    backend = Backend.from_file(str(MODEL / "tokenizer.json"))
    backend.add_tokens([AddedToken("<\uff5cbegin▁of\uff5c>", special=True), AddedToken("two words")])
    tokenizer = Tokenizer(backend)
    for text in ("<\uff5cbegin▁of\uff5c>", "two words"):
        (token,) = tokenizer.encode(text)
        assert tokenizer.token_bytes(token) == text.encode()
        assert tokenizer.decode([token], False) == text


def test_byte_fallback_and_metaspace_bytes():
    tokenizer = Tokenizer(byte_fallback_backend())
    ids = tokenizer._backend.get_vocab()
    assert tokenizer.token_bytes(ids["<0xC3>"]) == b"\xc3" and tokenizer.is_byte_piece(ids["<0xC3>"])
    assert tokenizer.token_bytes(ids["▁the"]) == b" the" and tokenizer.token_text(ids["▁the"]) == " the"
    assert tokenizer.token_bytes(ids["é"]) == "é".encode()
    assert tokenizer.token_bytes(ids["<s>"]) == b"<s>" and tokenizer.is_special(ids["<s>"])
    assert not tokenizer.is_byte_piece(ids["<s>"])
    metaspace = Tokenizer(metaspace_backend())
    assert metaspace.token_bytes(4) == b" the" and not metaspace.is_byte_level


def test_lone_surrogates_are_refused(tale):
    with pytest.raises(RequestError, match="surrogates"):
        tale.encode("a\ud800b")


def test_threads_share_one_tokenizer(tale):
    def work(text: str) -> bool:
        ids = tale.encode(text)
        return tale.decode(ids, False) == text and b"".join(map(tale.token_bytes, ids)) == text.encode()

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, STRINGS * 20))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(MODEL / "tokenizer.json", tmp_path)
    return tmp_path


def configured(folder: Path, **config) -> Tokenizer:
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    return tokenizer


def test_folder_without_tokenizer(tmp_path):
    assert Tokenizer.from_folder(tmp_path) is None


def test_folder_without_config(folder):
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    assert tokenizer.special_tokens == {} and tokenizer.eos_token_id is None
    assert tokenizer.chat_template is None


def test_damaged_files_are_named(folder):
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        Tokenizer.from_folder(folder)
    (folder / "tokenizer_config.json").write_text('{"chat_template": [{"nom": 1}]}')
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        Tokenizer.from_folder(folder)
    (folder / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(CheckpointError, match=r"/tokenizer\.json"):
        Tokenizer.from_folder(folder)


def test_special_token_forms(folder):
    tokenizer = configured(
        folder,
        bos_token=None,
        eos_token={"content": "<|im_end|>", "special": True},
        pad_token="<|endoftext|>",
    )
    assert tokenizer.special_tokens == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    assert tokenizer.eos_token_id == 2
    assert configured(folder, eos_token="<absent>").eos_token_id is None


def test_tokens_declared_in_the_config_only(folder):
    entry = {"content": "<|new|>", "special": True, "normalized": False}
    tokenizer = configured(folder, added_tokens_decoder={"8192": entry, "0": {"content": "<|endoftext|>"}})
    assert tokenizer.encode("a<|new|>")[-1] == 8192 and tokenizer.is_special(8192)
    assert tokenizer.vocab_size == 8193


def test_chat_template_sources(folder):
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert configured(folder, chat_template="S").chat_template == "S"
    assert configured(folder, chat_template=named).chat_template == "D"
    assert configured(folder, chat_template=named[:1]).chat_template is None
    (folder / "chat_template.jinja").write_text("é{{ 1 }}\n", encoding="utf-8")
    assert configured(folder, chat_template="S").chat_template == "é{{ 1 }}\n"


def test_truncation_of_the_file_is_ignored(tale, folder):
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    backend.save(str(folder / "tokenizer.json"))
    assert configured(folder).encode("one two three four") == tale.encode("one two three four")


def test_markup_is_text_even_where_the_vocabulary_calls_it_special(tale):
    text = "<think>\nHm.\n</think>\n\n<tool_call>\n{}\n</tool_call>"
    ids = tale.encode(text + "<|im_end|>")
    assert tale.decode(ids) == text
    assert not any(tale.is_special(token) for token in ids[:-1]) and tale.is_special(ids[-1])
    assert ids[0] == 3, "still one token"


def test_markup_of_other_families_is_text_too(folder):
    """What harmony's tokens mean elsewhere is another thing: they count only where all of them are."""
    markers = [
        "[TOOL_CALLS]",
        "<｜tool▁sep｜>",
        "<|tool_call_begin|>",
        "｜DSML｜",
        "<arg_key>",
        "<|python_tag|>",
    ]
    messages = ["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>"]
    for added, texts in ((markers + messages, markers + messages), ([*markers, "<|end|>"], markers)):
        entries = {f"{8192 + rank}": {"content": one, "special": True} for rank, one in enumerate(added)}
        tokenizer = configured(folder, added_tokens_decoder=entries)
        ids = tokenizer.encode("".join(added))
        assert len(ids) == len(added) and tokenizer.decode(ids) == "".join(texts)
