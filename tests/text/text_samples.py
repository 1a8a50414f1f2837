"""What the text tests share: the embedded model, sample strings, tiny vocabularies built in memory."""

from pathlib import Path

from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

import headlong

MODEL = Path(headlong.__file__).parent / "assets" / "tale-20m"

STRINGS = [
    "",
    " ",
    "\n\n \t\r\n",
    "Once upon a time, there was a little girl.",
    "  leading and trailing  ",
    "It's 3.14159 — naïve café; I'LL don't WE'RE",
    "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n",
    "a<|endoftext|>b<think>c</think><tool_call>{}</tool_call><|im_start",
    "😀 👩‍👩‍👧‍👦 🇫🇷 ❤️",
    "汉字かな交じり文 한국어 العربية עברית हिन्दी",
    "\x00\x01\x02\x1b[0m\x7f\x80\x9f\u200b\ufeff\ufffd",
    "\U0001d518\U0001d52b \U0010ffff",
    "e\u0301 \u00e9 \u212b",
    "def f(x):\n    return {'a': [1, 2, 3]}  # comment\n",
    "12345678901234567890",
]


def byte_fallback_backend(strip: bool = True) -> Backend:
    """SentencePiece-like: U+2581 for the space, `<0xAB>` for characters outside the vocabulary."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "a", "b", "é", "▁the", "▁▁", "ing", "\ufffd"]
    backend = Backend(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    stages = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(stages + ([decoders.Strip(" ", 1, 0)] if strip else []))
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return backend


def metaspace_backend() -> Backend:
    pieces = ["<unk>", "▁", "a", "b", "▁the", "ing"]
    backend = Backend(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], unk_token="<unk>"))
    backend.decoder = decoders.Metaspace()
    return backend


def wordpiece_backend() -> Backend:
    pieces = ["[UNK]", "[CLS]", "play", "##ing", "##s", ".", ",", "do", "not", "'s", "n't"]
    backend = Backend(models.WordPiece(vocab={p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["[CLS]"])
    return backend


def plain_backend() -> Backend:
    """No decoder at all: the library joins the tokens with spaces."""
    return Backend(models.WordLevel(vocab={"x": 0, "y": 1, "z": 2}, unk_token="x"))
