"""Empty states of a DeltaNet layer for tests of its ops, which do not allocate what they work on."""

import torch

from headlong.ops.gated_delta.reference import DeltaState


def zeros(
    num_slots: int, num_heads: int, key_dim: int, value_dim: int, max_drafts: int, **options
) -> DeltaState:
    return DeltaState(
        torch.zeros(num_slots, num_heads, key_dim, value_dim, **options),
        torch.zeros(num_slots, max_drafts, num_heads, key_dim + value_dim + 2, **options),
    )
