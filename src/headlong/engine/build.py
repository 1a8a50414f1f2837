"""Joins the two halves that must not know each other: what is on disk, and what a model asks for.

Decides whether there is a usable head, from the tensors, and says why where there is none.
"""

import logging
from dataclasses import dataclass
from typing import Literal

import torch

from headlong.checkpoint.checkpoint import Checkpoint
from headlong.checkpoint.load import Expectations, WeightLoader, verify
from headlong.checkpoint.names import NameMap
from headlong.errors import ConfigError, HeadError
from headlong.layers.weights import Scope
from headlong.models import registry
from headlong.models.config import ModelConfig
from headlong.models.mtp import MtpHead
from headlong.models.qwen3_5 import Qwen35Model
from headlong.ops.registry import Ops, default_dtype
from headlong.progress import ProgressFn, silent

log = logging.getLogger(__name__)
MtpMode = Literal["auto", "on", "off"]
HEAD = "mtp."
STORED_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}


@dataclass(frozen=True)
class Blueprint:
    """A checkpoint matched with its model, before any weight is read."""

    checkpoint: Checkpoint
    names: NameMap
    config: ModelConfig
    architecture: registry.Architecture
    expected: dict[str, tuple[int, ...]]
    """Canonical name to shape of every tensor that will be loaded, the head's among them if it is usable."""
    head_refusal: str | None
    """Why there is no usable head; None if there is one."""

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype most bytes on disk are in."""
        totals: dict[str, int] = {}
        for name in self.expected:
            for disk in self.names.sources.get(name, ()):
                info = self.checkpoint.tensors[disk]
                totals[info.dtype] = totals.get(info.dtype, 0) + info.nbytes
        return STORED_DTYPES.get(max(totals, key=lambda dtype: totals[dtype]), torch.float32)


@dataclass(frozen=True)
class Built:
    """A model in memory. `head` is None where drafting is off, and `head_refusal` says why."""

    model: Qwen35Model
    head: MtpHead | None
    head_refusal: str | None
    ops: Ops


def survey(checkpoint: Checkpoint, mtp: MtpMode = "auto") -> Blueprint:
    """Checks every tensor's name and shape against the model, reading headers alone.

    A target that does not fit is an error; so is a head that is there but does not fit, unless MTP is off.
    """
    architecture = registry.find(checkpoint.config)
    config = architecture.parse(checkpoint.config)
    names = NameMap(checkpoint)
    dry = Scope(source := Expectations(names), Ops(torch.float32, torch.device("meta")))
    architecture.model(config, dry)
    expected = dict(source.expected)
    verify(expected, names, checkpoint, what="model", prefix_filter=lambda name: not name.startswith(HEAD))
    refusal = _refusal(checkpoint, names, mtp)
    if refusal is None:
        source = Expectations(names)
        architecture.head(config, Scope(source, dry.ops, HEAD))
        verify(
            source.expected,
            names,
            checkpoint,
            what="MTP head",
            prefix_filter=lambda name: name.startswith(HEAD),
            error=HeadError,
        )
        expected |= source.expected
    return Blueprint(checkpoint, names, config, architecture, expected, refusal)


def _refusal(checkpoint: Checkpoint, names: NameMap, mtp: MtpMode) -> str | None:
    if mtp == "off":
        return "MTP was turned off (mtp='off')"
    heads = [name for name in names.sources if name.startswith(HEAD)]
    if not heads:
        refusal = f"the checkpoint has no MTP head (no tensor named {HEAD}* in {checkpoint.folder.name})"
    elif any(name.startswith(f"{HEAD}layers.1.") for name in heads):
        refusal = "the checkpoint's MTP head has several layers; only one-layer heads are supported"
    else:
        return None
    if mtp == "on":
        raise HeadError(f"mtp='on', but {refusal}; use mtp='auto' to serve without drafting")
    log.warning("serving without drafting: %s", refusal)
    return refusal


def build(
    blueprint: Blueprint,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    progress: ProgressFn = silent,
) -> Built:
    """Reads the weights, one tensor at a time."""
    chosen = dtype or default_dtype(device, blueprint.stored_dtype)
    if not chosen.is_floating_point:
        raise ConfigError(f"dtype must be a floating-point dtype, not {chosen}")
    log.info("dtype %s (stored %s) on %s", chosen, blueprint.stored_dtype, device)
    if device.type == "cuda" and chosen != torch.float64:
        log.warning("on CUDA matmuls are not batch-invariant yet: drafting may decide a near-tie differently")
    ops = Ops(chosen, device)
    loader = WeightLoader(
        blueprint.checkpoint, blueprint.names, chosen, device, progress, wanted=blueprint.expected
    )
    scope = Scope(loader, ops)
    with torch.inference_mode():
        model = blueprint.architecture.model(blueprint.config, scope)
        head = None
        if blueprint.head_refusal is None:
            head = blueprint.architecture.head(blueprint.config, Scope(loader, ops, HEAD))
    return Built(model, head, blueprint.head_refusal, ops)
