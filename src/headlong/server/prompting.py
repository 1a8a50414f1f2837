"""Makes a job of a chat request: renders the template, chooses the grammar and the sampling parameters.

The other chat dialects translate themselves into a `ChatRequest` and come here too. Runs in a worker thread:
rendering and tokenizing a long conversation takes a while.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from headlong.errors import RequestError
from headlong.params import Grammar, SamplingParams
from headlong.server.generation import Job
from headlong.server.model import Model
from headlong.server.schemas.base import Sampling
from headlong.server.schemas.chat import ChatRequest, Message, NamedTool
from headlong.server.settings import Settings
from headlong.server.weighing import MAX_COST, cost
from headlong.text.messages import prepare_messages, template_variables
from headlong.text.tools.grammar import check_tools

MAX_PROMPT_LOGPROBS = 1 << 18
"""The most log-probabilities of prompts that one answer tells: more take seconds to write down."""
MAX_ARGUMENTS_CHARS = 1 << 20
"""The longest arguments of one call."""
DRAFTING_FIELDS = {"draft_tokens": "speculative.mtp", "verify": "speculative.verify"}
"""The names that every dialect has for these fields of `SamplingParams`."""


@dataclass(frozen=True)
class Prompted:
    """A rendered prompt."""

    text: str
    tokens: tuple[int, ...]
    tools: list[dict[str, Any]] | None
    lead: str
    """The text by whose end the form of the answer is told: the prompt's, or the beginning of a thought that is
    continued."""


def chat_job(
    model: Model,
    body: ChatRequest,
    settings: Settings,
    job_id: str,
    endpoint: str,
    *,
    before: tuple[int, ...] = (),
) -> Job:
    """`before` are tokens of an earlier conversation, in front of what the template writes."""
    check_drafting(model, body)
    prompted = render(model, body)
    tokens = (*before, *prompted.tokens)
    if body.stream and body.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs: not for streams; set stream to false")
    grammar = _grammar(model, body, prompted)
    params = body.params(
        model.sampling,
        max_tokens=output_tokens(model, settings, len(tokens), body.max_completion_tokens or body.max_tokens),
        logprobs=body.wants_logprobs,
        grammar=grammar,
    )
    check_told((tokens,), params)
    parser = partial(model.format.parser, prompted.lead, prompted.tools)
    return Job(job_id, endpoint, (tokens,), params, parser)


def render(model: Model, body: ChatRequest) -> Prompted:
    """The conversation as the model's own template writes it."""
    codec = model.client.text
    _check_open(body)
    _check_arguments(body.messages)
    sent = [message.model_dump(exclude_none=True, exclude={"prefix"}) for message in body.messages]
    messages = model.format.prepare(prepare_messages(sent))
    tools = None
    if body.tools and body.tool_choice != "none":
        if model.format.tools is None:
            raise RequestError("tools: this model's chat template has no place for tools; remove them")
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools]
        check_tools(tools)
    elif body.tool_choice not in (None, "none", "auto"):
        raise RequestError("tool_choice: there are no tools to choose from; add tools or remove it")
    variables = template_variables(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables = {
            "enable_thinking": body.reasoning_effort != "none",
            "reasoning_effort": body.reasoning_effort,
        } | variables
    if body.verbosity is not None:
        variables = {"verbosity": body.verbosity} | variables
    if body.continues:
        text = codec.render_open(messages, tools=tools, **variables)
    else:
        opens = body.add_generation_prompt is not False
        text = codec.render_chat(messages, add_generation_prompt=opens, tools=tools, **variables)
    tokens = truncated(model, codec.encode_rendered(text), body.truncate_prompt_tokens)
    return Prompted(text, tokens, tools, _lead(model, messages[-1], text) if body.continues else text)


def truncated(model: Model, tokens: tuple[int, ...], count: int | None) -> tuple[int, ...]:
    """The last `count` tokens of a prompt; all that leave room for an answer for -1."""
    if count == 0:
        raise RequestError("truncate_prompt_tokens: must be at least 1, or -1 for as many as fit")
    if count is None:
        return tokens
    return tokens[-(model.client.description.max_len - 1 if count == -1 else count) :]


def _check_open(body: ChatRequest) -> None:
    """Checks that only the assistant's last message is to be continued."""
    for place, message in enumerate(body.messages[:-1]):
        if message.prefix:
            raise RequestError(f"messages[{place}].prefix: only the last message can be continued; remove it")
    if not body.continues:
        return
    name = (
        "continue_final_message"
        if body.continue_final_message
        else f"messages[{len(body.messages) - 1}].prefix"
    )
    if body.messages[-1].role != "assistant" or body.messages[-1].tool_calls:
        raise RequestError(
            f"{name}: the last message must be a text of the assistant's, which the answer continues"
        )
    if body.add_generation_prompt:
        raise RequestError(f"add_generation_prompt: does not go with {name}; send false or leave it out")


def _check_arguments(messages: Iterable[Message]) -> None:
    """Raises where the arguments of calls, which are JSON inside of strings, take long to read."""
    left = MAX_COST
    for place, message in enumerate(messages):
        for number, call in enumerate(message.tool_calls or ()):
            given = call.function.arguments
            if not isinstance(given, str):
                continue
            left -= (
                cost(given.encode("utf-8", "replace")) if len(given) <= MAX_ARGUMENTS_CHARS else MAX_COST + 1
            )
            if left < 0:
                raise RequestError(
                    f"messages[{place}].tool_calls[{number}].function.arguments: all arguments have too many values, "
                    f"or these more than {MAX_ARGUMENTS_CHARS} characters; send less"
                )


def _lead(model: Model, message: Mapping[str, Any], text: str) -> str:
    """What tells whether the answer begins inside a thought, where it continues this message."""
    reasoning, content = model.format.reasoning, message["content"]
    if reasoning is None:
        return text
    is_open = content.rfind(reasoning.start) > content.rfind(reasoning.end)
    return reasoning.start if is_open else f"{reasoning.end}{content}"


def output_tokens(model: Model, settings: Settings, prompt_len: int, wanted: int | None) -> int:
    """The most tokens of an answer: what was asked for, else what the model's authors suggest, or all that the context
    has left."""
    description = model.client.description
    left = max(1, description.max_len - prompt_len)
    limit = settings.max_tokens_limit
    if limit is not None and wanted is not None and wanted > limit:
        raise RequestError(f"max_tokens: {wanted} is above this server's limit of {limit}")
    return min(wanted or description.recommended_tokens or left, left, limit or left)


def check_told(prompts: Iterable[tuple[int, ...]], params: SamplingParams) -> None:
    """Raises if more log-probabilities of prompts are asked for than an answer should hold."""
    if params.prompt_logprobs is None:
        return
    count = sum(map(len, prompts)) * params.n * (1 + params.prompt_logprobs)
    if count > MAX_PROMPT_LOGPROBS:
        raise RequestError(
            f"prompt_logprobs: {count} numbers for the tokens of all prompts are more than {MAX_PROMPT_LOGPROBS}; "
            "ask for fewer alternatives, or send less"
        )


def sampling_fields(body: Sampling) -> dict[str, str]:
    """The names that chat and completions have for fields of `SamplingParams`, where they differ."""
    form = "response_format" if body.structured_outputs is None else "structured_outputs"
    return {"grammar": form} | DRAFTING_FIELDS


def check_drafting(model: Model, body: Sampling) -> None:
    """Raises if the request insists on drafting (`mtp: "on"`) and this model cannot draft, or asks for more drafts than
    the engine was started for."""
    drafting = model.client.description.drafting
    refusal, deepest = drafting.refusal, drafting.deepest
    depth = None if body.speculative is None else body.speculative.draft_tokens
    if depth is not None and deepest and depth > deepest:
        raise RequestError(
            f"speculative.mtp: must be 'auto', 'on', 'off' or a whole number from 0 to {deepest}, the maximum of this "
            f"engine, not {depth}; start it with a larger max_draft_tokens for more"
        )
    if body.speculative is not None and body.speculative.mtp == "on" and refusal is not None:
        raise RequestError(f"speculative.mtp: 'on', but {refusal}; use 'auto'")


def requested_grammar(body: Sampling, response_format: Any) -> Grammar | None:
    """The grammar that `response_format` or `structured_outputs` asks for; both at once contradict each other."""
    grammar = None if response_format is None else response_format.as_grammar("response_format")
    if body.structured_outputs is None:
        return grammar
    if grammar is not None:
        raise RequestError("structured_outputs and response_format both ask for a form; remove one")
    return body.structured_outputs.as_grammar()


def _grammar(model: Model, body: ChatRequest, prompted: Prompted) -> Grammar | None:
    """The form of the answer. With tools the output may be calls instead; where a call is demanded, it must be."""
    form, calls = requested_grammar(body, body.response_format), None
    if prompted.tools is not None:
        choice = body.tool_choice
        named = choice.model_dump() if isinstance(choice, NamedTool) else choice or "auto"
        several = body.parallel_tool_calls is not False and not isinstance(choice, NamedTool)
        if named != "auto":
            calls = model.format.tool_grammar(prompted.tools, named, parallel=several)
            form = form if calls is None else None
        elif form is not None:
            calls = model.format.tool_grammar(prompted.tools, "required", parallel=several)
    return model.format.whole_grammar(form, calls, prompted.lead)
