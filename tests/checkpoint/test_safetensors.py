"""The container format: round trips of every dtype, and hostile headers that must end in one error type."""

import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from headlong.checkpoint.safetensors import read_file
from headlong.checkpoint.tensor_info import TORCH_DTYPES, read_into, read_tensor
from headlong.errors import CheckpointError


def write_raw(path: Path, header: bytes | dict, data: bytes = b"") -> Path:
    blob = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(blob)) + blob + data)
    return path


def entry(dtype="F32", shape=(1,), offsets=(0, 4)) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_round_trip_of_every_dtype(tmp_path):
    tensors = {}
    for i, (name, dtype) in enumerate(TORCH_DTYPES.items()):
        values = (
            torch.arange(6).reshape(2, 3) % 2 if dtype is torch.bool else torch.arange(i, i + 6).reshape(2, 3)
        )
        tensors[name] = values.to(dtype)
    save_file(tensors, tmp_path / "a.safetensors")
    header = read_file(tmp_path / "a.safetensors")[0]
    assert header.keys() == tensors.keys()
    for name, tensor in tensors.items():
        got = read_tensor(header[name])
        assert header[name].dtype == name and got.dtype == tensor.dtype
        assert torch.equal(got.view(torch.uint8), tensor.view(torch.uint8))


def test_scalars_and_empty_tensors(tmp_path):
    tensors = {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 7), "x": torch.ones(3)}
    save_file(tensors, tmp_path / "a.safetensors")
    header = read_file(tmp_path / "a.safetensors")[0]
    for name, tensor in tensors.items():
        assert header[name].shape == tuple(tensor.shape)
        assert torch.equal(read_tensor(header[name]), tensor)


def test_file_without_tensors(tmp_path):
    assert read_file(write_raw(tmp_path / "a.safetensors", {"__metadata__": {"format": "pt"}}))[0] == {}


def test_result_owns_its_memory(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"x": torch.ones(4)}, path)
    info = read_file(path)[0]["x"]
    got = read_tensor(info)
    path.write_bytes(b"\0" * path.stat().st_size)
    got += 1
    assert torch.equal(got, torch.full((4,), 2.0))
    assert got.untyped_storage().nbytes() == info.nbytes


def test_stray_bool_bytes_become_true(tmp_path):
    path = write_raw(tmp_path / "a.safetensors", {"b": entry("BOOL", (3,), (0, 3))}, b"\x00\x01\x07")
    got = read_tensor(read_file(path)[0]["b"])
    assert got.view(torch.uint8).tolist() == [0, 1, 1]


def test_read_into_converts_piece_by_piece(tmp_path):
    path = tmp_path / "a.safetensors"
    tensors = {"x": torch.randn(7, 5), "b": torch.tensor([True, False, True]), "e": torch.empty(0, 3)}
    save_file(tensors, path)
    staging = torch.empty(24, dtype=torch.uint8)  # six floats: the last piece is a short one
    for name, info in read_file(path)[0].items():
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            out = torch.full(info.shape, float("nan"), dtype=dtype)
            read_into(info, out, staging)
            assert torch.equal(out, tensors[name].to(dtype))


def test_file_cut_after_its_header_was_read(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"x": torch.ones(4)}, path)
    info = read_file(path)[0]["x"]
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match=r"'x'.*ends inside"):
        read_tensor(info)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"'x'.*cannot be read"):
        read_tensor(info)


