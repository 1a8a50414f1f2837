"""What can be said of a checkpoint without reading its weights: modules, bytes, state, head, verdict.

Joins the headers with the model they should fit. Knows no terminal; `inspect` prints what is found here.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headlong.checkpoint import generation, source
from headlong.checkpoint.checkpoint import ADAPTER, Checkpoint
from headlong.checkpoint.detect import HEAD
from headlong.checkpoint.load import Expectations
from headlong.cli.modules import Module, list_modules
from headlong.config import EngineConfig
from headlong.engine.build import Blueprint, survey
from headlong.engine.texts import Texts, recommended_params
from headlong.errors import HeadError, HeadlongError
from headlong.layers.weights import Scope
from headlong.models import registry
from headlong.models.config import ModelConfig
from headlong.ops.backend import Backend
from headlong.ops.registry import choose_backend
from headlong.progress import ProgressFn
from headlong.state.specs import bytes_per_page, bytes_per_slot


@dataclass(frozen=True)
class StateCost:
    """What running sequences take, in the dtypes this machine would use; totals for `batch` of `context` tokens."""

    dtype: str
    max_drafts: int
    kv_bytes_per_token: int
    recurrent_bytes_per_sequence: int
    context: int
    batch: int

    @property
    def kv_bytes(self) -> int:
        return self.kv_bytes_per_token * self.context * self.batch

    @property
    def recurrent_bytes(self) -> int:
        return self.recurrent_bytes_per_sequence * self.batch


@dataclass(frozen=True)
class HeadFacts:
    """`usable` under the options given; `reason` says why not."""

    usable: bool
    reason: str | None


NO_TARGET = HeadFacts(False, "the model itself cannot be served")


@dataclass(frozen=True)
class SkippedTensors:
    """Tensors on disk that are deliberately not loaded."""

    reason: str
    count: int
    nbytes: int


@dataclass(frozen=True)
class Facts:
    """All that `inspect` prints. `reason` is why the model cannot be served, None if it can."""

    folder: Path
    reason: str | None
    device: str = ""
    model_type: str | None = None
    config: ModelConfig | None = None
    modules: list[Module] = field(default_factory=list)
    skipped: list[SkippedTensors] = field(default_factory=list)
    state: StateCost | None = None
    head: HeadFacts = NO_TARGET
    sampling: dict[str, Any] | None = None
    """What `run`, `chat` and `serve` take where nobody says; None where the model could not be opened."""

    @property
    def servable(self) -> bool:
        return self.reason is None

    def nbytes(self, *, head: bool) -> int:
        return sum(module.nbytes for module in self.modules if module.in_head == head)

    def parameters(self, *, head: bool) -> int:
        return sum(module.parameters for module in self.modules if module.in_head == head)


def gather(
    model: str | None,
    config: EngineConfig,
    progress: ProgressFn,
    *,
    every: bool,
    context: int | None = None,
    batch: int = 1,
) -> Facts:
    """Collects the facts. It raises only where there is no such model; one that is damaged or unsupported is
    described."""
    folder = source.resolve(model, progress=progress)
    device = config.resolve_device()
    try:
        checkpoint = Checkpoint.open(folder)
        names = registry.names_of(checkpoint)
        model_type = str(registry.config_of(checkpoint).get("model_type", "unknown"))
    except HeadlongError as error:
        return Facts(folder, str(error))
    blueprint, head, reason = _judge(checkpoint, config)
    ops = None if blueprint is None else choose_backend(blueprint.dtype(device), device)
    return Facts(
        folder=folder,
        reason=reason,
        device=str(device),
        model_type=model_type,
        config=None if blueprint is None else blueprint.config,
        modules=list_modules(names, blueprint, ops, every=every),
        skipped=[
            SkippedTensors(why, len(tensors), sum(checkpoint.tensors[name].nbytes for name in tensors))
            for why, tensors in names.skipped.items()
        ]
        + _adapters(checkpoint),
        state=None if blueprint is None or ops is None else _state_cost(blueprint, ops, context, batch),
        head=head,
        sampling=generation.sampling(
            generation.chosen(config.generation_config, checkpoint.generation_config)
        ),
    )


def _adapters(checkpoint: Checkpoint) -> list[SkippedTensors]:
    """An adapter beside the model; how many tensors it has is of no interest, so its file counts as one."""
    file = checkpoint.adapter
    return [] if file is None else [SkippedTensors(f"{file.name}: {ADAPTER}", 1, file.stat().st_size)]


def _judge(checkpoint: Checkpoint, config: EngineConfig) -> tuple[Blueprint | None, HeadFacts, str | None]:
    """Returns the fit, the head, and why the model cannot be served (None if it can). A head at fault still leaves the
    target's fit."""
    try:
        blueprint = survey(checkpoint, config)
    except HeadError as error:
        reason = f"{error}\n`--mtp off` serves it without drafting"
        return survey(checkpoint, replace(config, mtp="off")), HeadFacts(False, str(error)), reason
    except HeadlongError as error:
        return None, NO_TARGET, str(error)
    head = HeadFacts(blueprint.head_refusal is None, blueprint.head_refusal)
    return blueprint, head, _texts_fault(checkpoint, config)


def _texts_fault(checkpoint: Checkpoint, config: EngineConfig) -> str | None:
    """Why the model's own texts keep it from being served: what `serve` checks before it listens."""
    try:
        recommended_params(Texts.read(checkpoint, config).recommended, checkpoint.folder)
    except HeadlongError as error:
        return str(error)
    return None


def _state_cost(blueprint: Blueprint, ops: Backend, context: int | None, batch: int) -> StateCost:
    """Builds the model once more on tensors without data, to ask its layers what they keep."""
    expectations = Expectations(blueprint.names)
    dry = choose_backend(ops.dtype, expectations.device)
    specs = blueprint.family.model(blueprint.config, Scope(expectations, dry)).state_specs
    max_drafts = 0
    if blueprint.head_refusal is None:
        max_drafts = blueprint.options.max_draft_tokens
        specs |= blueprint.head(Scope(expectations, dry, HEAD)).state_specs
    layers, page_size = list(specs.values()), blueprint.options.page_size
    return StateCost(
        dtype=str(ops.dtype).removeprefix("torch."),
        max_drafts=max_drafts,
        kv_bytes_per_token=bytes_per_page(layers, page_size, ops.dtype) // page_size,
        recurrent_bytes_per_sequence=bytes_per_slot(layers, max_drafts, ops.activation_dtype),
        context=min(context or blueprint.config.max_position, blueprint.config.max_position),
        batch=batch,
    )
