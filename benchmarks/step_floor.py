"""The floor of a step: the bytes that it must read, at the best rate that the memory gives.

Of weights: all matrices but the embedding, and of experts those that one token is routed to. Of what was kept of the
context, for each row: keys and values of as many positions as a layer attends to; of DeepSeek-V4's layers the window,
the entries that are chosen (all of them, where nobody chooses) and the indexer's own entries, all of which it scores;
memories of recurrent layers, which are written too. What is read twice counts once, and activations not at all.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch

from headlong.engine.build import Built
from headlong.models.config import SLIDING, ModelConfig
from headlong.state.compressed_kv import CompressedKvSpec
from headlong.state.delta_net import DeltaNetSpec
from headlong.state.latent_kv import LatentKvSpec
from headlong.state.paged_kv import PagedKvSpec
from headlong.state.specs import LayerSpec

Timer = Callable[[Callable[[], object]], float]
"""Milliseconds that a call takes."""


def floor(args: argparse.Namespace, milliseconds: Timer) -> dict[str, float]:
    """What the memory gives: a copy, and the largest product for one token alone, in bytes a second; and a step's bytes
    at the better rate, of weights and of each context."""
    device = args.built.ops.device
    source = torch.empty(2**31, dtype=torch.uint8, device=device)
    copied = 2 * source.nbytes / milliseconds(partial(torch.empty_like(source).copy_, source))
    del source
    config = args.built.model.config
    x = torch.randn(1, config.hidden_size, device=device)
    read = config.vocab_size * config.hidden_size * 2
    rate = read / milliseconds(lambda: args.built.model.lm_head(x))
    best = max(rate, copied)
    found = {
        "copy_tb_per_s": round(copied / 1e9, 2),
        "lm_head_tb_per_s": round(rate / 1e9, 2),
        "target_gb": round(args.target_bytes / 1e9, 2),
        "draft_gb": round(args.draft_bytes / 1e9, 2),
        "target_floor_ms": round(args.target_bytes / best, 3),
        "draft_floor_ms": round(args.draft_bytes / best, 3),
    }
    for context in args.contexts:
        kept = context_bytes(args.built, context)
        found[f"context{context}_mb"] = round(kept / 1e6, 2)
        found[f"context{context}_floor_ms"] = round((args.target_bytes + kept) / best, 3)
    return found


def context_bytes(built: Built, context: int) -> int:
    """What a step of one token reads of so many tokens before it."""
    config, ops = built.model.config, built.ops
    specs = list(built.model.state_specs.values())
    windows = [config.window if kind == SLIDING else None for kind in config.layer_types]
    return sum(
        _layer_bytes(config, spec, context if window is None else min(window, context), ops.dtype)
        for spec, window in zip(specs, windows, strict=True)
    )


def _layer_bytes(config: ModelConfig, spec: LayerSpec, positions: int, dtype: torch.dtype) -> int:
    wide = torch.float32.itemsize  # what lies in slots
    match spec:
        case PagedKvSpec() | LatentKvSpec():
            return positions * spec.bytes_per_token(dtype)
        case CompressedKvSpec():
            found = min(spec.window, positions) * spec.head_dim * wide
            chosen = next((c.indexer.top_k for c in config.compressions if c and c.indexer), positions)
            for number, each in enumerate(spec.compressors):
                count = positions // each.ratio
                is_chosen = number == 0 and len(spec.compressors) > 1
                found += (min(count, chosen) if is_chosen else count) * each.dim * dtype.itemsize
            return found
        case DeltaNetSpec():
            return 2 * spec.bytes_per_slot(0, torch.float32)
    raise AssertionError(f"nobody knows what a step reads of {spec}")
