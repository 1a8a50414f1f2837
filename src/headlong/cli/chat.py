"""`headlong chat`: a conversation, turn by turn. Keeps the history; knows no sampling and no engine."""

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from headlong.cli import options, summary
from headlong.cli.drafts import AnswerWriter
from headlong.cli.terminal import note, tell_if_slow, wants_colour
from headlong.errors import RequestError
from headlong.params import SamplingParams

if TYPE_CHECKING:
    from headlong.completion import Chunk, Completion
    from headlong.llm import LLM

MAX_TOKENS = 1024
PROMPT = "> "
HELP = "/clear forgets the conversation, /stats sums it up, /exit leaves; Ctrl-C stops an answer"
EPILOG = f"""\
While chatting: {HELP}.
Sampling is as the model's authors suggest (generation_config.json) where no flag says otherwise.

examples:
  headlong chat
  headlong chat --show-drafts --system "You answer in one sentence."
  headlong chat Qwen/Qwen3.5-0.8B --temperature 0
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "chat",
        usage="headlong chat [options] [MODEL]",
        help="talk with a model",
        description="Talks with a model, answer by answer, in the terminal or over a pipe (a line is a turn).",
        epilog=EPILOG,
    )
    options.add_model(parser)
    parser.add_argument("--system", metavar="TEXT", help="what the model is told before the conversation")
    options.add_chat_template(parser)
    options.add_generation_config(parser)
    options.add_draft_tokens(parser)
    options.add_colour(parser)
    options.add_engine(parser)
    options.add_sampling(parser, max_tokens=MAX_TOKENS)
    parser.set_defaults(execute=execute)


def execute(args: argparse.Namespace) -> int:
    """Talks until the person leaves. `headlong run MODEL` comes here, too."""
    changes = options.sampling_options(args, max_tokens=MAX_TOKENS)
    from headlong.llm import LLM

    llm = LLM(args.model, max_rows=1, **options.engine_options(args))
    tell_if_slow(llm)
    if llm.text.template is None:
        raise RequestError(f"{llm.description.folder} has no chat template; use `headlong run --raw` with it")
    tint = args.show_drafts and wants_colour(args.color, sys.stdout)
    conversation = Conversation(llm, llm.recommended_params(**changes), getattr(args, "system", None), tint)
    if sys.stdin.isatty():
        note(HELP + ("" if llm.mtp_refusal is None else f"\nMTP off: {llm.mtp_refusal}"))
    for line in _lines():
        if line == "/exit":
            break
        if line.startswith("/"):
            conversation.command(line)
        elif line:
            conversation.answer(line)
    return 0


class Conversation:
    """The messages so far, and how the answers came about."""

    def __init__(self, llm: "LLM", params: SamplingParams, system: str | None, tint: bool) -> None:
        self._llm = llm
        self._params = params
        self._tint = tint
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self._opening)
        self._answers: list[Completion] = []

    def command(self, line: str) -> None:
        if line == "/clear":
            self.messages = list(self._opening)
            note("cleared")
        elif line == "/stats":
            note(self._totals())
        elif line == "/help":
            note(HELP)
        else:
            note(f"there is no {line.split()[0]}; {HELP}")

    def answer(self, text: str) -> None:
        """Adds a turn and its answer, or leaves the history as it was where there is none."""
        turn = [*self.messages, {"role": "user", "content": text}]
        writer = AnswerWriter(self._llm.text.tokenizer, self._tint)
        try:
            done = self._stream(turn, writer)
        except RequestError as error:
            note(f"{error}; /clear starts a new conversation")
            return
        writer.end()
        if done is not None or writer.text:
            self.messages = [*turn, {"role": "assistant", "content": writer.text}]
        if done is None:
            note("stopped")
            return
        self._answers.append(done)
        note(summary.SEPARATOR.join(summary.describe(done)))

    def _stream(self, turn: list[dict[str, str]], writer: AnswerWriter) -> "Completion | None":
        """The completion, or None if the answer was stopped."""
        stream: Iterator[Chunk] = self._llm.stream(turn, self._params)
        with _interruptible() as interrupted, contextlib.closing(stream):  # type: ignore[type-var]
            for chunk in stream:
                writer.write(chunk)
                if chunk.completion is not None:
                    return chunk.completion
                if interrupted:
                    return None
        return None

    def _totals(self) -> str:
        if not self._answers:
            return "no answers yet"
        all_stats = [answer.stats for answer in self._answers]
        steps = sum(stats.steps for stats in all_stats)
        tokens = sum(stats.steps * stats.tokens_per_step for stats in all_stats)
        seconds = sum(stats.decode_seconds for stats in all_stats)
        parts = [
            summary.counted(len(self._answers), "answer"),
            summary.counted(sum(len(answer.token_ids) for answer in self._answers), "token"),
            f"{tokens / seconds if seconds else 0.0:.1f} tokens/s",
            f"{tokens / steps if steps else 0.0:.2f} tokens/step",
        ]
        if drafted := sum(stats.drafted for stats in all_stats):
            parts.append(f"{sum(stats.accepted for stats in all_stats) / drafted:.0%} of drafts accepted")
        parts.append(summary.mtp(all_stats[-1].mtp))
        return summary.SEPARATOR.join(parts)


def _lines() -> Iterator[str]:
    """What the person types; on a terminal with a prompt and line editing."""
    if not sys.stdin.isatty():
        for line in sys.stdin:
            yield line.strip()
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - its import gives input() line editing and history
    while True:
        try:
            yield input(PROMPT).strip()
        except EOFError:
            print()
            return


@contextlib.contextmanager
def _interruptible() -> Iterator[list[bool]]:
    """Turns the first Ctrl-C into an entry of the list, so that no step of the engine is cut in half; a
    second one is the usual KeyboardInterrupt."""
    interrupted: list[bool] = []

    def handle(number: int, frame: Any) -> None:
        if interrupted:
            signal.default_int_handler(number, frame)
        interrupted.append(True)

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)
