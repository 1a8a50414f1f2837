"""Joins the two halves that must not know each other: what is on disk, and what a model asks for.

Decides whether there is a usable head, from the tensors, and says why where there is none.
"""

import ctypes
import logging
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from headlong.checkpoint.checkpoint import Checkpoint
from headlong.checkpoint.copies import disagreements
from headlong.checkpoint.detect import HEAD, Detector
from headlong.checkpoint.load import Expectations, Need, Repack, WeightLoader
from headlong.checkpoint.names import NameMap
from headlong.checkpoint.verify import Verifier
from headlong.config import REPACKED, EngineConfig
from headlong.env import available_cores
from headlong.errors import CheckpointError, ConfigError, HeadError
from headlong.layers.weights import Scope
from headlong.models import registry
from headlong.models.config import ModelConfig
from headlong.models.decoder import DecoderModel
from headlong.models.embeddings import Embeddings
from headlong.models.family import Family
from headlong.models.head_spec import MAX_LAYERS, other_drafter
from headlong.models.mtp import MtpHead
from headlong.ops.backend import Backend
from headlong.ops.registry import choose_backend, default_dtype
from headlong.progress import ProgressFn, silent
from headlong.quant.format import Format
from headlong.quant.plain import PlainFormat
from headlong.state.oom import refusing_oom_on

log = logging.getLogger(__name__)
STORED_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}
MAX_TOLD = 3
"""Faults of a head that are told where one sentence is wanted."""
PLAINLY = "use mtp='auto' to serve without drafting"


@dataclass(frozen=True)
class Blueprint:
    """A checkpoint matched with its model, before any weight is read."""

    checkpoint: Checkpoint
    names: NameMap
    detector: Detector
    config: ModelConfig
    family: Family
    expected: dict[str, Need]
    """What will be loaded, by canonical name; the head's among it if it is usable."""
    formats: dict[str, Format]
    """How each matrix is packed."""
    head_refusal: str | None
    """Why there is no usable head; None if there is one."""
    options: EngineConfig = field(default_factory=EngineConfig)

    @property
    def is_packed(self) -> bool:
        """True if any matrix of the target is packed."""
        return any(
            not isinstance(f, PlainFormat) for name, f in self.formats.items() if not name.startswith(HEAD)
        )

    def head(self, scope: Scope) -> MtpHead:
        """The head, of the tensors in `scope`."""
        return self.family.head(self.config, scope, self.names.head_layers)

    def stored_dtype(self, *, head: bool = False) -> torch.dtype | None:
        """The dtype most bytes of the target's plain matrices are in; None where all are packed."""
        totals: dict[str, int] = {}
        for name, format in self.formats.items():
            if isinstance(format, PlainFormat) and name.startswith(HEAD) == head:
                info = self.names.sources[name]
                totals[info.dtype] = totals.get(info.dtype, 0) + info.nbytes
        return STORED_DTYPES[max(totals, key=lambda dtype: totals[dtype])] if totals else None

    def row_order(self, name: str) -> Tensor | None:
        """How the rows of a tensor are to be reordered on load."""
        gguf, info = self.family.gguf, self.names.sources.get(name)
        if gguf is None or not gguf.reordered_on_load or info is None:
            return None
        return gguf.order(name, self.config).rows if info.file in self.checkpoint.gguf_layers else None

    @property
    def repacked_head(self) -> Repack | None:
        """What the head's matrices are turned into on load; None if they stay as they are stored."""
        wanted = self.options.draft_quantization
        return cast(Repack, wanted) if wanted in REPACKED else None

    def dtype(self, device: torch.device) -> torch.dtype:
        """What is computed in."""
        return self.options.resolve_dtype() or default_dtype(device, self.stored_dtype())

    def head_dtype(self, device: torch.device) -> torch.dtype:
        """What the head's plain matrices are kept and multiplied in: what they are stored in, where that is fast."""
        chosen = self.options.resolve_draft_dtype()
        if chosen is not None:
            return chosen
        dtype = self.dtype(device)
        stored = self.stored_dtype(head=True)
        if stored is None or self.options.dtype != "auto" or not self.is_packed:
            return dtype
        return min(dtype, default_dtype(device, stored), key=lambda candidate: candidate.itemsize)


@dataclass(frozen=True)
class Built:
    """A model in memory. `head` is None where drafting is off, and `head_refusal` says why."""

    model: DecoderModel
    head: MtpHead | None
    head_refusal: str | None
    ops: Backend
    lent: Embeddings | None = None
    """The head's own copy of what it takes from the model, where it is on another device."""


def survey(checkpoint: Checkpoint, options: EngineConfig | None = None) -> Blueprint:
    """Checks every tensor's name, shape and packing against the model, reading headers alone.

    A target that does not fit is an error. A head that does not is one if MTP was insisted on; else it is a reason.
    """
    options = options or EngineConfig()
    described = registry.config_of(checkpoint)
    family = registry.find(described)
    config, names = family.config(described), registry.names_of(checkpoint)
    detector = Detector(checkpoint, names, _head_hint(options))
    verifier = Verifier(names, detector)
    dry = Scope(source := Expectations(names), choose_backend(torch.float32, torch.device("meta")))
    family.model(config, dry)
    expected = dict(source.expected)
    where = checkpoint.folder
    verifier.verify(expected, what="model", where=where, prefix_filter=lambda name: not name.startswith(HEAD))
    refusal = _absence(checkpoint, names, options)
    if refusal is None:
        source = Expectations(names)
        try:
            family.head(config, Scope(source, dry.ops, HEAD), names.head_layers)
            verifier.verify(
                source.expected,
                what="MTP head",
                where=where,
                prefix_filter=lambda name: name.startswith(HEAD),
                error=HeadError,
            )
            expected |= source.expected
        except CheckpointError as error:
            refusal = _refuse(options, str(error))
    for module, sentence in detector.disagreements.items():
        log.info("%s: %s; the tensors decide", module, sentence)
    return Blueprint(
        checkpoint, names, detector, config, family, expected, verifier.formats, refusal, options
    )


