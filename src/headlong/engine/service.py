"""An engine with all that stands around it: tokenizer and template, grammars, end-of-sequence ids.

What the synchronous front end and the engine's thread share. Turns prompts into requests; steps nothing.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headlong.checkpoint import generation, source
from headlong.checkpoint.checkpoint import Checkpoint
from headlong.config import EngineConfig
from headlong.engine.accounting import refusing_oom
from headlong.engine.assemble import assemble
from headlong.engine.build import build, survey
from headlong.engine.client import Drafting, EngineDescription
from headlong.engine.collect import Collector, why_not_drafting
from headlong.engine.engine import Engine
from headlong.engine.proposers import load_draft_model
from headlong.engine.requests import RequestMaker
from headlong.engine.texts import Texts, recommended_params
from headlong.ops.registry import shortfall
from headlong.params import SamplingParams
from headlong.progress import ProgressFn, silent
from headlong.text.codec import TextCodec
from headlong.text.grammar import GrammarCompiler
from headlong.text.tokenizer import Tokenizer
from headlong.types import Request

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Service:
    """Immutable but for the engine inside."""

    engine: Engine
    folder: Path
    text: TextCodec
    eos_ids: frozenset[int]
    recommended: Mapping[str, Any]
    """The generation_config that says how to sample where a request does not."""
    head_refusal: str | None
    grammars: GrammarCompiler | None = None
    """None where there is no tokenizer."""

    @classmethod
    def load(cls, model: str | Path | None, config: EngineConfig, progress: ProgressFn = silent) -> "Service":
        device = config.resolve_device()
        folder = source.resolve(model, progress=progress)
        checkpoint = Checkpoint.open(folder)
        blueprint = survey(checkpoint, config)
        texts = Texts.read(checkpoint, config)
        tokenizer, recommended = texts.tokenizer, texts.recommended
        with refusing_oom():
            built = build(blueprint, device=device, progress=progress)
            drafter = load_draft_model(config, blueprint.config.vocab_size, device, progress)
        listed = (checkpoint.generation_config, recommended)
        eos_ids = _eos_ids(listed, blueprint.config.eos_token_ids, tokenizer)
        engine = assemble(built, config, tokenizer, drafter, eos_ids)
        for line in engine.memory.lines():
            log.info(line)
        grammars = None
        if tokenizer is not None:
            grammars = GrammarCompiler(tokenizer, blueprint.config.vocab_size, eos_ids)
        return cls(
            engine=engine,
            folder=folder,
            text=TextCodec(str(folder), tokenizer, texts.template, engine.max_len),
            eos_ids=eos_ids,
            recommended=recommended,
            head_refusal=None if engine.max_drafts else built.head_refusal,
            grammars=grammars,
        )

    def requests(self, prompt: tuple[int, ...], params: SamplingParams, id_prefix: str) -> list[Request]:
        """One request per choice; they share the seed and differ in the choice. Compiling a grammar that was
        not seen lately may take a second; any thread may do it."""
        return self.maker.make(prompt, params, id_prefix)

    @property
    def maker(self) -> RequestMaker:
        """What makes this engine's requests."""
        return RequestMaker(str(self.folder), self.drafting, self.eos_ids, self.grammars)

    @property
    def drafting(self) -> Drafting:
        """What drafting amounts to on this engine."""
        engine = self.engine
        return Drafting(
            refusal=self.head_refusal,
            adaptive=engine.adaptive,
            wanted=engine.drafts,
            usual=engine.usual_drafts,
            deepest=engine.max_drafts,
        )

    def describe(self, plain_tokens_per_second: float | None = None) -> EngineDescription:
        """What does not change as long as the engine lives; the speed is whatever its caller measured."""
        engine, ops = self.engine, self.engine.model.ops
        return EngineDescription(
            folder=str(self.folder),
            max_len=engine.max_len,
            vocab_size=engine.model.config.vocab_size,
            max_rows=engine.state.slots.size,
            device=str(ops.device),
            dtype=str(ops.dtype).removeprefix("torch."),
            drafting=self.drafting,
            memory=engine.memory,
            conditions=engine.conditions,
            recommended=self.recommended_sampling(),
            recommended_tokens=generation.output_tokens(self.recommended),
            plain_tokens_per_second=plain_tokens_per_second,
            slow=shortfall(ops),
        )

    def collector(self, request: Request) -> Collector:
        return Collector(request, why_not_drafting(self.head_refusal, request))

    def recommended_params(self, **overrides: Any) -> SamplingParams:
        """Sampling as the checkpoint's authors suggest, with changes of your own."""
        return recommended_params(self.recommended, self.folder, **overrides)

    def recommended_sampling(self) -> dict[str, Any]:
        """The sampling fields that generation_config.json has; nothing where it has none."""
        return generation.sampling(self.recommended)


def _eos_ids(
    recommendations: Sequence[Mapping[str, Any]], from_config: tuple[int, ...], tokenizer: Tokenizer | None
) -> frozenset[int]:
    """All that may end a text. What the model's own file says of its ends holds whoever else says how to sample."""
    ids = set(from_config)
    for recommendation in recommendations:
        listed = recommendation.get("eos_token_id")
        for token in listed if isinstance(listed, list) else [listed]:
            if isinstance(token, int) and not isinstance(token, bool):
                ids.add(token)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(ids)
