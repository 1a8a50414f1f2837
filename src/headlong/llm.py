"""The synchronous front end: prompts in, completions out."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, overload

from headlong.completion import Chunk, Completion
from headlong.config import EngineConfig
from headlong.engine.collect import Collector
from headlong.engine.service import Message, Prompt, Service
from headlong.errors import RequestError
from headlong.params import SamplingParams
from headlong.progress import ProgressFn, default_progress
from headlong.types import StepOutput

Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model ready to generate.

    Args:
        model: a folder, a Hugging Face repo id, or None for the embedded model.
        mtp: `"auto"` drafts if the checkpoint has a usable head, `"on"` refuses to start without one,
            `"off"` never drafts. The tokens are the same in all three.
        draft_tokens: drafts per step where a request does not say; `"auto"` is 3.
        device: `"auto"`, `"cpu"`, `"cuda"` or `"cuda:1"`.
        dtype: `"auto"` or a torch dtype's name.
        max_rows: sequences that run at the same time.
        progress: called as `(label, done, total)`; by default bars on a terminal.
        options: the remaining fields of `EngineConfig`.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        mtp: Literal["auto", "on", "off"] = "auto",
        draft_tokens: int | Literal["auto"] = "auto",
        device: str = "auto",
        dtype: str = "auto",
        max_rows: int = 16,
        progress: ProgressFn | None = None,
        **options: Any,
    ) -> None:
        self._progress = progress or default_progress()
        config = EngineConfig(
            mtp=mtp, draft_tokens=draft_tokens, device=device, dtype=dtype, max_rows=max_rows, **options
        )
        self.service = Service.load(model, config, self._progress)
        self.engine = self.service.engine
        self._ids = itertools.count()

    @property
    def mtp_refusal(self) -> str | None:
        """Why drafting is off; None if it is on."""
        return self.service.head_refusal

    def recommended_params(self, **overrides: Any) -> SamplingParams:
        """Sampling as the checkpoint's authors suggest, with changes of your own."""
        return self.service.recommended_params(**overrides)

    @overload
    def generate(
        self, prompts: str | list[int] | tuple[int, ...], params: SamplingParams | None = None
    ) -> Completion: ...
    @overload
    def generate(self, prompts: Sequence[Prompt], params: Params = None) -> list[Completion]: ...
    def generate(self, prompts: Any, params: Params = None) -> Any:
        """Continues a text or token ids, or a list of either; all of them run at the same time.

        A list of params gives each prompt its own. With `n > 1` the further ones are in `.choices`.
        """
        single = isinstance(prompts, str) or _is_token_ids(prompts)
        batch = [prompts] if single else list(prompts)
        done = self._run(
            [self.service.encode(prompt) for prompt in batch], self._spread(params, len(batch), single)
        )
        return done[0] if single else done

    @overload
    def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **template: Any
    ) -> Completion: ...
    @overload
    def chat(
        self, messages: Sequence[Sequence[Message]], params: Params = None, **template: Any
    ) -> list[Completion]: ...
    def chat(self, messages: Any, params: Params = None, **template: Any) -> Any:
        """Answers one conversation or a list of them; further keywords go to the chat template."""
        single = not messages or isinstance(messages[0], dict)
        batch = [messages] if single else list(messages)
        prompts = [self.service.encode_chat(conversation, **template) for conversation in batch]
        done = self._run(prompts, self._spread(params, len(batch), single))
        return done[0] if single else done

    def stream(
        self, prompt: Prompt | Sequence[Message], params: SamplingParams | None = None, **template: Any
    ) -> Iterator[Chunk]:
        """Yields what each step adds. Takes a text, token ids or one conversation. Closing the iterator
        cancels what is left."""
        if isinstance(prompt, str) or _is_token_ids(prompt):
            tokens = self.service.encode(prompt)  # type: ignore[arg-type]
        else:
            tokens = self.service.encode_chat(prompt, **template)  # type: ignore[arg-type]
        collectors = self._submit(tokens, params or SamplingParams())
        return self._steps(collectors)

    def _submit(self, prompt: tuple[int, ...], params: SamplingParams) -> dict[str, Collector]:
        requests = self.service.requests(prompt, params, f"llm-{next(self._ids)}")
        added = {}
        try:
            for request in requests:
                self.engine.add(request)
                added[request.id] = self.service.collector(request)
        except RequestError:
            self._cancel(added)
            raise
        return added

    def _steps(self, collectors: dict[str, Collector]) -> Iterator[Chunk]:
        """Steps the engine until these have ended."""
        total = sum(len(c.request.prompt) for c in collectors.values())
        read = 0
        try:
            while any(c.completion is None for c in collectors.values()):
                step = self.engine.step()
                if read < total:
                    read = min(total, read + step.num_prompt_tokens)
                    self._progress("read prompt", read, total)
                yield from self._dispatch(step, collectors)
        finally:
            if read < total:
                self._progress("read prompt", total, total)
            self._cancel(collectors)

    @staticmethod
    def _dispatch(step: StepOutput, collectors: dict[str, Collector]) -> Iterator[Chunk]:
        outputs = {output.request.id: output for output in step.rows}
        for request_id, collector in collectors.items():
            if request_id in outputs:
                yield collector.take(step, outputs[request_id])
            elif collector.completion is None:
                collector.wait(step)

    def _cancel(self, collectors: dict[str, Collector]) -> None:
        for request_id, collector in collectors.items():
            if collector.completion is None:
                self.engine.cancel(request_id)

    def _run(self, prompts: list[tuple[int, ...]], params: list[SamplingParams]) -> list[Completion]:
        groups: list[dict[str, Collector]] = []
        try:
            for prompt, own in zip(prompts, params, strict=True):
                groups.append(self._submit(prompt, own))
        except RequestError:
            for group in groups:
                self._cancel(group)
            raise
        for _ in self._steps({k: c for group in groups for k, c in group.items()}):
            pass
        return [
            Completion.joined([c.completion for c in group.values() if c.completion is not None])
            for group in groups
        ]

    @staticmethod
    def _spread(params: Params, count: int, single: bool) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or SamplingParams()] * count
        if single:
            raise RequestError("params is a list, but there is one prompt; pass one SamplingParams")
        if len(params) != count:
            raise RequestError(f"params has {len(params)} entries for {count} prompts; give one for each")
        return list(params)


def _is_token_ids(prompt: object) -> bool:
    """A flat sequence of numbers is one prompt; an empty list is an empty list of prompts."""
    return isinstance(prompt, (list, tuple)) and bool(prompt) and all(isinstance(t, int) for t in prompt)
