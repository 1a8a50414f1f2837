"""What an architecture is, as data: everything the rest of Headlong asks about a family of models.

A family is one file that makes one of these, and `registry` is one row per `model_type`. Knows no checkpoint's
contents: names are passed down to `checkpoint`, which imports no models, by who joins the two.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headlong.checkpoint.names import Naming
from headlong.layers.weights import Scope
from headlong.models.config import ModelConfig
from headlong.models.decoder import DecoderModel, LayerFactory
from headlong.models.gguf import GgufSpec
from headlong.models.head_spec import HeadSpec
from headlong.models.mtp import MtpHead


@dataclass(frozen=True)
class Family:
    """How to read a config, and to build the target and its head."""

    config: Callable[[Mapping[str, Any]], ModelConfig]
    """Reads a config.json, checked and typed."""
    layer: LayerFactory
    """Makes the layer at a depth: the family's pattern of layers."""
    naming: Naming = field(default_factory=Naming)
    """What safetensors call its tensors."""
    mtp: HeadSpec = field(default_factory=HeadSpec)
    """What its MTP head is."""
    gguf: GgufSpec | None = None
    """What GGUF files call its tensors and sizes; None where there are no such files."""
    releases: str = ""
    """The names that people know its models by."""
    oracle: str = "transformers"
    """What its logits are compared with in the tests; with more words where its head has another one."""

    def model(self, config: ModelConfig, scope: Scope) -> DecoderModel:
        return DecoderModel(config, self.layer, scope)

    def head(self, config: ModelConfig, scope: Scope, num_layers: int = 1) -> MtpHead:
        """`scope` is that of the head's own tensors, of so many layers."""
        return MtpHead(config, self.layer, scope, self.mtp, num_layers)
