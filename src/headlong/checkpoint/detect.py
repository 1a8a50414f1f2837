"""How each module is packed, from the tensors that are there; the quantisation config is a hint and may be wrong.

Every disagreement between the two is kept as a sentence. Reads headers only. Knows names and formats, no models.
"""

import logging
from collections.abc import Mapping
from typing import Any

from headlong.checkpoint.checkpoint import Checkpoint
from headlong.checkpoint.names import NameMap
from headlong.checkpoint.quant_config import QuantConfig
from headlong.checkpoint.tensor_info import TensorInfo
from headlong.errors import CheckpointError
from headlong.quant import detect as formats
from headlong.quant.format import Format, Part, Shape
from headlong.quant.plain import PlainFormat

log = logging.getLogger(__name__)
HEAD = "mtp."
PROMISES = ("symmetric", "desc_act")
"""What a hint promises of parts that must be there, of matrices by the config's own tool. A head may be another's."""


class Detector:
    """Decides the format of each matrix when it is asked for. `head_hint` overrides what the config says of the head's
    modules."""

    def __init__(
        self, checkpoint: Checkpoint, names: NameMap, head_hint: Mapping[str, Any] | None = None
    ) -> None:
        self._names = names
        self.config = QuantConfig(checkpoint.config, checkpoint.quant_config, checkpoint.quantize_config)
        """What the config claims of modules."""
        if (place := self.config.rotation) is not None:
            raise CheckpointError(
                f"{checkpoint.folder}: the config (quant_method {self.config.method!r}) says that inputs are rotated "
                f"as the model runs ({place}), which Headlong does not do: without it the weights mean nothing"
            )
        self._is_gguf = checkpoint.is_gguf
        self._head_hint = dict(head_hint or {})
        self._formats: dict[tuple[str, Shape], Format] = {}
        """The formats of the matrices that were asked about."""
        self.disagreements: dict[str, str] = {}
        """One sentence for each module, among those asked about so far, whose tensors contradict the config."""
        self.activations: dict[str, str] = {}
        """What the config makes of the input of each module, among those asked about so far, where it quantises it."""

    def format(self, name: str, shape: Shape) -> Format:
        """The format of the matrix `name`, [out, in] or, with experts in front, [count, out, in].

        Raises `CheckpointError` where the tensors fit no format, or not this shape.
        """
        if (known := self._formats.get((name, shape))) is not None:
            return known
        infos = self._names.parts(name)
        parts = {part: self._part(name, info, shape) for part, info in infos.items()}
        module = name.removesuffix(".weight")
        claim = self.config.claim(_disk_module(infos), module)
        hint = dict(claim.hint) if claim is not None else {}
        if name.startswith(HEAD):
            hint = {key: value for key, value in hint.items() if key not in PROMISES} | self._head_hint
        try:
            found = formats.detect(parts, shape[-2:], hint)
        except CheckpointError as error:
            listed = ", ".join(sorted({str(info.file.name) for info in infos.values()}))
            raise CheckpointError(f"{module} in {listed}: {error}") from error
        as_listed = claim is not None and claim.or_floats and isinstance(found, PlainFormat)
        if claim is not None and not as_listed and not agrees(claim.format, found):
            says = "left in floats" if claim.format is None else claim.format
            self.disagreements[module] = (
                f"the config says {says} ({claim.rule}), the tensors are {found.label}"
            )
        elif self.config.method is None and not isinstance(found, PlainFormat) and not self._is_gguf:
            self.disagreements[module] = f"the config names no quantisation, the tensors are {found.label}"
        if claim is not None and claim.activations and not isinstance(found, PlainFormat):
            self.activations[module] = claim.activations
        self._formats[name, shape] = found
        return found

    def _part(self, name: str, info: TensorInfo, shape: Shape) -> Part:
        """A tensor's part in one matrix: where a tensor holds all experts, its slice for the first of them."""
        if len(shape) == 2:
            return Part(info.dtype, info.shape)
        if not info.shape or info.shape[0] != shape[0]:
            raise CheckpointError(
                f"{name} (on disk {info.name}): expected {shape[0]} experts, found {list(info.shape)}"
            )
        return Part(info.dtype, self._names.transform_of(info).model_shape(info.shape)[1:])


def _disk_module(infos: Mapping[str, TensorInfo]) -> str:
    """The name of the module in the file."""
    part, info = next(iter(infos.items()))
    return info.name.removesuffix(f".{part}")


def agrees(claimed: str | None, found: Format) -> bool:
    """Whether a format is what the config claims."""
    if isinstance(found, PlainFormat):
        return claimed is None
    return claimed is not None and (claimed == found.name or f"{found.label} ".startswith(f"{claimed} "))
