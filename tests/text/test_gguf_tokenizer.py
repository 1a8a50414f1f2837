"""Tokenizers in GGUF metadata: there and back without a difference, SentencePiece against its definition, faults."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_samples import MODEL, STRINGS
from tokenizers import Regex, pre_tokenizers
from tokenizers import Tokenizer as Backend

from headlong.errors import CheckpointError
from headlong.text.gguf_splitting import SPLITTINGS, pre_tokenizer, recognise
from headlong.text.gguf_tokenizer import gguf_tokenizer_fields, tokenizer_from_gguf, write_tokenizer
from headlong.text.gguf_vocabulary import _merges
from headlong.text.markup import MARKUP
from headlong.text.tokenizer import Tokenizer

TALE_JSON = json.loads((MODEL / "tokenizer.json").read_text())
TALE_CONFIG = json.loads((MODEL / "tokenizer_config.json").read_text())
TALE_CONFIG["chat_template"] = (MODEL / "chat_template.jinja").read_text()
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def tale_fields(**changes: Any) -> dict[str, Any]:
    """The embedded model's metadata; a change to None takes a key away."""
    fields = gguf_tokenizer_fields(TALE_JSON, TALE_CONFIG, 8192)
    fields |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return {key: value for key, value in fields.items() if value is not None}


def built(fields: dict[str, Any]) -> Tokenizer:
    tokenizer = tokenizer_from_gguf(fields)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def back() -> Tokenizer:
    return built(tale_fields())


@pytest.mark.parametrize("text", STRINGS)
def test_there_and_back_on_samples(tale, back, text):
    ids = tale.encode(text)
    assert back.encode(text) == ids
    for skip in (True, False):
        assert back.decode(ids, skip_special_tokens=skip) == tale.decode(ids, skip_special_tokens=skip)


@settings(max_examples=400, deadline=None)
@given(st.text(max_size=60))
def test_there_and_back_on_any_text(tale, back, text):
    assert back.encode(text) == tale.encode(text)


def test_there_and_back_keeps_the_rest(tale, back):
    assert back.special_tokens == tale.special_tokens and back.eos_token_id == tale.eos_token_id
    assert back.chat_template == tale.chat_template is not None
    assert back.vocab_size == tale.vocab_size and back.is_byte_level
    for id in range(8192):
        assert back.token_bytes(id) == tale.token_bytes(id) and back.is_special(id) == tale.is_special(id)


def test_written_files_are_the_same_tokenizer(tale, tmp_path):
    write_tokenizer(tale_fields(), tmp_path)
    read = Tokenizer.from_folder(tmp_path)
    assert read is not None and all(read.encode(text) == tale.encode(text) for text in STRINGS)
    assert (read.special_tokens, read.chat_template) == (tale.special_tokens, tale.chat_template)
    whole, config = (json.loads((tmp_path / f"tokenizer{end}.json").read_text()) for end in ("", "_config"))
    assert gguf_tokenizer_fields(whole, config, 8192) == tale_fields()


def test_vocabulary_is_filled_up_to_the_embedding(tale):
    fields = gguf_tokenizer_fields(TALE_JSON, TALE_CONFIG, 8200)
    assert fields["tokenizer.ggml.tokens"][8191:8194] == [
        tale._backend.id_to_token(8191),
        "[PAD8192]",
        "[PAD8193]",
    ]
    assert fields["tokenizer.ggml.token_type"][8192:] == [UNUSED] * 8
    tokenizer = built(fields)
    assert tokenizer.vocab_size == 8192 and not tokenizer.is_known(8195)
    assert tokenizer.encode("[PAD8195]") == tale.encode("[PAD8195]")


def test_fields_of_the_embedded_model():
    fields = tale_fields()
    assert fields["tokenizer.ggml.model"] == "gpt2" and fields["tokenizer.ggml.pre"] == "qwen2"
    assert fields["tokenizer.ggml.token_type"].count(CONTROL) == 9
    assert fields["tokenizer.ggml.eos_token_id"] == 2 and fields["tokenizer.ggml.padding_token_id"] == 0
    assert "tokenizer.ggml.bos_token_id" not in fields and fields["tokenizer.ggml.add_bos_token"] is False
    assert len(fields["tokenizer.ggml.merges"]) == 7927


