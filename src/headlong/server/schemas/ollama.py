"""The bodies of Ollama's endpoints under `/api`. Knows the wire, not the engine."""

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from headlong.params import MIN_REPETITION_PENALTY
from headlong.server.schemas import chat
from headlong.server.schemas.base import MAX_IDS, MAX_STOPS, Speculative, Stop, Strict, TokenId
from headlong.server.schemas.fields import ollama as fields
from headlong.server.schemas.rules import Rules

_DURATION = re.compile(r"-?(?:\d+(?:\.\d+)?|(?:\d+(?:\.\d+)?(?:ns|us|µs|ms|s|m|h))+)")
MAX_DURATION_CHARS = 64
Name = Annotated[str, Field(min_length=1, max_length=512)]


def _whole(value: Any) -> Any:
    """Takes 42.0 for 42, as Ollama does: some clients have no whole numbers."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _duration(value: float | str) -> float | str:
    if isinstance(value, str) and (len(value) > MAX_DURATION_CHARS or not _DURATION.fullmatch(value)):
        raise ValueError("must be seconds, or a duration such as '5m'")
    return value


Whole = Annotated[int, BeforeValidator(_whole)]
Count = Annotated[Whole, Field(ge=-(2**31), le=2**31)]
Duration = Annotated[float | str, AfterValidator(_duration)]


class Options(Strict):
    """How the output is sampled."""

    rules: ClassVar[Rules] = fields.OPTIONS
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: Annotated[Whole, Field(ge=-1, le=2**31)] | None = None
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: Annotated[Whole, Field(ge=-1, le=2**63 - 1)] | None = None
    """The seed of the noise; -1 draws a new one, like no seed."""
    num_predict: Count | None = None
    """The most tokens of the output; 0 or less leaves it to the context."""
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    repeat_penalty: float | None = Field(default=None, ge=MIN_REPETITION_PENALTY, le=100)
    repeat_last_n: Count | None = None
    presence_penalty: float | None = Field(default=None, ge=-100, le=100)
    frequency_penalty: float | None = Field(default=None, ge=-100, le=100)

    def sampling(self) -> dict[str, Any]:
        """The same in the words of the other dialects."""
        penalties = {
            "repetition_penalty": self.repeat_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
        }
        if self.repeat_last_n == 0:
            penalties = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        return penalties | {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "seed": None if self.seed == -1 else self.seed,
            "stop": self.stop or None,
            "max_tokens": self.num_predict if self.num_predict and self.num_predict > 0 else None,
        }

    @property
    def penalises(self) -> bool:
        """Whether the request asks for a penalty."""
        return self.repeat_penalty not in (None, 1.0) or bool(self.presence_penalty or self.frequency_penalty)


class CalledFunction(Strict):
    rules: ClassVar[Rules] = fields.CALLED_FUNCTION
    name: chat.FunctionName
    arguments: dict[str, Any] = Field(default_factory=dict)


class ToolCall(Strict):
    rules: ClassVar[Rules] = fields.TOOL_CALL
    id: str = Field(default="", max_length=256)
    function: CalledFunction


class Message(Strict):
    rules: ClassVar[Rules] = fields.MESSAGE
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    """What the assistant thought in an earlier turn; whether it is shown again is the template's affair."""
    tool_calls: list[ToolCall] | None = Field(default=None, max_length=chat.MAX_TOOLS)
    tool_name: str | None = None
    tool_call_id: str | None = None


class Tool(Strict):
    rules: ClassVar[Rules] = fields.TOOL
    type: Literal["function"] = "function"
    function: chat.Function


class Generating(Strict):
    """What `/api/chat` and `/api/generate` have in common."""

    model: Name
    stream: bool = True
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: Options = Field(default_factory=Options)
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    keep_alive: Duration | None = None
    """How long the model stays loaded. Here it stays; 0 without a prompt unloads it."""
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    speculative: Speculative | None = None
    """Drafting for this request, which is Headlong's own."""

    @property
    def unloads(self) -> bool:
        given = self.keep_alive
        return given == 0 or (isinstance(given, str) and not re.search(r"[1-9]", given))


class OllamaChatRequest(Generating):
    """A request for Ollama's chat; without messages it loads or unloads the model."""

    rules: ClassVar[Rules] = fields.CHAT
    messages: list[Message] = Field(default_factory=list, max_length=10_000)
    tools: list[Tool] | None = Field(default=None, max_length=chat.MAX_TOOLS)


class GenerateRequest(Generating):
    """A request to continue one prompt; without a prompt it loads or unloads the model."""

    rules: ClassVar[Rules] = fields.GENERATE
    prompt: str = ""
    system: str | None = None
    raw: bool = False
    """Whether the prompt goes to the model as it is, without the chat template."""
    context: list[TokenId] | None = Field(default=None, max_length=MAX_IDS)
    """What an earlier answer returned as its context: the conversation goes on from there."""


class NamedModel(Strict):
    """A model by its name, which older clients call `name`."""

    rules: ClassVar[Rules] = fields.SHOWN
    model: Name | None = None
    name: Name | None = None


class PullRequest(NamedModel):
    """A request to fetch a model onto the server's machine."""

    rules: ClassVar[Rules] = fields.PULLED
    stream: bool = True
