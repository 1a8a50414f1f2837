"""Which of two versions the zero points of a GPTQ matrix are: the first stores them less one, the second as they are.

Shapes and dtypes are the same in both, and the wrong one gives text without sense. The config is asked first, then the
values: those of symmetric codes are known, and weights have a mean near 0 under the right version alone. Knows codes
and zero points; nothing of how either is packed.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headlong.errors import CheckpointError

FIRST, SECOND = 1, 0
"""What is added to a stored zero point in either version."""
VERSIONS = {"gptq": FIRST, "gptq_v2": SECOND}
DISPUTED = "gptq or gptq_v2"
"""The `checkpoint_format` of a hint where two configs name one each."""
LEAST_FIELDS, LEAST_ROWS, MOST_ROWS = 16, 16, 256
WIDEST = 4
"""The most bits at which a mean tells versions apart: at 8 bits a step is small beside what means may be."""
MARGIN, ERRORS = 0.4, 5.0
"""How far a mean may lie from a version's, in steps, with so many standard errors added to it."""


def version_by_config(hint: Mapping[str, Any]) -> tuple[int | None, bool]:
    """The version that the config means, None where it means none, and whether it says so in words."""
    named = hint.get("checkpoint_format")
    if named is None:
        return (FIRST if hint.get("method") == "gptq" else None), False
    if named == DISPUTED:
        return None, False
    if named not in VERSIONS:
        raise CheckpointError(
            f"checkpoint_format is {named!r}, and of the layouts with these parts gptq and gptq_v2 can be read"
        )
    return VERSIONS[named], True


def version_by_values(zeros_RG: Tensor, codes_RD: Tensor, columns_G: Tensor, width: int) -> int | None:
    """The version that these rows can be of alone; None where they can be of both. `columns_G` are how many columns
    each group has."""
    half = float(1 << (width - 1))
    first = zeros_RG.reshape(-1)[0]
    if zeros_RG.numel() >= LEAST_FIELDS and bool((zeros_RG == first).all()):
        for version in (FIRST, SECOND):
            if float(first) + version == half:
                return version
    rows = len(codes_RD)
    if width > WIDEST or rows < LEAST_ROWS:
        return None
    means_R = codes_RD.mean(dim=1) - (zeros_RG * columns_G).sum(dim=1) / codes_RD.shape[1]
    mean, error = float(means_R.mean()), ERRORS * float(means_R.std()) / rows**0.5
    for version in (FIRST, SECOND):
        if abs(mean - version) + error < MARGIN:
            return version
    return None


def settled(by_config: int | None, stated: bool, by_values: int | None) -> int:
    """The version that all evidence is for; an error where there is none or where it is divided."""
    if by_values is None:
        if by_config is not None:
            return by_config
        raise CheckpointError(
            "the zero points can be read in two ways, and neither a config nor the values say which: give "
            "`checkpoint_format` (gptq or gptq_v2) in quantization_config; for a head, draft_quantization"
        )
    if stated and by_config is not None and by_config != by_values:
        names = {version: name for name, version in VERSIONS.items()}
        raise CheckpointError(
            f"the config says checkpoint_format {names[by_config]!r}, and the zero points have the values of "
            f"{names[by_values]!r}: correct `checkpoint_format`"
        )
    return by_values


def whole_zeros(words_GW: Tensor, zeros_GO: Tensor, width: int, writer: Any) -> Tensor | None:
    """New words for zero points of the first version that hold the largest field; None where none does.

    A zero point of 0, stored less one, is that field. gptqmodel subtracts from whole words and so borrows from the next
    field; others write fields, or damage the word. Adding to whole words takes back what gptqmodel did.
    """
    largest = (1 << width) - 1
    if not bool((zeros_GO == largest).any()):
        return None
    if writer != "gptqmodel" or width == 3:
        raise CheckpointError(
            f"qzeros hold {largest}, which less-one zero points are read from in more than one way, and the config "
            "names no gptqmodel that wrote them: save the model again as gptq_v2"
        )
    ones = sum(1 << at for at in range(0, 32, width))
    return words_GW + torch.tensor(ones, dtype=torch.int64).to(torch.int32)