HOSTILE = {
    "not an object": ({"t": [1]}, "must be an object"),
    "null entry": ({"t": None}, "must be an object"),
    "metadata": ({"__metadata__": 3}, "__metadata__"),
    "dtype": ({"t": entry("F33")}, "unknown dtype 'F33'"),
    "dtype missing": ({"t": {"shape": [1], "data_offsets": [0, 4]}}, "unknown dtype None"),
    "dtype list": ({"t": {**entry(), "dtype": ["F32"]}}, "unknown dtype"),
    "shape string": ({"t": {**entry(), "shape": "1"}}, "shape must be"),
    "shape bool": ({"t": entry(shape=(True,))}, "shape must be"),
    "shape float": ({"t": entry(shape=(1.0,))}, "shape must be"),
    "shape negative": ({"t": entry(shape=(-1, -1))}, "shape must be"),
    "shape overflow": ({"t": entry(shape=(2**63, 2**63))}, "absurd"),
    "shape empty but absurd": ({"t": entry(shape=(2**40, 2**40, 0), offsets=(0, 0))}, "absurd"),
    "shape rank": ({"t": entry(shape=(1,) * 1000)}, "absurd"),
    "offsets missing": ({"t": {"dtype": "F32", "shape": [1]}}, "data_offsets must be"),
    "offsets one": ({"t": entry(offsets=(0,))}, "data_offsets must be"),
    "offsets bool": ({"t": entry(offsets=(False, 4))}, "data_offsets must be"),
    "offsets negative": ({"t": entry(offsets=(-4, 0))}, "negative or reversed"),
    "offsets reversed": ({"t": entry(offsets=(4, 0))}, "negative or reversed"),
    "offsets outside": ({"t": entry(shape=(2,), offsets=(0, 8))}, "truncated"),
    "offsets huge": ({"t": entry(offsets=(10**300, 10**300 + 4))}, "truncated"),
    "size": ({"t": entry(shape=(2,))}, "4 bytes stored, but F32 [2] takes 8"),
    "overlap": ({"t": entry(), "u": entry("I8", (2,), (1, 3))}, "overlap"),
    "same place": ({"t": entry(), "u": entry()}, "overlap"),
    "hole": ({"t": entry("I8", (1,), (0, 1)), "u": entry("I8", (1,), (3, 4))}, "2 unowned bytes between"),
    "trailing": ({"t": entry("I8", (1,), (0, 1))}, "3 unowned bytes after"),
    "array": (b"[]", "expected a JSON object"),
    "empty": (b"", "not valid JSON"),
    "utf8": (b'{"\xff": 1}', "not valid JSON"),
    "duplicate": (b'{"t": 1, "t": 2}', "occurs twice"),
    "nan": (b'{"t": NaN}', "NaN"),
    "long integer": (b'{"t": ' + b"9" * 10_000 + b"}", "not valid JSON"),
    "bomb": (b'{"t": ' + b"[" * 200_000, "nested too deeply"),
    "object bomb": (b'{"t":' * 100_000, "nested too deeply"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_header(tmp_path, case):
    header, message = HOSTILE[case]
    path = write_raw(tmp_path / "bad.safetensors", header, b"\0" * 4)
    with pytest.raises(CheckpointError) as caught:
        read_file(path)[0]
    assert "bad.safetensors" in str(caught.value) and message in str(caught.value)
    if isinstance(header, dict) and "t" in header:
        assert "'t'" in str(caught.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "too short"),
        (b"\0" * 7, "too short"),
        (struct.pack("<Q", 2**63) + b"{}", "header claims"),
        (struct.pack("<Q", 3) + b"{}", "header claims"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "git lfs pull"),
    ],
)
def test_hostile_file(tmp_path, data, message):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        read_file(path)[0]


def test_absent_file_and_folder(tmp_path):
    for path in (tmp_path / "none.safetensors", tmp_path):
        with pytest.raises(CheckpointError, match="no such file"):
            read_file(path)[0]


def test_lone_surrogate_in_a_name_is_printable(tmp_path):
    path = write_raw(tmp_path / "a.safetensors", b'{"\\ud800": 1}')
    with pytest.raises(CheckpointError) as caught:
        read_file(path)[0]
    str(caught.value).encode("utf-8")


VALID = {"a": entry(), "b": entry("BF16", (2, 3), (4, 16)), "c": entry("I8", (0,), (16, 16))}
VALID_HEADER = json.dumps(VALID).encode()
VALID_FILE = struct.pack("<Q", len(VALID_HEADER)) + VALID_HEADER + bytes(range(16))

edits = st.lists(
    st.tuples(
        st.sampled_from(["set", "insert", "delete"]),
        st.integers(0, 8 + len(VALID_HEADER)),
        st.one_of(
            st.binary(min_size=1, max_size=1), st.sampled_from([c.encode() for c in '0123456789-[]{}",:eE'])
        ),
    ),
    min_size=1,
    max_size=4,
)


@given(edits=edits, fix_length=st.booleans(), cut=st.one_of(st.none(), st.integers(0, len(VALID_FILE))))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_mutated_files_raise_only_checkpoint_errors(tmp_path, edits, fix_length, cut):
    blob = bytearray(VALID_FILE)
    for kind, at, byte in edits:
        at = max(at, 8) if fix_length else at
        if kind == "insert":
            blob[at:at] = byte
        else:
            blob[at : at + 1] = byte if kind == "set" else b""
    if fix_length:  # the edits stay within the header, so its true length is known
        blob[:8] = struct.pack("<Q", max(0, len(blob) - 8 - 16))
    path = tmp_path / "fuzz.safetensors"
    path.write_bytes(bytes(blob[:cut]))
    try:
        header = read_file(path)[0]
    except CheckpointError as error:
        assert "fuzz.safetensors" in str(error)
        return
    for info in header.values():
        assert read_tensor(info).shape == info.shape
