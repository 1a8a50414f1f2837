"""Tiny checkpoints of every family for tests on a GPU.

    python tests/support/cuda_families.py FOLDER

writes all of them. A GPU's machine may have a release of transformers that lacks a family: it can be given the folder
in HEADLONG_TINY_FAMILIES.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

FOLDER = "HEADLONG_TINY_FAMILIES"
FEW_WORDS = 12
"""Tokens of a vocabulary so small that some drafts of a random head stand."""
HEAVY = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16}
V4_WORDS: dict[str, Any] = {"vocab_size": FEW_WORDS, "num_hash_layers": 1}


def _tiny(family: str, **sizes: Any) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        from support import tiny

        tiny.make(folder, family, seed=8, vocab_size=FEW_WORDS, **sizes)

    return make


def _packed_gpt_oss(folder: Path) -> None:
    from support import packed_gpt_oss

    made = packed_gpt_oss.make(folder / "made", seed=8, vocab_size=FEW_WORDS, head=True)
    for path in made.folder.iterdir():
        path.rename(folder / path.name)


def _v4(**sizes: Any) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        from support import tiny_v4

        tiny_v4.make(folder, seed=8, **V4_WORDS, **sizes)

    return make


def _packed_v4(*how: str, head: str | None = None) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        from support import deepseek_v4_files as files

        files.make(files.packs(*how, head=head), **V4_WORDS, swiglu_limit=0.6).write(folder)

    return make


def _slides(last: int) -> dict[str, Any]:
    """Windows in all layers but the last ones, as Qwen's configs say it."""
    return {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": last}


CASES: dict[str, Callable[[Path], None]] = {
    "qwen3_next": _tiny("next"),
    "qwen3_5_moe": _tiny("moe"),
    "llama": _tiny("llama"),
    "mistral": _tiny("mistral", sliding_window=11),
    "ministral": _tiny("ministral", layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
    "qwen2": _tiny("qwen2", **_slides(1)),
    "qwen3": _tiny("qwen3", **_slides(1)),
    "qwen3_moe": _tiny("qwen3_moe", num_experts=20, num_experts_per_tok=3),
    "mimo": _tiny("mimo"),
    "glm4_moe": _tiny("glm4_moe", n_group=4, topk_group=2, use_qk_norm=True),
    "glm4_moe_lite": _tiny("glm4_moe_lite"),
    "deepseek_v3": _tiny("deepseek_v3"),
    "gpt_oss": _tiny("gpt_oss", swiglu_limit=0.8),
    "gpt_oss packed": _packed_gpt_oss,
    "deepseek_v4": _v4(compress_ratios=[0, 4, 128, 4], compress_rates=HEAVY),
    "deepseek_v4 as released": _v4(compress_ratios=[4, 128], index_topk=9),
    "deepseek_v4 packed": _packed_v4("mxfp4_deepseek", "fp8_bytes", head="same"),
    "deepseek_v4 packed anew": _packed_v4("nvfp4_modelopt", "fp8_block"),
}
"""By name; those of DeepSeek-V4 have entries of four and of sixteen tokens, or of 128 as releases do. The last ones are
packed as they are published: experts in FP4, other projections in FP8; and experts in NVFP4 with a head in bfloat16."""
PARTLY_BFLOAT16 = ("deepseek_v4 packed", "deepseek_v4 packed anew")
"""Cases whose other matrices are stored in bfloat16: a GPU multiplies those as they are stored, a CPU in float32."""


def random_words(count: int, seed: int) -> list[int]:
    return torch.randint(FEW_WORDS, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def folder_of(name: str, otherwise: Path) -> Path:
    """Where a checkpoint lies; it is made in a folder `otherwise` if nobody brought it."""
    given = os.environ.get(FOLDER)
    if given is not None:
        return Path(given) / name.replace(" ", "_")
    CASES[name](otherwise)
    return otherwise


def main() -> None:
    for name, make in CASES.items():
        folder = Path(sys.argv[1]) / name.replace(" ", "_")
        folder.mkdir(parents=True)
        make(folder)
        print(name)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
