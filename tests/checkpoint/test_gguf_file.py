"""The GGUF container: what the `gguf` package writes is read alike, and damage ends in one error type."""

import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headlong.checkpoint import gguf as container
from headlong.checkpoint.gguf import open_gguf, read_gguf
from headlong.errors import CheckpointError

U32, I32, BOOL, STRING, ARRAY, U64 = 4, 5, 7, 8, 9, 10


@pytest.fixture(autouse=True, params=[1, 2**62], ids=["strings together", "strings one by one"])
def many(request, monkeypatch):
    monkeypatch.setattr(container, "MANY_STRINGS", request.param)


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def key(name: str | bytes, kind: int, value: bytes) -> bytes:
    return string(name) + struct.pack("<I", kind) + value


def array(kind: int, count: int, values: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + values


def tensor(name: str | bytes, dims: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def blob(
    keys: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    data: bytes = b"",
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    num_tensors, num_keys = counts or (len(tensors), len(keys))
    head = b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys) + b"".join((*keys, *tensors))
    return head + b"\0" * (-len(head) % 32) + data if tensors else head + data


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


METADATA = {
    "a.u8": (gguf.GGUFValueType.UINT8, 255),
    "a.i8": (gguf.GGUFValueType.INT8, -128),
    "a.u16": (gguf.GGUFValueType.UINT16, 65535),
    "a.i16": (gguf.GGUFValueType.INT16, -2),
    "a.u32": (gguf.GGUFValueType.UINT32, 2**32 - 1),
    "a.i32": (gguf.GGUFValueType.INT32, -(2**31)),
    "a.u64": (gguf.GGUFValueType.UINT64, 2**64 - 1),
    "a.i64": (gguf.GGUFValueType.INT64, -(2**63)),
    "a.f32": (gguf.GGUFValueType.FLOAT32, 0.5),
    "a.f64": (gguf.GGUFValueType.FLOAT64, 0.1),
    "a.bool": (gguf.GGUFValueType.BOOL, True),
    "a.text": (gguf.GGUFValueType.STRING, "naïve 汉字 😀\0"),
    "a.empty": (gguf.GGUFValueType.STRING, ""),
}
ARRAYS = {
    "b.strings": ["", "Ġthe", "字"],
    "b.ints": [1, -2, 3],
    "b.floats": [0.5, -1.0],
    "b.bools": [True, False],
    "b.nested": [[1, 2], [3]],
}


def write_with_package(path: Path) -> dict[str, np.ndarray]:
    """Every kind of value and a tensor of every type that the package can write; the tensors' bytes."""
    writer = gguf.GGUFWriter(path, "test")
    for name, (kind, value) in METADATA.items():
        writer.add_key_value(name, value, kind)
    for name, values in ARRAYS.items():
        writer.add_array(name, values)
    written = {}
    for kind, (_, nbytes) in gguf.GGML_QUANT_SIZES.items():
        written[kind.name] = np.arange(3 * 2 * nbytes, dtype=np.uint8).reshape(3, 2 * nbytes)
        writer.add_tensor(kind.name, written[kind.name], raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


@pytest.fixture(scope="module")
def package_file(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "a.gguf"
    write_with_package(path)
    return path.read_bytes()


def test_what_the_gguf_package_writes(tmp_path):
    path = tmp_path / "a.gguf"
    written = write_with_package(path)
    file = read_gguf(path)
    assert file.path == path
    expected = {name: value for name, (_, value) in METADATA.items()} | ARRAYS
    assert file.metadata == {"general.architecture": "test", **expected}
    assert type(file.metadata["a.bool"]) is bool and type(file.metadata["a.u8"]) is int
    content = path.read_bytes()
    assert file.tensors.keys() == written.keys()
    for name, info in file.tensors.items():
        elements, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
        assert (info.name, info.dtype, info.shape, info.file) == (name, name, (3, 2 * elements), path)
        assert content[info.start : info.start + info.nbytes] == written[name].tobytes()


def test_metadata_equals_the_package_reader(tmp_path):
    path = tmp_path / "a.gguf"
    write_with_package(path)
    theirs = gguf.GGUFReader(path)
    ours = read_gguf(path)
    for name, field in theirs.fields.items():
        if not name.startswith("GGUF.") and name != "b.nested":  # which it flattens
            assert ours.metadata[name] == field.contents(), name
    for entry in theirs.tensors:
        info = ours.tensors[entry.name]
        assert (info.start, info.nbytes) == (entry.data_offset, entry.n_bytes)
        assert info.shape == tuple(entry.shape.tolist()[::-1])


def test_version_2_and_other_alignments(tmp_path):
    content = blob((key("general.alignment", U32, struct.pack("<I", 64)),), (tensor("t", (2, 3)),), version=2)
    content = content + b"\0" * (-len(content) % 64) + b"\1" * 24
    info = read_gguf(write(tmp_path / "a.gguf", content)).tensors["t"]
    assert (info.start, info.nbytes, info.shape) == (len(content) - 24, 24, (3, 2))


def test_file_without_tensors(tmp_path):
    file = read_gguf(write(tmp_path / "a.gguf", blob((key("k", U32, b"\1\0\0\0"),))))
    assert (file.metadata, file.tensors) == ({"k": 1}, {})


KINDS = [["a", "\0", "", "b\0c\0", "é"], ["", ""], ["\0"], ["a", "é" * 127, "b" * 255], ["a" * 256, "b"], []]
KINDS += [["a", "bc\0\0\0\0\0\0\0", "d"], ["a", "\0\0\0\0\0\0\0", "d"], ["\1\0\0\0\0\0\0\0" * 2, "a"]]


@pytest.mark.parametrize("strings", KINDS, ids=ascii)
def test_strings_of_any_kind(tmp_path, strings):
    value = array(STRING, len(strings), b"".join(map(string, strings)))
    assert read_gguf(write(tmp_path / "a.gguf", blob((key("k", ARRAY, value),)))).metadata == {"k": strings}


@pytest.mark.serial
def test_large_vocabulary_is_read_quickly(tmp_path):
    """250,000 tokens and as many merges; about 0.3 s, so a much slower machine still passes."""
    tokens = [f"tok{i}é" for i in range(250_000)]
    merges = [f"tok{i} tok{i + 1}" for i in range(250_000)]
    keys = [
        key(name, ARRAY, array(STRING, len(values), b"".join(map(string, values))))
        for name, values in (("tokens", tokens), ("merges", merges))
    ]
    keys.append(key("types", ARRAY, array(I32, 250_000, b"\1\0\0\0" * 250_000)))
    path = write(tmp_path / "a.gguf", blob(tuple(keys)))
    began = time.process_time()
    metadata = read_gguf(path).metadata
    elapsed = time.process_time() - began
    assert metadata == {"tokens": tokens, "merges": merges, "types": [1] * 250_000}
    assert elapsed < 6


def deep(levels: int) -> bytes:
    return b"".join(array(ARRAY, 1) for _ in range(levels - 1)) + array(U32, 1, b"\0" * 4)


HOSTILE = {
    "empty": (b"", "not a GGUF file"),
    "magic": (b"GGML" + b"\0" * 40, "begins with b'GGML'"),
    "safetensors": (struct.pack("<Q", 2) + b"{}", "not a GGUF file"),
    "LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
    "magic alone": (b"GGUF", "truncated"),
    "half a preamble": (b"GGUF" + struct.pack("<IQ", 3, 0), "truncated"),
    "version 1": (blob(version=1), "GGUF version 1 cannot be read"),
    "version 0": (blob(version=0), "GGUF version 0 cannot be read"),
    "version 4": (blob(version=4), "GGUF version 4"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "tensor count": (blob(counts=(2**63, 0)), "claims 9223372036854775808 tensors"),
    "key count": (blob(counts=(0, 2**60), data=b"\0" * 99), "metadata keys, more than"),
    "one key too many": (blob((key("k", U32, b"\0" * 4),), counts=(0, 2), data=b"\0" * 9), "key 2 of 2"),
    "key length": (blob(counts=(0, 1), data=struct.pack("<Q", 2**40) + b"\0" * 20), "truncated"),
    "key empty": (blob((key("", U32, b"\0" * 4),)), "name of 0 bytes"),
    "key long": (blob((key("k" * 70_000, U32, b"\0" * 4),)), "name of 70000 bytes"),
    "key not utf8": (blob((key(b"\xff", U32, b"\0" * 4),)), "not UTF-8"),
    "key twice": (blob((key("k", U32, b"\0" * 4), key("k", BOOL, b"\0"))), "key 'k': occurs twice"),
    "value type": (blob((key("k", 13, b"\0" * 8),)), "key 'k': unknown value type 13"),
    "value cut": (blob((key("k", U64, b"\0" * 4),)), "key 'k': 1 values do not fit in the 4 bytes left"),
    "bool": (blob((key("k", BOOL, b"\2"),)), "key 'k': a truth value must be 0 or 1, found 2"),
    "bool in array": (blob((key("k", ARRAY, array(BOOL, 3, b"\0\1\7")),)), "found 7"),
    "string cut": (blob((key("k", STRING, struct.pack("<Q", 9) + b"x"),)), "key 'k': the header goes on"),
    "string length": (blob((key("k", STRING, struct.pack("<Q", 2**64 - 1)),)), "key 'k'"),
    "string not utf8": (blob((key("k", STRING, string(b"ab\x80")),)), "key 'k': string 0 is not UTF-8"),
    "strings not utf8": (
        blob((key("k", ARRAY, array(STRING, 2, string("a") + string(b"\xc3"))),)),
        "key 'k': string 1 is not UTF-8",
    ),
    "length of one of several": (
        blob((key("k", ARRAY, array(STRING, 2, struct.pack("<Q", 2**64 - 1) + b"x" * 16)),)),
        "key 'k': the header goes on",
    ),
    "array length": (blob((key("k", ARRAY, array(U32, 2**62)),), data=b"\0" * 64), "do not fit"),
    "strings length": (blob((key("k", ARRAY, array(STRING, 2**61)),), data=b"\0" * 64), "do not fit"),
    "array type": (blob((key("k", ARRAY, array(77, 1, b"\0" * 8)),)), "unknown value type 77"),
    "array depth": (blob((key("k", ARRAY, deep(5)),)), "nested over 4 deep"),
    "array bomb": (blob((key("k", ARRAY, deep(9_000)),)), "nested over 4 deep"),
    "alignment 0": (blob((key("general.alignment", U32, b"\0" * 4),)), "power of two, found 0"),
    "alignment 48": (blob((key("general.alignment", U32, b"\x30\0\0\0"),)), "power of two, found 48"),
    "alignment text": (blob((key("general.alignment", STRING, string("32")),)), "power of two, found '32'"),
    "alignment huge": (blob((key("general.alignment", U64, struct.pack("<Q", 2**62)),)), "power of two"),
    "tensor name": (blob((), (tensor(""),), b"\0" * 16), "tensor 1 of 1: a name of 0 bytes"),
    "tensor name utf8": (blob((), (tensor(b"\xfe"),), b"\0" * 16), "tensor 1 of 1: string 0 is not UTF-8"),
    "tensor twice": (blob((), (tensor("t"), tensor("t", offset=32)), b"\0" * 64), "'t': occurs twice"),
    "tensor rank": (blob((), (tensor("t", (1,) * 5),), b"\0" * 16), "'t': 5 dimensions"),
    "tensor rank huge": (
        blob((), (string("t") + struct.pack("<I", 2**32 - 1) + b"\0" * 40,)),
        "'t': 4294967295 dimensions",
    ),
    "tensor zero": (blob((), (tensor("t", (4, 0)),), b"\0" * 16), "'t': shape [0, 4] is absurd"),
    "tensor absurd": (blob((), (tensor("t", (2**63, 2**63)),), b"\0" * 16), "absurd"),
    "tensor type": (blob((), (tensor("t", kind=99),), b"\0" * 16), "'t': unknown tensor type 99"),
    "tensor type removed": (blob((), (tensor("t", kind=4),), b"\0" * 16), "'t': unknown tensor type 4"),
    "tensor row": (
        blob((), (tensor("t", (48, 2), kind=2),), b"\0" * 64),
        "'t': shape [2, 48] cannot be Q4_0",
    ),
    "tensor offset": (blob((), (tensor("t", offset=8),), b"\0" * 64), "'t': its offset 8 is not a multiple"),
    "tensor outside": (blob((), (tensor("t", offset=2**40),), b"\0" * 64), "'t': its 16 bytes end at"),
    "tensor cut": (blob((), (tensor("t", (64,)),), b"\0" * 255), "'t': its 256 bytes end at"),
    "tensors overlap": (
        blob((), (tensor("t", (16,)), tensor("u", offset=32)), b"\0" * 64),
        "tensors 't' and 'u' overlap",
    ),
    "tensors at one place": (blob((), (tensor("t"), tensor("u")), b"\0" * 64), "overlap"),
    "table cut": (blob((), (tensor("t")[:-3],)), "truncated"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_header(tmp_path, case):
    content, message = HOSTILE[case]
    path = write(tmp_path / "bad.gguf", content)
    with pytest.raises(CheckpointError) as caught:
        read_gguf(path)
    text = str(caught.value)
    assert str(path) in text and message in text and "\n" not in text and len(text) < 400 + len(str(path))


def test_no_such_file(tmp_path):
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(CheckpointError, match="no such file"):
            read_gguf(path)


def test_endless_header_in_a_sparse_file(tmp_path):
    """Only as much is read as a real header can have, whatever the file's size claims."""
    path = tmp_path / "a.gguf"
    path.write_bytes(blob((key("k", STRING, struct.pack("<Q", 2**30)),), counts=(0, 2)))
    with path.open("r+b") as file:
        file.truncate(2**34)
    began = time.process_time()
    with pytest.raises(CheckpointError, match="which no real one is"):
        read_gguf(path)
    assert time.process_time() - began < 1


@pytest.mark.parametrize("amount", [24, 25, 100, 1000])
def test_header_longer_than_the_first_read(tmp_path, monkeypatch, amount):
    path = tmp_path / "a.gguf"
    write_with_package(path)
    whole = read_gguf(path)
    monkeypatch.setattr(container, "_FIRST_READ", amount)
    assert read_gguf(path) == whole


def test_every_truncation_is_an_error(tmp_path):
    content = blob(
        (key("k", ARRAY, array(STRING, 2, string("ab") + string("c"))),), (tensor("t"),), b"\0" * 16
    )
    path = tmp_path / "a.gguf"
    read_gguf(write(path, content))
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError):
            read_gguf(path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), min_size=1, max_size=6))
def test_any_damage_is_refused_or_stays_inside_the_file(tmp_path, package_file, changes):
    path = tmp_path / "a.gguf"
    content = bytearray(package_file)
    for at, value in changes:
        content[at % len(content)] = value
    path.write_bytes(content)
    try:
        file = read_gguf(path)
    except CheckpointError as error:
        assert str(path) in str(error)
        return
    for info in file.tensors.values():
        assert 0 < info.start <= info.start + info.nbytes <= len(content)


def write_parts(folder: Path, count: int = 3, total: int | None = None) -> list[Path]:
    """A model split as llama.cpp splits one: all metadata in the first part, one tensor in each."""
    paths = []
    for number in range(count):
        keys = [
            key("split.no", 2, struct.pack("<H", number)),
            key("split.count", 2, struct.pack("<H", count)),
        ]
        keys.append(key("split.tensors.count", I32, struct.pack("<i", total or count)))
        if number == 0:
            keys.insert(0, key("general.architecture", STRING, string("llama")))
        content = blob(tuple(keys), (tensor(f"t{number}"),), bytes([number]) * 16)
        paths.append(write(folder / f"m-{number + 1:05}-of-{count:05}.gguf", content))
    return paths


def test_split_model_from_any_of_its_parts(tmp_path):
    paths = write_parts(tmp_path)
    for path in paths:
        file = open_gguf(path)
        assert file.path == paths[0] and file.metadata["general.architecture"] == "llama"
        assert {name: info.file for name, info in file.tensors.items()} == dict(
            zip(["t0", "t1", "t2"], paths, strict=True)
        )


def test_open_gguf_of_a_whole_model(tmp_path):
    path = write(tmp_path / "a.gguf", blob((key("split.count", 2, b"\1\0"),), (tensor("t"),), b"\0" * 16))
    assert open_gguf(path) == read_gguf(path)


def test_faults_of_split_models(tmp_path):
    paths = write_parts(tmp_path)
    paths[1].rename(tmp_path / "kept")
    with pytest.raises(CheckpointError, match=r"of which m-00002-of-00003\.gguf is missing"):
        open_gguf(paths[2])
    paths[1].write_bytes(paths[2].read_bytes())
    with pytest.raises(CheckpointError, match=r"m-00002.*split\.no must be 1 in this part, found 2"):
        open_gguf(paths[0])
    (tmp_path / "kept").replace(paths[1])
    renamed = write(tmp_path / "model.gguf", paths[0].read_bytes())
    with pytest.raises(CheckpointError, match=r"name must end in -00001-of-00003\.gguf"):
        open_gguf(renamed)
    write_parts(tmp_path, total=4)
    with pytest.raises(CheckpointError, match="should hold 4 tensors together, and hold 3"):
        open_gguf(paths[0])


def test_same_tensor_in_two_parts(tmp_path):
    paths = write_parts(tmp_path)
    paths[2].write_bytes(paths[2].read_bytes().replace(string("t2"), string("t1")))
    with pytest.raises(CheckpointError, match=r"m-00003.*'t1' is in m-00002-of-00003\.gguf as well"):
        open_gguf(paths[0])


@pytest.mark.parametrize(
    "value", [key("split.count", I32, b"\xff" * 4), key("split.count", STRING, string("2"))]
)
def test_split_count_that_is_no_count(tmp_path, value):
    with pytest.raises(CheckpointError, match=r"split\.count.*whole number"):
        open_gguf(write(tmp_path / "a.gguf", blob((value,))))
