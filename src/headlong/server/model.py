"""One loaded model: its engine, its names, how its text is read, and the card that tells clients about it."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from headlong.async_llm import AsyncLLM
from headlong.config import EngineConfig
from headlong.engine.metrics import Metrics
from headlong.engine.service import Service
from headlong.params import GRAMMAR_KINDS, Verify
from headlong.progress import ProgressFn
from headlong.server.library import Source
from headlong.server.settings import Settings
from headlong.server.warmup import plain_tokens_per_second
from headlong.text.output import ChatFormat


@dataclass(eq=False)
class Model:
    """`users` counts the requests that hold it."""

    source: Source
    names: tuple[str, ...]
    """What clients may call it; the first is its id."""
    llm: AsyncLLM
    format: ChatFormat
    metrics: Metrics
    plain_tokens_per_second: float
    created: int = field(default_factory=lambda: int(time.time()))
    users: int = 0
    last_used: float = field(default_factory=time.monotonic)

    @property
    def id(self) -> str:
        return self.names[0]

    def card(self, admin: bool) -> dict[str, Any]:
        """OpenAI's model object, and what else a client may want to know. Where it lies is an admin's business."""
        service = self.llm.service
        engine, ops = service.engine, service.engine.model.ops
        drafting = service.head_refusal is None
        depth = {"default_k": engine.usual_drafts, "max_k": engine.max_drafts}
        details: dict[str, Any] = {
            "loaded": True,
            "mtp": {
                "available": drafting,
                "reason": service.head_refusal,
                **depth,
                "verify": list(get_args(Verify)) if drafting else [],
            },
            "formats": {
                "reasoning": None if self.format.reasoning is None else "think",
                "tools": self.format.tools,
                "grammar": list(GRAMMAR_KINDS),
            },
            "context": engine.max_len,
            "max_rows": self.llm.usage.slots_total,
            "device": str(ops.device),
            "dtype": str(ops.dtype).removeprefix("torch."),
        }
        if admin:
            details["memory"] = engine.memory.as_json()
            details["folder"] = str(service.folder)
        return {
            "id": self.id,
            "object": "model",
            "created": self.created,
            "owned_by": "headlong",
            "root": self.source.id,
            "max_model_len": engine.max_len,
            "native_mtp": depth if drafting else None,
            "headlong": details,
        }


@dataclass(frozen=True)
class Prepared:
    """All of a model but its engine's thread."""

    service: Service
    format: ChatFormat
    plain_tokens_per_second: float


def prepare(source: Source, settings: Settings, engine: Mapping[str, Any], progress: ProgressFn) -> Prepared:
    """Loads a model and runs it once. Takes its time: not for the event loop."""
    service = Service.load(source.model, EngineConfig(**engine), progress)
    service.recommended_params()  # a wrong generation_config.json is refused here, not with every request
    template = None if service.tokenizer is None else service.tokenizer.chat_template
    chat_format = ChatFormat.detect(template, reasoning=settings.reasoning_format, tools=settings.tool_format)  # type: ignore[arg-type]
    return Prepared(service, chat_format, plain_tokens_per_second(service))


def start(source: Source, names: tuple[str, ...], ready: Prepared) -> Model:
    metrics = Metrics()
    llm = AsyncLLM(ready.service, metrics.observe)
    return Model(source, names, llm, ready.format, metrics, ready.plain_tokens_per_second)
