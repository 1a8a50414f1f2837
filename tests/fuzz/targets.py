"""What is fuzzed: readers of bytes that come from strangers. A target takes bytes and raises where a promise is broken.

Each knows which errors are promised; everything else that is raised, and an answer that depends on how the bytes were
cut, is a finding. `run.py` feeds them, guided by coverage; `test_fuzz.py` feeds them what was found before. Each
imports what it needs when it is called, since instrumented imports take long.
"""

import contextlib
import json
import os
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import headlong
from headlong.errors import HeadlongError

if TYPE_CHECKING:
    from headlong.text.output import ChatFormat

EMBEDDED = Path(headlong.__file__).parent / "assets" / "tale-20m"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "count": {"type": "integer"},
                    "map": {"type": "object"},
                },
            },
        },
    }
]
CALLS = {
    "hermes": '<think>a</think>b<tool_call>\n{"name": "f", "arguments": {"count": 1}}\n</tool_call>c',
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=text>\nx\n</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>x</arg_value>\n</tool_call>",
    "glm47": "<tool_call>f<arg_key>text</arg_key><arg_value>x</arg_value></tool_call>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
    '{"count": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>"
    '{"count": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="text" '
    'string="true">x</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "deepseek_v4": '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="count" string="false">1'
    "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
    '{"count": 1}<|tool_call_end|><|tool_calls_section_end|>',
    "mistral": '[THINK]a[/THINK][TOOL_CALLS] [{"name": "f", "arguments": {"count": 1}}]',
    "mistral_args": '[TOOL_CALLS]f[ARGS]{"count": 1}',
    "harmony": "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary to=functions.f "
    '<|constrain|>json<|message|>{"count": 1}<|call|>',
    "llama3_json": '{"name": "f", "parameters": {"count": 1}}',
}
"""A call in each format."""
FORMATS = [
    *(
        (name, "harmony" if name == "harmony" else "mistral" if "mistral" in name else "think")
        for name in CALLS
    ),
    *((name, "none") for name in CALLS),
]
_folder = Path(
    tempfile.mkdtemp(prefix="headlong-fuzz-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
)


def safetensors(data: bytes) -> None:
    """A file; its header's length is what comes first, as it is or as it should be."""
    from headlong.checkpoint.safetensors import read_file

    if data[:1] == b"{":
        data = struct.pack("<Q", len(data)) + data + bytes(64)
    with contextlib.suppress(HeadlongError):
        tensors, _ = read_file(_written("model.safetensors", data))
        assert all(info.nbytes >= 0 for info in tensors.values())


def gguf(data: bytes) -> None:
    """A file, and the tokenizer that its metadata describe."""
    from headlong.checkpoint.gguf import read_gguf
    from headlong.text.gguf_tokenizer import tokenizer_from_gguf

    with contextlib.suppress(HeadlongError):
        found = read_gguf(_written("model.gguf", data))
        tokenizer_from_gguf(found.metadata)


def tokenizer(data: bytes) -> None:
    """The file beside tokenizer.json, and a template in it or on its own."""
    from headlong.text.tokenizer import Tokenizer

    folder = _folder / "tokenizer"
    if not folder.exists():
        folder.mkdir()
        (folder / "tokenizer.json").symlink_to(EMBEDDED / "tokenizer.json")
    (folder / "tokenizer_config.json").write_bytes(data)
    with contextlib.suppress(HeadlongError):
        found = Tokenizer.from_folder(folder)
        assert found is not None
        found.decode(found.encode(data.decode("utf-8", "replace")[:200]))


def sse(data: bytes) -> None:
    """A stream, cut anywhere, gives the same events."""
    assert _events([data]) == _events(_cut(data))


def chat(data: bytes) -> None:
    """An answer gives the same text, reasoning and calls however it is cut; its first byte chooses the format."""
    from headlong.text.output import ChatFormat

    tools, reasoning = FORMATS[data[0] % len(FORMATS)] if data else FORMATS[0]
    format = ChatFormat.detect(None, reasoning=reasoning, tools=tools)
    text = data[1:].decode("utf-8", "replace")
    pieces = [piece for piece in _cut_text(text) if piece]
    whole, cut = (_joined(format, parts) for parts in ([text], pieces))
    assert whole == cut, f"{tools}, {reasoning}: depends on how the text was cut"


def vocabulary(data: bytes) -> None:
    """tokenizer.json, as far as it is looked at before the library reads it."""
    from headlong.text import tokenizer_file

    with contextlib.suppress(HeadlongError):
        tokenizer_file.check(_written("tokenizer.json", data))


TARGETS: dict[str, Callable[[bytes], None]] = {
    "safetensors": safetensors,
    "gguf": gguf,
    "tokenizer": tokenizer,
    "vocabulary": vocabulary,
    "sse": sse,
    "chat": chat,
}


def seeds(target: str) -> Iterator[bytes]:
    """Good input to begin with."""
    if target == "safetensors":
        header = json.dumps({"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}).encode()
        yield struct.pack("<Q", len(header)) + header + bytes(16)
        yield header
    elif target == "gguf":
        yield b"GGUF" + struct.pack("<IQQ", 3, 0, 0)
        yield (
            b"GGUF"
            + struct.pack("<IQQ", 3, 1, 1)
            + _string(b"general.architecture")
            + struct.pack("<I", 8)
            + _string(b"llama")
            + _string(b"a")
            + struct.pack("<IQIQ", 1, 4, 0, 0)
            + bytes(64)
        )
        for kind in (b"gpt2", b"llama"):
            yield _gguf_vocabulary(kind)
    elif target == "tokenizer":
        yield (EMBEDDED / "tokenizer_config.json").read_bytes()
        yield b'{"chat_template": [{"name": "default", "template": "x"}], "eos_token": {"content": "</s>"}}'
    elif target == "sse":
        yield b'event: a\ndata: {"b": 1}\ndata: 2\r\n\r\n: note\n\ndata: [DONE]\n\n'
    elif target == "vocabulary":
        stages = {
            "normalizer": {
                "type": "Sequence",
                "normalizers": [{"type": "Replace", "pattern": {"Regex": "a{2,9}"}}],
            },
            "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+)b|\\\\s+"}, "behavior": "Isolated"},
        }
        model = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]], "unk_token": "a"}
        yield json.dumps({"added_tokens": [{"id": 0, "content": "a"}], "model": model} | stages).encode()
    else:
        for number, (name, _) in enumerate(FORMATS):
            yield bytes([number]) + CALLS[name].encode()


