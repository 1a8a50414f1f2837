"""`headlong run`: one prompt, streamed, with how it went. Knows nothing of conversations."""

import argparse
import secrets
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headlong.cli import chat, options, summary
from headlong.cli.drafts import AnswerWriter
from headlong.cli.prompts import encode
from headlong.cli.terminal import note, tell_if_slow, wants_colour
from headlong.errors import RequestError
from headlong.params import SamplingParams
from headlong.progress import ProgressFn, default_progress

if TYPE_CHECKING:
    from headlong.completion import Completion
    from headlong.llm import LLM

EXIT_DIFFERENT = 1
EPILOG = """\
examples:
  headlong run "Write a poem about the sea."
  headlong run smollm2 "What is a lighthouse for?"
  headlong run smollm2
  headlong run --show-drafts --draft-tokens 4 "Tell me how bread is made."
  headlong run Qwen/Qwen3.5-0.8B --temperature 0.7 --seed 1 "Name a colour."
  echo "Once upon a time" | headlong run --raw -

MODEL alone opens a chat with it; a word that names no model is a prompt. Where stdin is no terminal, what
it holds is the prompt. Sampling is as the model's authors suggest (generation_config.json) where no flag
says otherwise; --temperature 0 is greedy.
The text goes to stdout, the statistics to stderr. With --compare the exit code is 1 if the tokens differ.
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "run",
        usage="headlong run [options] [MODEL] [PROMPT]",
        help="generate from one prompt, or chat with a model",
        description="Generates from one prompt and says how fast, and how often the drafts were right.",
        epilog=EPILOG,
    )
    options.add_model(parser)
    parser.add_argument(
        "prompt", nargs="?", metavar="PROMPT", help="the prompt; - reads it from stdin; without it, a chat"
    )
    parser.add_argument(
        "--raw", action="store_true", help="pass the prompt as it is, without a chat template"
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="generate again without drafting: check that the tokens are identical, measure the speed-up",
    )
    options.add_chat_template(parser)
    options.add_generation_config(parser)
    options.add_draft_tokens(parser)
    options.add_colour(parser)
    options.add_engine(parser)
    options.add_sampling(parser, max_tokens=SamplingParams.max_tokens)
    parser.set_defaults(execute=execute)


def execute(args: argparse.Namespace) -> int:
    model, prompt = _words(args)
    if prompt is None and sys.stdin.isatty():
        return _chat(args, model)
    given = options.sampling_options(args, max_tokens=SamplingParams.max_tokens)
    if prompt in (None, "-"):
        prompt = sys.stdin.read().rstrip("\n")
    if not prompt:
        raise RequestError("prompt is empty; give it as the last argument, or - to read it from stdin")
    from headlong.llm import LLM

    progress = default_progress()
    llm = LLM(model, max_rows=1, progress=progress, **options.engine_options(args))
    tell_if_slow(llm)
    params = llm.recommended_params(**given)
    if args.compare:
        params = _repeatable(params)
    tokens = encode(llm, prompt, raw=args.raw)
    done = _stream(llm, tokens, params, tint=args.show_drafts and wants_colour(args.color, sys.stdout))
    if args.compare and done.stats.mtp:
        return _compare(llm, tokens, params, done, progress)
    parts = summary.describe(done)
    note(summary.SEPARATOR.join([*parts, "nothing to compare"] if args.compare else parts))
    return 0


def _words(args: argparse.Namespace) -> tuple[str | None, str | None]:
    """The model and the prompt. One word alone is a model if it names one, else a prompt."""
    if args.prompt is not None:
        return args.model, args.prompt
    if args.model is None:
        raise RequestError("there is nothing to run; give a PROMPT, or a MODEL to chat with")
    from headlong.checkpoint.source import names_model

    return (args.model, None) if names_model(args.model) else (None, args.model)


def _chat(args: argparse.Namespace, model: str | None) -> int:
    for name in ("raw", "compare"):
        if getattr(args, name):
            raise RequestError(
                f"--{name} needs a prompt, and {model!r} names a model; give the prompt after it"
            )
    args.model = model
    return chat.execute(args)


def _repeatable(params: SamplingParams) -> SamplingParams:
    """Refuses settings with which the text would not be the same every time."""
    if params.greedy:
        return params
    if params.verify != "coupled":
        raise RequestError(
            f"--compare checks tokens, and --verify {params.verify} keeps only their distribution; "
            "use --verify coupled"
        )
    return params if params.seed is not None else replace(params, seed=secrets.randbits(32))


def _stream(llm: "LLM", tokens: tuple[int, ...], params: SamplingParams, *, tint: bool) -> "Completion":
    writer = AnswerWriter(llm.text.tokenizer, tint)
    done = None
    for chunk in llm.stream(tokens, params):
        writer.write(chunk)
        done = chunk.completion
    writer.end()
    assert done is not None
    return done


def _compare(
    llm: "LLM", tokens: tuple[int, ...], params: SamplingParams, done: "Completion", progress: ProgressFn
) -> int:
    from headlong.cli.compare import compare

    result = compare(llm, tokens, params, done.token_ids, progress)
    parts = summary.describe(done)
    if result.difference is not None:
        note(summary.SEPARATOR.join(parts))
        print(f"headlong run: TOKENS DIFFER from plain decoding {result.difference}", file=sys.stderr)
        return EXIT_DIFFERENT
    if not params.greedy:
        parts.append(f"seed {params.seed}")
    if result.speed_up is None:
        parts.append("too short to measure")
    else:
        parts[1] = f"{result.drafting_speed:.1f} tokens/s"
        parts.append(f"{result.speed_up:.2f}x plain decoding ({result.plain_speed:.1f} tokens/s)")
    note(summary.SEPARATOR.join([*parts, "identical tokens"]))
    return 0