def _head_hint(options: EngineConfig) -> dict[str, Any]:
    wanted = options.draft_quantization
    return {"checkpoint_format": wanted} if wanted in ("gptq", "gptq_v2") else {}


def _absence(checkpoint: Checkpoint, names: NameMap, options: EngineConfig) -> str | None:
    """Why there is no head to look at; None if there is one."""
    if options.mtp == "off":
        return "MTP was turned off (mtp='off')"
    heads = [name for name in names.sources if name.startswith(HEAD)]
    if not heads and checkpoint.sidecar_fault is not None:
        return _refuse(options, checkpoint.sidecar_fault)
    if not heads:
        return _refuse(
            options, f"the checkpoint has no MTP head (no tensor named {HEAD}* in {checkpoint.folder.name})"
        )
    if (other := other_drafter(heads)) is not None:
        return _refuse(options, other)
    if names.head_layers > MAX_LAYERS:
        return _refuse(
            options, f"the MTP head's tensors number {names.head_layers} layers, above {MAX_LAYERS}"
        )
    return None


def _refuse(options: EngineConfig, reason: str) -> str:
    """An error that lists all faults if MTP was insisted on; else a sentence with the first of them."""
    first, *faults = reason.splitlines()
    if options.mtp == "on":
        separator = "\n" if faults else "; "
        raise HeadError(f"mtp='on', but {reason}{separator}{PLAINLY}")
    listed = [line.strip() for line in faults if line.startswith("  ")]
    if len(listed) > MAX_TOLD:
        listed[MAX_TOLD:] = [f"and {len(listed) - MAX_TOLD} more, which mtp='on' lists"]
    sentence = "; ".join([first, *listed])
    alone = options.proposer == "auto" and options.drafter is None
    log.warning("serving without %s: %s", "drafting" if alone else "the MTP head", sentence)
    return sentence


def build(blueprint: Blueprint, *, device: torch.device, progress: ProgressFn = silent) -> Built:
    """Reads the weights, one tensor at a time."""
    chosen = blueprint.dtype(device)
    log.info("dtype %s (stored %s) on %s", chosen, blueprint.stored_dtype() or "packed", device)
    ops = choose_backend(chosen, device)
    head_device = blueprint.options.resolve_draft_device()
    head_ops = ops if head_device is None else choose_backend(blueprint.dtype(head_device), head_device)
    _keep_to_the_cores()
    # What torch does meanwhile is small, and its threads would go on looking for more on cores that lay weights out.
    with torch.inference_mode(), ops.threads():
        loader = _loader(blueprint, chosen, ops, head=False)
        head_loader = _loader(blueprint, blueprint.head_dtype(head_ops.device), head_ops, head=True)
        first, total = loader.nbytes, loader.nbytes + head_loader.nbytes
        loader.report = lambda done: progress("load weights", done, total)
        head_loader.report = lambda done: progress("load weights", first + done, total)
        try:
            model = blueprint.family.model(blueprint.config, Scope(loader, ops))
        except CheckpointError as error:
            raise CheckpointError(f"{blueprint.checkpoint.folder}: {error}") from error
        with nullcontext() if head_device is None else refusing_oom_on(head_device):
            head, refusal = _build_head(blueprint, head_ops, head_loader)
            lent = None if head is None or head_device is None else _lend(blueprint, head_ops)
    _return_what_was_freed()
    return Built(model, head, refusal, ops, lent)


def _return_what_was_freed() -> None:
    """Returns freed memory to the system, where the C library can be told: what laying weights out anew took in between
    would stay with the process, up to a fifth of a model."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def _lend(blueprint: Blueprint, ops: Backend) -> Embeddings:
    """Read once more, since what the model holds is laid out for its own device."""
    log.info("the MTP head is on %s, with an embedding and an lm_head of its own", ops.device)
    return Embeddings(blueprint.config, Scope(_loader(blueprint, ops.dtype, ops, head=False), ops))


def _build_head(
    blueprint: Blueprint, ops: Backend, loader: WeightLoader
) -> tuple[MtpHead | None, str | None]:
    if blueprint.head_refusal is not None:
        return None, blueprint.head_refusal
    for sentence in disagreements(blueprint.names):
        log.warning("the MTP head: %s", sentence)
    try:
        return blueprint.head(Scope(loader, ops, HEAD)), None
    except CheckpointError as error:
        return None, _refuse(blueprint.options, f"{blueprint.checkpoint.folder}: {error}")


def _keep_to_the_cores() -> None:
    """Torch counts the machine's cores; a container may have fewer, and threads that share one wait for each other."""
    cores = available_cores()
    if cores < torch.get_num_threads():
        torch.set_num_threads(cores)


def _loader(blueprint: Blueprint, dtype: torch.dtype, ops: Backend, *, head: bool) -> WeightLoader:
    """Native products take weights as narrow as they are stored, and so do those of packed ones."""
    options = blueprint.options
    if not dtype.is_floating_point:
        raise ConfigError(f"dtype must be a floating-point dtype, not {dtype}")
    return WeightLoader(
        blueprint.names,
        blueprint.detector,
        dtype,
        ops.device,
        wanted=[name for name in blueprint.expected if name.startswith(HEAD) == head],
        keep_stored=(blueprint.is_packed or ops.lays_out_weights)
        and not (head and options.draft_dtype != "auto"),
        repack=blueprint.repacked_head if head else None,
        mapped=options.map_files and ops.lays_out_weights,
        row_order=blueprint.row_order,
    )
