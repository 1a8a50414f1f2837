"""The synchronous front end: prompts in, completions out."""

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, overload

from headlong.completion import Chunk, Completion
from headlong.config import EngineConfig
from headlong.engine.client import EngineDescription
from headlong.engine.collect import Collector
from headlong.engine.service import Service
from headlong.errors import RequestError
from headlong.params import SamplingParams
from headlong.progress import ProgressFn, default_progress
from headlong.text.codec import Message, Prompt, TextCodec
from headlong.types import Request, StepOutput

Params = SamplingParams | Sequence[SamplingParams] | None


@dataclass(frozen=True)
class _Open:
    """A row somebody waits for, and what it gained that was not handed out yet."""

    collector: Collector
    chunks: deque[Chunk] = field(default_factory=deque)

    @property
    def id(self) -> str:
        return self.collector.request.id


class _Reading:
    """Tells a progress callback how much of rows' prompts was read. Ends when every row has tokens: what the prefix
    cache had is never read, and is known only then."""

    def __init__(self, progress: ProgressFn, rows: list[_Open]) -> None:
        self._progress = progress
        self._rows = rows
        self._total = sum(len(row.collector.request.prompt) for row in rows)
        self._read = 0
        self._ended = False

    def count(self, step: StepOutput) -> None:
        """Counts what was read. Call it when the rows have what the step gave them, and nobody has seen it yet."""
        if self._ended:
            return
        if all(row.collector.begun for row in self._rows):
            self.end()
            return
        self._read = min(self._total - 1, self._read + step.num_prompt_tokens)
        self._progress("read prompt", self._read, self._total)

    def end(self) -> None:
        if not self._ended:
            self._ended = True
            self._progress("read prompt", self._total, self._total)


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
        self.description: EngineDescription = self.service.describe()
        self._ids = itertools.count()
        self._open: dict[str, _Open] = {}

    @property
    def text(self) -> TextCodec:
        """The model's tokenizer and chat template."""
        return self.service.text

    @property
    def mtp_refusal(self) -> str | None:
        """Why drafting is off; None if it is on."""
        return self.service.head_refusal

    def recommended_params(self, **overrides: Any) -> SamplingParams:
        """Sampling as the checkpoint's authors suggest, with changes of your own."""
        return self.service.recommended_params(**overrides)

    @overload
    def generate(  # pyright: ignore[reportOverlappingOverload] - a str is a sequence of str to the type checker
        self, prompts: str | list[int] | tuple[int, ...], params: SamplingParams | None = None
    ) -> Completion: ...
    @overload
    def generate(self, prompts: Sequence[Prompt], params: Params = None) -> list[Completion]: ...
    def generate(self, prompts: Any, params: Params = None) -> Any:
        """Continues a text or token ids, or a list of either; all of them run at the same time.

        Without params sampling is as the model's authors suggest; a list gives each prompt its own. With `n > 1` the
        further ones are in `.choices`.
        """
        single = isinstance(prompts, str) or not isinstance(prompts, Sequence) or _is_token_ids(prompts)
        batch = [prompts] if single else list(prompts)
        done = self._run(
            [self.text.encode(prompt) for prompt in batch], self._spread(params, len(batch), single)
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
        prompts = [self.text.encode_chat(conversation, **template) for conversation in batch]
        done = self._run(prompts, self._spread(params, len(batch), single))
        return done[0] if single else done

    def stream(
        self, prompt: Prompt | Sequence[Message], params: SamplingParams | None = None, **template: Any
    ) -> Iterator[Chunk]:
        """Yields what each step adds. Takes a text, token ids or one conversation. Closing the iterator
        cancels what is left."""
        if isinstance(prompt, str) or _is_token_ids(prompt):
            tokens = self.text.encode(prompt)  # type: ignore[arg-type]
        else:
            tokens = self.text.encode_chat(prompt, **template)  # type: ignore[arg-type]
        requests = self._requests(tokens, params or self.recommended_params())
        for request in requests:
            self.engine.check(request)
        return self._stream(requests)

    def _requests(self, prompt: tuple[int, ...], params: SamplingParams) -> list[Request]:
        return self.service.requests(prompt, params, f"llm-{next(self._ids)}")

    def _stream(self, requests: list[Request]) -> Iterator[Chunk]:
        """Queues nothing before the first chunk is asked for: an iterator nobody starts cannot clean up."""
        yield from self._steps(self._submit(requests))

    def _submit(self, requests: list[Request]) -> list[_Open]:
        """Queues all of the requests, or raises an error and queues none."""
        added = []
        try:
            for request in requests:
                self.engine.add(request)
                added.append(_Open(self.service.collector(request)))
                self._open[request.id] = added[-1]
        except RequestError:
            self._leave(added)
            raise
        return added

    def _leave(self, rows: list[_Open]) -> None:
        """Forgets rows; those that have not ended are cancelled."""
        for row in rows:
            del self._open[row.id]
            if row.collector.completion is None:
                self.engine.cancel(row.id)

    def _steps(self, rows: list[_Open]) -> Iterator[Chunk]:
        """Steps the engine until these rows have ended. Other iterators may be open and step it too; what they brought
        for these rows was kept."""
        reading = _Reading(self._progress, rows)
        try:
            while True:
                for row in rows:
                    while row.chunks:
                        yield row.chunks.popleft()
                if all(row.collector.completion is not None and not row.chunks for row in rows):
                    return
                step = self.engine.step()
                self._dispatch(step)
                reading.count(step)
        finally:
            reading.end()
            self._leave(rows)

    def _dispatch(self, step: StepOutput) -> None:
        outputs = {output.request.id: output for output in step.rows}
        for row_id, row in self._open.items():
            if row_id in outputs:
                row.chunks.append(row.collector.take(step, outputs[row_id]))
            elif row.collector.completion is None:
                row.collector.wait(step)

    def _run(self, prompts: list[tuple[int, ...]], params: list[SamplingParams]) -> list[Completion]:
        groups = [self._requests(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
        rows = self._submit([request for group in groups for request in group])
        done = {row.id: row.collector for row in rows}
        for _ in self._steps(rows):
            pass
        return [
            Completion.joined([c for r in group if (c := done[r.id].completion) is not None])
            for group in groups
        ]

    def _spread(self, params: Params, count: int, single: bool) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or self.recommended_params()] * count
        if single:
            raise RequestError("params is a list, but there is one prompt; pass one SamplingParams")
        if len(params) != count:
            raise RequestError(f"params has {len(params)} entries for {count} prompts; give one for each")
        return list(params)


def _is_token_ids(prompt: object) -> bool:
    """A flat sequence of numbers is one prompt; an empty list is an empty list of prompts."""
    return isinstance(prompt, (list, tuple)) and bool(prompt) and all(isinstance(t, int) for t in prompt)