def _gguf_vocabulary(kind: bytes) -> bytes:
    """A file of metadata alone, which describe a tokenizer."""
    tokens = [b"a", b"b", b"ab", b"<0x0A>", b"</s>"]
    fields = {
        b"model": (8, _string(kind)),
        b"pre": (8, _string(b"qwen2")),
        b"tokens": (9, _array(8, [_string(token) for token in tokens])),
        b"scores": (9, _array(6, [struct.pack("<f", -number) for number in range(len(tokens))])),
        b"token_type": (9, _array(5, [struct.pack("<i", one) for one in (1, 1, 1, 6, 3)])),
        b"merges": (9, _array(8, [_string(b"a b")])),
        b"eos_token_id": (4, struct.pack("<I", 4)),
    }
    written = [
        _string(b"tokenizer.ggml." + key) + struct.pack("<I", code) + value
        for key, (code, value) in fields.items()
    ]
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(fields)) + b"".join(written)


def _array(code: int, items: list[bytes]) -> bytes:
    return struct.pack("<IQ", code, len(items)) + b"".join(items)


def _string(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def _written(name: str, data: bytes) -> Path:
    path = _folder / name
    path.write_bytes(data)
    return path


def _cut(data: bytes) -> list[bytes]:
    """Pieces whose lengths the data themselves decide."""
    pieces, at = [], 0
    while at < len(data):
        step = 1 + data[at] % 5
        pieces.append(data[at : at + step])
        at += step
    return pieces


def _cut_text(text: str) -> list[str]:
    pieces, at = [], 0
    while at < len(text):
        step = 1 + ord(text[at]) % 5
        pieces.append(text[at : at + step])
        at += step
    return pieces


def _events(pieces: list[bytes]) -> list[object] | str:
    from headlong.cli.load.sse import EventReader, MalformedStream

    reader = EventReader()
    found: list[object] = []
    try:
        for piece in pieces:
            found += reader.feed(piece)
        return found + reader.finish()
    except MalformedStream:
        return "malformed"


def _joined(format: "ChatFormat", pieces: list[str]) -> list[tuple[str, str]]:
    """Kinds of events with their texts, those of the same kind that follow each other joined."""
    parser = format.parser("", TOOLS)
    events = [event for piece in pieces for event in parser.push(piece)] + parser.finish()
    found: list[tuple[str, str]] = []
    for event in events:
        kind = type(event).__name__
        text = getattr(event, "text", None) or getattr(event, "name", "")
        if found and found[-1][0] == kind and kind in ("Content", "Reasoning", "ToolCallArguments"):
            found[-1] = (kind, found[-1][1] + text)
        else:
            found.append((kind, text))
    return found