def test_tokens_that_only_the_config_lists():
    entry = {"content": "<extra>", "special": False}
    config = TALE_CONFIG | {"added_tokens_decoder": {"8192": entry}}
    fields = gguf_tokenizer_fields(TALE_JSON, config, 8193)
    assert (fields["tokenizer.ggml.tokens"][8192], fields["tokenizer.ggml.token_type"][8192]) == (
        "<extra>",
        USER,
    )
    assert built(fields).encode("a<extra>b")[1] == 8192


GPT2_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
DIGITS = {"type": "Digits", "individual_digits": True}


@pytest.mark.parametrize("name", SPLITTINGS)
def test_every_splitting_is_recognised(name):
    found = recognise(pre_tokenizer(SPLITTINGS[name]), SPLITTINGS[name].ignore_merges)
    assert found is not None and SPLITTINGS[found] == SPLITTINGS[name]


def test_other_spellings_of_a_splitting():
    assert recognise(GPT2_BYTES, False) == "gpt-2"
    assert recognise({"type": "Sequence", "pretokenizers": [DIGITS, GPT2_BYTES]}, False) == "smollm"
    llama = pre_tokenizer(SPLITTINGS["llama-bpe"])
    llama["pretokenizers"][0] |= {"behavior": "Removed", "invert": True}
    assert recognise(llama, True) == "llama-bpe" and recognise(llama, False) == "smaug-bpe"
    raw = json.loads(json.dumps(pre_tokenizer(SPLITTINGS["deepseek-v3"])).replace(r"\\r\\n", r"\r\n"))
    assert raw != pre_tokenizer(SPLITTINGS["deepseek-v3"]) and recognise(raw, False) == "deepseek-v3"


@pytest.mark.parametrize(
    "other",
    [
        {},
        {"type": "Whitespace"},
        {"type": "Metaspace", "replacement": "▁"},
        GPT2_BYTES | {"add_prefix_space": True},
        {"type": "Sequence", "pretokenizers": [GPT2_BYTES, DIGITS]},
        {"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": {"String": " "}}, GPT2_BYTES]},
    ],
)
def test_other_splittings_are_not_recognised(other):
    assert recognise(other, False) is None


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("default", ["Ab", "'", "s", " ", "123", "45", "..", "\n", "\n", "x", " ", " y字é"]),
        ("gpt-2", ["Ab", "'s", " 12345", "..", "\n", "\n", "x", " ", " y字é"]),
        ("smollm", ["Ab", "'s", " ", "1", "2", "3", "4", "5", "..", "\n", "\n", "x", " ", " y字é"]),
        ("qwen2", ["Ab", "'s", " ", "1", "2", "3", "4", "5", "..\n\n", "x", " ", " y字é"]),
        ("llama-bpe", ["Ab", "'s", " ", "123", "45", "..\n\n", "x", " ", " y字é"]),
        ("tekken", ["Ab", "'s", " ", "1", "2", "3", "4", "5", "..\n\n", "x", " ", " y字é"]),
        (
            "deepseek-llm",
            ["Ab", "'", "s", " ", "1", "2", "3", "4", "5", "..", "\n", "\n", "x", " ", " y", "字", "é"],
        ),
        ("deepseek-v3", ["Ab", "'s", " ", "123", "45", "..\n\n", "x", " ", " y", "字", "é"]),
    ],
)
def test_how_text_is_split(pre, pieces):
    """Worked out by hand from the patterns."""
    text = "Ab's 12345..\n\nx  y字é"
    splits: Any = [pre_tokenizers.Split(Regex(p), "isolated") for p in SPLITTINGS[pre].patterns]
    assert [piece for piece, _ in pre_tokenizers.Sequence(splits).pre_tokenize_str(text)] == pieces


def test_combining_marks_and_normal_forms():
    """Qwen3.5 keeps marks with their letters, and composes them first unless the file says otherwise."""
    text = "x\u0323\u0301y e\u0301"
    plain = built(tale_fields(pre="qwen2"))
    composed = built(tale_fields(pre="qwen35"))
    key = "headlong.tokenizer.normalizer"
    decomposed = built(tale_fields(pre="qwen35") | {key: "none"})
    assert composed.decode(composed.encode("e\u0301")) == "é" != plain.decode(plain.encode("e\u0301"))
    assert decomposed.decode(decomposed.encode(text)) == text
    for normalizer, pre, expected in (
        ({"type": "NFC"}, "qwen2", {key: "NFC"}),
        (None, "qwen35", {key: "none"}),
        ({"type": "NFC"}, "qwen35", {}),
        (None, "qwen2", {}),
    ):
        fields = gguf_tokenizer_fields(TALE_JSON | {"normalizer": normalizer}, TALE_CONFIG, 8192, pre)
        assert {name: value for name, value in fields.items() if name.startswith("headlong")} == expected
        assert fields["tokenizer.ggml.pre"] == pre


