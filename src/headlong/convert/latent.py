"""The matrix that makes keys and values of latents, which GGUF files keep as two: head by head, the keys' transposed.

Knows shapes and names; what is in which file its callers know.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from headlong.layers.latent_attention import (
    EXPANDING,
    KEYS_OF_LATENTS,
    VALUES_OF_LATENTS,
    LatentAttentionConfig,
)

Shape = tuple[int, ...]


def is_expanding(name: str) -> bool:
    """True for the whole matrix, by its canonical name."""
    return name.endswith(f".{EXPANDING}.weight")


def is_half(name: str) -> bool:
    return name.endswith((f".{KEYS_OF_LATENTS}.weight", f".{VALUES_OF_LATENTS}.weight"))


def whole_name(half: str) -> str:
    return half.replace(f".{KEYS_OF_LATENTS}.", f".{EXPANDING}.").replace(
        f".{VALUES_OF_LATENTS}.", f".{EXPANDING}."
    )


def half_names(whole: str) -> tuple[str, str]:
    """Returns the names of the keys' half and of the values'."""
    keys, values = (
        whole.replace(f".{EXPANDING}.", f".{half}.") for half in (KEYS_OF_LATENTS, VALUES_OF_LATENTS)
    )
    return keys, values


def whole_shape(c: LatentAttentionConfig) -> Shape:
    return (c.num_heads * (c.plain_dim + c.value_dim), c.rank)


def half_shapes(c: LatentAttentionConfig) -> tuple[Shape, Shape]:
    return (c.num_heads, c.rank, c.plain_dim), (c.num_heads, c.value_dim, c.rank)


def halves(tiles: Iterable[Tensor], c: LatentAttentionConfig) -> tuple[Tensor, Tensor]:
    """The two of the whole, whose rows come in `tiles`."""
    heads = torch.cat(list(tiles)).view(c.num_heads, c.plain_dim + c.value_dim, c.rank)
    keys, values = heads.split((c.plain_dim, c.value_dim), dim=1)
    return keys.transpose(1, 2).contiguous(), values.contiguous()


def joined(keys: Iterable[Tensor], values: Iterable[Tensor]) -> Iterator[Tensor]:
    """The rows of the whole, of each head's two matrices."""
    for keys_RP, values_VR in zip(keys, values, strict=True):
        yield torch.cat([keys_RP.T, values_VR])
