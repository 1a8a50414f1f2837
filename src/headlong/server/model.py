"""One loaded model: its engine, its names, how its text is read, and the card that tells clients about it."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from headlong.config import EngineConfig
from headlong.engine.client import EngineClient, EngineLoader
from headlong.params import GRAMMAR_KINDS, Verify
from headlong.progress import ProgressFn
from headlong.server.library import Source
from headlong.server.settings import Settings
from headlong.text.output import ChatFormat

OPENAI_TEMPERATURE = 1.0
"""OpenAI's default, where neither the settings nor the checkpoint have one."""


@dataclass(eq=False)
class Model:
    """A loaded model as the server knows it. `users` counts the requests that hold it."""

    source: Source
    names: tuple[str, ...]
    """What clients may call it; the first is its id."""
    client: EngineClient
    format: ChatFormat
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """How requests are sampled that do not say: as the settings have it, else the model's authors, else OpenAI."""
    created: int = field(default_factory=lambda: int(time.time()))
    users: int = 0
    last_used: float = field(default_factory=time.monotonic)

    @property
    def id(self) -> str:
        return self.names[0]

    def card(self, admin: bool) -> dict[str, Any]:
        """OpenAI's model object, and what else a client may want to know. Where it lies is an admin's business."""
        engine = self.client.description
        drafting = engine.drafting
        can_draft = drafting.refusal is None
        depth = {"default_k": drafting.usual, "max_k": drafting.deepest}
        details: dict[str, Any] = {
            "loaded": True,
            "mtp": {
                "available": can_draft,
                "reason": drafting.refusal,
                **depth,
                "verify": list(get_args(Verify)) if can_draft else [],
            },
            "formats": {
                "reasoning": None if self.format.reasoning is None else self.format.reasoning.name,
                "tools": self.format.tools,
                "grammar": list(GRAMMAR_KINDS),
            },
            "sampling": dict(self.sampling),
            "context": engine.max_len,
            "max_rows": engine.max_rows,
            "device": engine.device,
            "dtype": engine.dtype,
        }
        if admin:
            details["memory"] = engine.memory.as_json()
            details["folder"] = engine.folder
        return {
            "id": self.id,
            "object": "model",
            "created": self.created,
            "owned_by": "headlong",
            "root": self.source.id,
            "max_model_len": engine.max_len,
            "native_mtp": depth if can_draft else None,
            "headlong": details,
        }


def load(
    source: Source,
    names: tuple[str, ...],
    settings: Settings,
    options: Mapping[str, Any],
    loader: EngineLoader,
    progress: ProgressFn,
) -> Model:
    """Loads a model until it is ready to serve; `options` are those of its engine. Takes its time: not for the event
    loop."""
    client = loader.load(source.model, EngineConfig(**options, map_files=False), progress)
    chat_format = ChatFormat.detect(
        None if client.text.template is None else client.text.template.source,
        reasoning=settings.reasoning_format,
        tools=settings.tool_format,
    )
    sampling = (
        {"temperature": OPENAI_TEMPERATURE} | dict(client.description.recommended) | dict(settings.sampling)
    )
    return Model(source, names, client, chat_format, sampling)