def test_first_and_last_token(tale):
    text, ids = "Once", tale.encode("Once")
    silent = {"add_bos_token": None, "bos_token_id": 1}
    assert built(tale_fields(**silent)).encode(text) == ids
    # In this vocabulary a word that is a token comes out whole either way.
    llama = built(tale_fields(**silent, pre="llama-bpe"))
    assert llama.encode(text) == [1, *ids] and llama.encode(text, add_special_tokens=False) == ids
    assert built(tale_fields(pre="llama-bpe", bos_token_id=1)).encode(text) == ids
    both = built(tale_fields(add_bos_token=True, bos_token_id=1, add_eos_token=True))
    assert both.encode(text) == [1, *ids, 2] and both.special_tokens["bos_token"] == "<|im_start|>"


def test_first_token_from_the_post_processor():
    def fields_of(*pieces: str) -> dict[str, Any]:
        single = [
            {"SpecialToken": {"id": p, "type_id": 0}} if p else {"Sequence": {"id": "A"}} for p in pieces
        ]
        template = {"type": "TemplateProcessing", "single": single}
        post = {"type": "Sequence", "processors": [{"type": "ByteLevel"}, template]}
        config = TALE_CONFIG | {"bos_token": {"content": "<|im_start|>"}}
        return gguf_tokenizer_fields(TALE_JSON | {"post_processor": post}, config, 8192)

    assert fields_of("")["tokenizer.ggml.add_bos_token"] is False
    assert fields_of("<|im_start|>", "")["tokenizer.ggml.add_bos_token"] is True
    ended = fields_of("<|im_start|>", "", "<|im_end|>")
    assert ended["tokenizer.ggml.add_eos_token"] is True
    assert built(ended).encode("x")[0] == 1 and built(ended).encode("x")[-1] == 2
    with pytest.raises(CheckpointError, match="not the bos_token"):
        fields_of("<think>", "")


def test_named_chat_templates():
    templates = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    fields = gguf_tokenizer_fields(TALE_JSON, TALE_CONFIG | {"chat_template": templates}, 8192)
    assert fields["tokenizer.chat_template"] == "A" and fields["tokenizer.chat_template.tool_use"] == "B"
    assert fields["tokenizer.chat_templates"] == ["tool_use"]
    assert built(fields).chat_template == "A"
    none = gguf_tokenizer_fields(TALE_JSON, TALE_CONFIG | {"chat_template": None}, 8192)
    assert not any("chat_template" in key for key in none) and built(none).chat_template is None


def test_types_of_tokens(tale):
    types = tale_fields()["tokenizer.ggml.token_type"]
    as_text = [USER if id in (3, 7) else NORMAL if id == 2 else kind for id, kind in enumerate(types)]
    tokenizer = built(tale_fields(token_type=as_text))
    assert tokenizer.encode("a<tool_response>") == tale.encode("a<tool_response>")
    assert tokenizer.decode([7]) == "<tool_response>" and tokenizer.decode([8]) == ""
    assert tokenizer.is_special(2), "the end of a text is special whatever its type"
    ordinary = built(tale_fields(token_type=None))
    assert ordinary.is_special(2) and not ordinary.is_special(8)


def test_unset_ids_and_files_without_a_tokenizer():
    assert "pad_token" not in built(tale_fields(padding_token_id=2**32 - 1)).special_tokens
    padded = gguf_tokenizer_fields(TALE_JSON, TALE_CONFIG, 8200) | {"tokenizer.ggml.padding_token_id": 8195}
    assert "pad_token" not in built(padded).special_tokens
    for fields in ({}, {"tokenizer.ggml.model": "none"}, {"tokenizer.ggml.model": "no_vocab"}):
        assert tokenizer_from_gguf(fields) is None


