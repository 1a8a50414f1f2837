"""The GGUF container, version 3, written one piece of one tensor at a time; floats are packed on the way.

The header is the `gguf` package's own. Knows value types, block types and alignment; nothing of names or of what is
worth which precision.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import quantize
from torch import Tensor

from headlong.checkpoint.writing import Chunk, Entry, raw_bytes
from headlong.errors import CheckpointError
from headlong.progress import ProgressFn, silent

WRITABLE = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
"""The types that floats can be packed into. Ready bytes are accepted for every type."""
ALIGNMENT = 32
TILE_ELEMENTS = 2**20
"""How many elements are packed at once: numpy's intermediate results take several times this in float32."""
_TORCH = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_LARGEST_F16 = 65504.0


def block_elements(dtype: str) -> int:
    """How many elements a block has; a row must be a multiple of it."""
    return GGML_QUANT_SIZES[GGMLQuantizationType[dtype]][0]


def gguf_nbytes(entry: Entry) -> int:
    elements, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[entry.dtype]]
    assert not entry.shape[-1] % elements, f"{entry.name}: rows of {entry.shape[-1]} cannot be {entry.dtype}"
    return entry.numel // elements * nbytes


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    entries: Sequence[Entry],
    progress: ProgressFn = silent,
    label: str = "write weights",
) -> None:
    """Writes one file. `metadata` begins with general.architecture. Integers become uint32, or wider where they must
    (int32 in arrays), floats become float32, lists become arrays. Empty lists are left out, since an array has the type
    of its first element."""
    writer = GGUFWriter(path, metadata["general.architecture"])
    for key, value in metadata.items():
        if key != "general.architecture" and value != []:
            writer.add_key_value(key, value, _value_type(value))
    for entry in entries:
        # Logical shapes, so the element type given here is of no consequence.
        kind = GGMLQuantizationType[entry.dtype]
        writer.add_tensor_info(entry.name, entry.shape, np.dtype(np.float32), gguf_nbytes(entry), kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        assert writer.fout is not None
        (file,) = writer.fout
        file.write(bytes(-file.tell() % ALIGNMENT))
        total, done = sum(gguf_nbytes(entry) for entry in entries), 0
        for entry in entries:
            written = 0
            for chunk in entry.chunks():
                for piece in _packed(chunk, entry):
                    written += file.write(piece)
                    progress(label, done + written, total)
            assert written == gguf_nbytes(entry), f"{entry.name}: {written} bytes given"
            file.write(bytes(-written % ALIGNMENT))
            done += written
    finally:
        writer.close()


def _value_type(value: Any) -> GGUFValueType:
    if isinstance(value, bool):
        return GGUFValueType.BOOL
    if isinstance(value, int):
        if 0 <= value < 1 << 32:
            return GGUFValueType.UINT32
        return GGUFValueType.UINT64 if value >= 0 else GGUFValueType.INT64
    return GGUFValueType.get_type(value)


def _packed(chunk: Chunk, entry: Entry) -> Iterator[bytes | memoryview]:
    """The bytes of a piece, which is whole rows of floats to be packed, or bytes that are written as they are."""
    if not isinstance(chunk, Tensor):
        yield chunk
        return
    if chunk.dtype is torch.uint8:
        yield raw_bytes(chunk)
        return
    rows = chunk.reshape(-1, entry.shape[-1])
    step = max(1, TILE_ELEMENTS // entry.shape[-1])
    for first in range(0, len(rows), step):
        yield pack_rows(rows[first : first + step], entry.dtype, entry.name)


def pack_rows(rows: Tensor, dtype: str, name: str) -> memoryview:
    """Packs whole rows of floats into one of the `WRITABLE` types. `name` opens the error for values it cannot hold."""
    if dtype in _TORCH:
        packed = rows.to(_TORCH[dtype])
        if dtype == "F16" and not packed.isfinite().all() and rows.isfinite().all():
            raise CheckpointError(
                f"tensor {name!r}: has values above {_LARGEST_F16:g}, which f16 cannot hold; use bf16 or f32"
            )
        return raw_bytes(packed)
    if not rows.isfinite().all():
        raise CheckpointError(
            f"tensor {name!r}: has values that are not finite and cannot be packed as {dtype}"
        )
    return quantize(rows.float().numpy(), GGMLQuantizationType[dtype]).reshape(-1).view(np.uint8).data
