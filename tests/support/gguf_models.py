"""Tiny models as GGUF files with any block type in any matrix, written through the `gguf` package.

Types the package cannot pack into get random codes with scales of a sane size; `meant` is what the blocks stand for,
as the package itself unpacks them.
"""

from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from headlong.models.registry import BY_ARCHITECTURE, gguf_metadata
from headlong.quant.gguf import BLOCK_SIZES

SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
SCALES |= {"TQ1_0": (52,), "TQ2_0": (64,)}
"""Where the half-precision scales of a block lie; in other types at its beginning."""
PACKABLE = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
PLAIN = ("F32", "F16", "BF16")


def pack(weight: Tensor, kind: str) -> np.ndarray:
    """The bytes of a matrix, or of random codes where nothing packs it."""
    if kind in PACKABLE or kind in PLAIN:
        return gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType[kind])
    elements, nbytes = BLOCK_SIZES[kind]
    rows, columns = weight.shape
    generator = np.random.default_rng(int(weight.abs().sum() * 1000) % 2**32)
    blocks = generator.integers(0, 256, (rows, columns // elements, nbytes), dtype=np.uint8)
    scale = np.array([0.7 / columns**0.5 / 64], dtype=np.float16).view(np.uint8)
    if kind == "MXFP4":
        blocks[..., 0] = generator.integers(118, 122, blocks.shape[:-1])
        return blocks.reshape(rows, -1)
    if kind == "IQ1_M":  # four bits in each of four words
        bits = int(scale.view(np.uint16)[0])
        for word in range(4):
            high = blocks[..., 49 + 2 * word] & 0x0F
            blocks[..., 49 + 2 * word] = high | (bits >> 4 * word & 15) << 4
        return blocks.reshape(rows, -1)
    for at in SCALES.get(kind, (0,)):
        blocks[..., at : at + 2] = scale
    return blocks.reshape(rows, -1)


def fitting(kind: str, columns: int) -> str:
    """The type that rows of this length can have where most matrices have `kind`."""
    for candidate in (kind, "Q8_0"):
        if candidate in PLAIN or not columns % BLOCK_SIZES[candidate][0]:
            return candidate
    return "F16"


def unpack(data: np.ndarray, kind: str, shape: tuple[int, ...]) -> Tensor:
    values = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
    return torch.from_numpy(np.array(values, dtype=np.float32)).view(shape)


def repacked(path: Path, out: Path, kind: str) -> None:
    """A GGUF file of floats written again with its matrices, but not the embedding, packed into `kind`."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(out, str(reader.fields["general.architecture"].contents()))
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            element = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], element)
    for tensor in reader.tensors:
        weight = torch.from_numpy(np.array(tensor.data, dtype=np.float32))
        if weight.dim() < 2 or "token_embd" in tensor.name or "gate_inp" in tensor.name:
            writer.add_tensor(tensor.name, weight.numpy())
            continue
        own = fitting(kind, weight.shape[-1])
        data = pack(weight.reshape(-1, weight.shape[-1]), own)
        writer.add_tensor(
            tensor.name, data.reshape(*weight.shape[:-1], -1), raw_dtype=gguf.GGMLQuantizationType[own]
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def is_matrix(name: str, weight: Tensor) -> bool:
    whole = ("conv1d", "shared_expert_gate", ".bias")
    return weight.dim() in (2, 3) and not any(part in name for part in whole)


def experts_by_projection(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Fused experts as GGUF has them: gate, up and down, each in one tensor."""
    found = {}
    router = any(".mlp.router." in name for name in weights)
    for name, weight in weights.items():
        stem, _, kind = name.rpartition(".")
        if name.replace(".router.", ".gate.") != name:
            found[name.replace(".router.", ".gate.")] = weight
        elif router and kind in ("gate_up_proj", "gate_up_proj_bias"):
            # Stored as [experts, in, out], gates and ups by turns.
            ending = "bias" if kind.endswith("bias") else "weight"
            for first, own in enumerate(("gate_proj", "up_proj")):
                part = weight[..., first::2]
                found[f"{stem}.{own}.{ending}"] = part if ending == "bias" else part.transpose(1, 2)
        elif router and kind in ("down_proj", "down_proj_bias"):
            part = weight if kind.endswith("bias") else weight.transpose(1, 2)
            found[f"{stem}.down_proj.{'bias' if kind.endswith('bias') else 'weight'}"] = part
        elif kind == "gate_up_proj":
            gate, up = weight.chunk(2, dim=1)
            found |= {f"{stem}.gate_proj.weight": gate, f"{stem}.up_proj.weight": up}
        else:
            found[f"{name}.weight" if kind == "down_proj" and weight.dim() == 3 else name] = weight
    return found


class GgufModel:
    """Collects tensors by canonical name; `meant` holds the floats they stand for, by their usual names."""

    def __init__(self, config: dict, arch: str) -> None:
        self.config = config
        self.arch = arch
        spec = BY_ARCHITECTURE[arch].gguf
        assert spec is not None
        self.names = spec.names
        self.num_layers = config["num_hidden_layers"]
        self.tensors: dict[str, tuple[np.ndarray, str]] = {}
        self.meant: dict[str, Tensor] = {}

    def add(self, name: str, weight: Tensor, kind: str) -> None:
        canonical = name if name.startswith(("mtp.", "lm_head.")) else name.removeprefix("model.")
        disk = self.names.disk(canonical, self.num_layers)
        assert disk is not None, name
        if is_matrix(name, weight):
            flat = weight.float().reshape(-1, weight.shape[-1])
            kind = fitting(kind, flat.shape[1])
            data = pack(flat, kind)
            self.meant[name] = unpack(data, kind, tuple(weight.shape))
            self.tensors[disk] = (data.reshape(*weight.shape[:-1], -1), kind)
        else:
            stored = self.names.transform(canonical).to_disk(weight.float())
            self.meant[name] = weight.float()
            self.tensors[disk] = (stored.float().numpy(), "F32")

    def write(self, path: Path, *, head: bool, only_head: bool = False, has_head: bool | None = None) -> None:
        """With or without block N; `only_head` writes that block alone."""
        writer = gguf.GGUFWriter(path, self.arch)
        fields = gguf_metadata(self.config, head_layers=int(head if has_head is None else has_head))
        for key, value in fields.items():
            if key != "general.architecture":
                kind = (
                    gguf.GGUFValueType.ARRAY
                    if isinstance(value, list)
                    else gguf.GGUFValueType.get_type(value)
                )
                element = [gguf.GGUFValueType.get_type(value[0])] if isinstance(value, list) else []
                writer.add_key_value(key, value, kind, *element)
        for name, (data, kind) in self.tensors.items():
            in_head = name.startswith(f"blk.{self.num_layers}.")
            if (in_head and head) or (not in_head and not only_head):
                raw = None if kind == "F32" else gguf.GGMLQuantizationType[kind]
                writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=raw)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