CUTS = {
    "a b": ("a", "b"),
    "Ġab cd": ("Ġab", "cd"),
    "  a": (" ", "a"),
    " a b": (" a", "b"),
    "a b c": ("a", "b c"),
    "a ": ("a", ""),
}


def test_where_merges_are_cut() -> None:
    """At the first space that is not a token's first character."""
    assert _merges({"tokenizer.ggml.merges": list(CUTS)}) == list(CUTS.values())
    for lone in (" a", "ab", ""):
        with pytest.raises(CheckpointError, match=f"'{lone}' is not two tokens"):
            _merges({"tokenizer.ggml.merges": ["a b", lone]})


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "model": ({"model": "bert"}, "'bert' is not supported"),
    "model type": ({"model": ["gpt2"]}, "is not supported"),
    "pre": ({"pre": "klingon"}, r"'klingon' is not known; known are default, gpt-2, smollm"),
    "pre type": ({"pre": 3}, "3 is not known"),
    "no tokens": ({"tokens": None}, r"tokens': must be an array of str"),
    "token numbers": ({"tokens": list(range(8192))}, r"tokens': must be an array of str"),
    "twice": ({"tokens": ["a", "b", "a"], "token_type": [1, 1, 1]}, "tokens 0 and 2 are both 'a'"),
    "types short": ({"token_type": [1] * 8191}, "8191 entries for 8192 tokens"),
    "types text": ({"token_type": ["1"] * 8192}, "token_type': must be an array of int"),
    "no merges": ({"merges": None}, "merges': must be an array of str"),
    "merge of one": ({"merges": ["ab"]}, "'ab' is not two tokens"),
    "merge of strangers": ({"merges": ["qq♥ zz"]}, "make no tokenizer"),
    "eos outside": ({"eos_token_id": 8192}, "eos_token_id': must be one of the 8192 token ids, found 8192"),
    "eos text": ({"eos_token_id": "2"}, "found '2'"),
    "bos missing": ({"add_bos_token": True}, r"no 'tokenizer\.ggml\.bos_token_id'"),
    "truth": ({"add_bos_token": 1}, "must be true or false, found 1"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_faults_in_metadata(case):
    changes, message = FAULTS[case]
    with pytest.raises(CheckpointError, match=message) as caught:
        tokenizer_from_gguf(tale_fields(**changes))
    assert "tokenizer.ggml" in str(caught.value)


def test_what_cannot_be_written():
    for changes, config, size, message in (
        ({"decoder": {"type": "Metaspace"}}, {}, 8192, "only byte-level BPE"),
        ({"model": {"type": "Unigram"}}, {}, 8192, "only byte-level BPE"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, {}, 8192, "in a way that no GGUF name stands for"),
        ({"normalizer": {"type": "Lowercase"}}, {}, 8192, "normalizer Lowercase"),
        ({"post_processor": {"type": "RobertaProcessing"}}, {}, 8192, "RobertaProcessing"),
        ({}, {"eos_token": "</s>"}, 8192, "eos_token '</s>' is not a token"),
        ({}, {}, 8000, "token 8191 is outside the model's vocabulary of 8000"),
        ({"model": {"type": "BPE"}}, {}, 8192, "missing or malformed"),
    ):
        with pytest.raises(CheckpointError, match=message):
            gguf_tokenizer_fields(TALE_JSON | changes, TALE_CONFIG | config, size)
    with pytest.raises(CheckpointError, match="'klingon' is not known"):
        gguf_tokenizer_fields(TALE_JSON, TALE_CONFIG, 8192, "klingon")


PIECES = ["▁", "a", "b", "c", "é", "▁a", "ab", "bc", "abc", "▁ab", "aa", "ca", "▁▁", "cab", "▁b", "b▁"]
SCORES = [-3.0, -1.0, -2.0, -4.0, -5.0, -8.5, -6.5, -6.0, -9.0, -7.0, -12.0, -10.0, -11.0, -7.5, -13.0, -6.25]


def spm_fields(**changes: Any) -> dict[str, Any]:
    """A small SentencePiece vocabulary; the scores of pairs are in another order than their ids."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, "<tool>"]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(PIECES), USER]
    fields = {"model": "llama", "tokens": tokens, "token_type": types}
    fields |= {
        "scores": [0.0] * 259 + SCORES + [0.0],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return {f"tokenizer.ggml.{k}": v for k, v in (fields | changes).items() if v is not None}


def spm_encode(text: str, prefix: bool = True) -> list[str]:
    """SentencePiece by its definition: merge the adjacent pair whose token has the highest score, the leftmost of
    several; what is no token in the end becomes bytes."""
    score = dict(zip(PIECES, SCORES, strict=True))
    parts = list((("▁" if prefix and text else "") + text).replace(" ", "▁"))
    while True:
        pairs = [(-score[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in score]
        if not pairs:
            break
        at = min(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [
        token
        for part in parts
        for token in ([part] if part in score else [f"<0x{byte:02X}>" for byte in part.encode()])
    ]


@settings(max_examples=500, deadline=None)
@given(st.text(alphabet="abcé x字 \n", max_size=40))
def test_sentencepiece_equals_its_definition(spm, text):
    ids = spm.encode(text, add_special_tokens=False)
    assert [spm._backend.id_to_token(id) for id in ids] == spm_encode(text)
    assert spm.decode(ids) == text


@pytest.fixture(scope="module")
def spm() -> Tokenizer:
    return built(spm_fields())


def test_sentencepiece_with_special_tokens(spm):
    assert spm.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert spm.encode("ab")[0] == 1 and spm.eos_token_id == 2
    ids = spm.encode("ab</s>ab<tool>c", add_special_tokens=False)
    names = [spm._backend.id_to_token(id) for id in ids]
    assert names == [*spm_encode("ab"), "</s>", *spm_encode("ab"), "<tool>", *spm_encode("c")]
    assert "<tool>" in spm.decode(ids) and "</s>" not in spm.decode(ids)
    assert spm.is_byte_piece(3) and spm.token_bytes(3) == b"\0"


def test_sentencepiece_without_the_space_before():
    tokenizer = built(spm_fields(add_space_prefix=False, add_bos_token=False))
    for text in ("ab ab", " abc", "字"):
        ids = tokenizer.encode(text)
        assert [tokenizer._backend.id_to_token(id) for id in ids] == spm_encode(text, prefix=False)
        assert tokenizer.decode(ids) == text


def extra_tokens() -> dict[str, Any]:
    """Added ones of all kinds, markup and the empty token among them."""
    fields = tale_fields()
    tokens = [*fields["tokenizer.ggml.tokens"], "<extra>", "", "<think>x", " two words"]
    types = [*fields["tokenizer.ggml.token_type"], USER, NORMAL, CONTROL, UNKNOWN]
    return fields | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}


@pytest.mark.parametrize("make", [tale_fields, spm_fields, extra_tokens])
def test_it_is_the_tokenizer_that_the_library_reads_from_a_file(make, tmp_path):
    write_tokenizer(make(), tmp_path)
    read = Tokenizer.from_folder(tmp_path)
    assert read is not None and built(make())._backend.to_str() == read._backend.to_str()


def test_markup_as_text_changes_nothing_else():
    backend = Backend.from_str(json.dumps(TALE_JSON))
    state = json.loads(backend.to_str())
    changed = [token for token in state["added_tokens"] if token["content"] in MARKUP]
    assert changed and all(token["special"] for token in changed)
    for token in changed:
        token["special"] = False
    assert json.loads(Tokenizer(backend)._backend.to_str()) == state


def test_sentencepiece_where_the_file_is_silent():
    tokenizer = built(spm_fields(bos_token_id=None, eos_token_id=None, unknown_token_id=None))
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert tokenizer.encode("ab")[0] == 1


@pytest.mark.parametrize(
    ("scores", "message"),
    [(None, "array of float"), ([0.0] * 5, "each of 276 tokens"), ([float("nan")] * 276, "finite")],
)
def test_sentencepiece_needs_scores(scores, message):
    with pytest.raises(CheckpointError, match=message):
        tokenizer_from_gguf(spm_fields(scores=scores))


def test_sentencepiece_files_are_the_same_tokenizer(spm, tmp_path):
    write_tokenizer(spm_fields(), tmp_path)
    read = Backend.from_file(str(tmp_path / "tokenizer.json"))
    for text in ("", "abc ab", "a  b字", "</s> ab"):
        assert read.encode(text).ids == spm.encode(text)
