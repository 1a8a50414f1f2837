"""The body of `/v1/chat/completions`. Knows the wire, not the engine."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from headlong.server.schemas.base import MAX_PARTS, ResponseFormat, Sampling, StreamOptions, Strict
from headlong.server.schemas.fields import openai as fields
from headlong.server.schemas.rules import Rules

MAX_TOOLS = 128
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class Part(Strict):
    """A part of a message's content. Parts other than text are refused by name, later, with a reason."""

    rules: ClassVar[Rules] = fields.PART
    type: Literal["text", "image_url", "input_audio", "file", "refusal", "input_text", "output_text"]
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None


class CalledFunction(Strict):
    rules: ClassVar[Rules] = fields.CALLED_FUNCTION
    name: FunctionName
    arguments: str | dict[str, Any]


class ToolCall(Strict):
    rules: ClassVar[Rules] = fields.TOOL_CALL
    id: str = Field(default="", max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Message(Strict):
    rules: ClassVar[Rules] = fields.MESSAGE
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], Field(max_length=MAX_PARTS)] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    """What the assistant thought in an earlier turn; whether it is shown again is the template's affair."""
    reasoning: str | None = None
    refusal: str | None = None
    prefix: bool | None = None
    """Whether the answer goes on from this message, which is the assistant's and the last one."""


class Function(Strict):
    rules: ClassVar[Rules] = fields.FUNCTION
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    rules: ClassVar[Rules] = fields.TOOL
    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


class ChatRequest(Sampling):
    """A request for OpenAI's chat completion, with the extensions that users of other servers know."""

    rules: ClassVar[Rules] = fields.CHAT_COMPLETION
    messages: list[Message] = Field(min_length=1, max_length=10_000)
    model: str | None = Field(default=None, max_length=512)
    max_tokens: int | None = Field(default=None, ge=1, le=2**31)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=2**31)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tools: list[Tool] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """`none` turns thinking off; the others turn it on, and templates that know efforts read them."""
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    """Whether the answer goes on from the last message, which is the assistant's."""
    add_generation_prompt: bool | None = None
    """Whether the template opens a turn of the assistant's; it does unless the last message is continued."""
    verbosity: Literal["low", "medium", "high"] | None = None
    """Handed to templates that know it."""

    @property
    def continues(self) -> bool:
        return bool(self.continue_final_message or self.messages[-1].prefix)

    @property
    def wants_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
