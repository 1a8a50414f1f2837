"""Where GGUF orders rows and columns in another way than a safetensors checkpoint.

Two cases: the rotary pairs of `llama`, and the value heads of a DeltaNet with more of them than key heads. Knows
canonical names and sizes; reads and writes nothing.
"""

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from headlong.checkpoint.gguf_names import LLAMA
from headlong.checkpoint.transforms import inverse, rope_row_order, tiled_row_order
from headlong.models.config import ModelConfig

_VALUE_ROWS = re.compile(
    r"layers\.\d+\.linear_attn\.(in_proj_z|in_proj_a|in_proj_b|A_log|dt_bias)(\.weight)?"
)
_MIXED_ROWS = re.compile(r"layers\.\d+\.linear_attn\.(in_proj_qkv|conv1d)\.weight")
_VALUE_COLUMNS = re.compile(r"layers\.\d+\.linear_attn\.out_proj\.weight")
_ROTARY_ROWS = re.compile(r"(mtp\.)?layers\.\d+\.self_attn\.([qk])_proj\.(weight|bias)")


@dataclass(frozen=True)
class Order:
    """Indices to be taken of the rows and of the columns; None leaves them alone."""

    rows: Tensor | None = None
    columns: Tensor | None = None

    def inverse(self) -> "Order":
        return Order(*(None if part is None else inverse(part) for part in (self.rows, self.columns)))


AS_IS = Order()


def grouped_order(name: str, config: ModelConfig) -> Order:
    """How tiled value heads, as GGUF has them, are put back into groups."""
    c = config.delta_net
    if c is None or c.num_value_heads == c.num_key_heads:
        return AS_IS
    if match := _VALUE_ROWS.fullmatch(name):
        per_head = c.value_dim if match[1] == "in_proj_z" else 1
        return Order(rows=tiled_row_order(c.num_key_heads, c.num_value_heads, per_head))
    values = tiled_row_order(c.num_key_heads, c.num_value_heads, c.value_dim)
    if _MIXED_ROWS.fullmatch(name):
        before = 2 * c.num_key_heads * c.key_dim
        return Order(rows=torch.cat([torch.arange(before), before + values]))
    return Order(columns=values) if _VALUE_COLUMNS.fullmatch(name) else AS_IS


def disk_order(name: str, config: ModelConfig, arch: str) -> Order:
    """How rows and columns in the order of a safetensors checkpoint are put into that of a GGUF file."""
    if arch != LLAMA:
        return grouped_order(name, config).inverse()
    match = _ROTARY_ROWS.fullmatch(name)
    if match is None:
        return AS_IS
    attention = config.attention
    heads = attention.num_heads if match[2] == "q" else attention.num_kv_heads
    return Order(rows=rope_row_order(heads, attention.head_dim)).inverse()
