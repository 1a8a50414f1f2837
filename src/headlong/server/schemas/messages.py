"""The bodies of `/v1/messages` and `/v1/messages/count_tokens`. Knows the wire, not the engine."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Tag

from headlong.server.schemas.base import MAX_PARTS, MAX_STOPS, Speculative, Stop, Strict
from headlong.server.schemas.chat import MAX_TOOLS, FunctionName
from headlong.server.schemas.fields import anthropic as fields
from headlong.server.schemas.rules import Rules
from headlong.server.schemas.variants import by_type, refused

MIN_BUDGET = 1024
"""The smallest `budget_tokens` that Anthropic's API takes."""
ToolUseId = Annotated[str, Field(max_length=256)]


class TextBlock(Strict):
    rules: ClassVar[Rules] = fields.BLOCK
    type: Literal["text"]
    text: str


class ThinkingBlock(Strict):
    """What the assistant thought in an earlier turn. Whatever signature it came with is taken."""

    rules: ClassVar[Rules] = fields.BLOCK
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUseBlock(Strict):
    rules: ClassVar[Rules] = fields.BLOCK
    type: Literal["tool_use"]
    id: ToolUseId
    name: FunctionName
    input: dict[str, Any]


ONLY_TEXT = "must be a text block; this server reads text alone"
ResultBlock = Annotated[Annotated[TextBlock, Tag("TextBlock")], by_type({"text": "TextBlock"}, ONLY_TEXT)]


class ToolResultBlock(Strict):
    rules: ClassVar[Rules] = fields.BLOCK
    type: Literal["tool_result"]
    tool_use_id: ToolUseId
    content: str | Annotated[list[ResultBlock], Field(max_length=MAX_PARTS)] | None = None
    is_error: bool | None = None


Block = Annotated[
    Annotated[TextBlock, Tag("TextBlock")]
    | Annotated[ThinkingBlock, Tag("ThinkingBlock")]
    | Annotated[ToolUseBlock, Tag("ToolUseBlock")]
    | Annotated[ToolResultBlock, Tag("ToolResultBlock")],
    by_type(
        {
            "text": "TextBlock",
            "thinking": "ThinkingBlock",
            "tool_use": "ToolUseBlock",
            "tool_result": "ToolResultBlock",
        },
        "must be a text, thinking, tool_use or tool_result block; this server reads text alone",
    ),
]


class InputMessage(Strict):
    rules: ClassVar[Rules] = fields.MESSAGE
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(max_length=MAX_PARTS)]


class OwnTool(Strict):
    rules: ClassVar[Rules] = fields.TOOL
    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


Tool = Annotated[
    Annotated[OwnTool, Tag("OwnTool")],
    by_type(
        {"custom": "OwnTool"},
        "must be a tool of your own; this server has no built-in tools, remove it",
        default="custom",
    ),
]


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Strict):
    """The budget is what it is in Anthropic's words: a target, not a limit. Templates that know budgets are told;
    `max_tokens` bounds thinking and answer together."""

    rules: ClassVar[Rules] = fields.THINKING
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(default=None, ge=MIN_BUDGET, le=2**31)
    display: Annotated[
        Literal["summarized"] | None,
        refused("thinking is returned in full; leave it out or send 'summarized'", "summarized"),
    ] = None


class OutputFormat(Strict):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    rules: ClassVar[Rules] = fields.OUTPUT_CONFIG
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """The reasoning effort, which is handed to templates that know efforts."""
    format: OutputFormat | None = None


class CountTokensRequest(Strict):
    """A request to count a prompt's tokens: it has the prompt, but nothing on how to continue it."""

    rules: ClassVar[Rules] = fields.COUNTED
    messages: list[InputMessage] = Field(min_length=1, max_length=10_000)
    model: str | None = Field(default=None, max_length=512)
    system: str | Annotated[list[ResultBlock], Field(max_length=MAX_PARTS)] | None = None
    tools: list[Tool] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    """Without it the template is asked not to think, as Anthropic's models do not."""
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest):
    """A request for a message of Anthropic's API, with a few extensions."""

    rules: ClassVar[Rules] = fields.MESSAGES
    max_tokens: int = Field(ge=1, le=2**31)
    stop_sequences: list[Stop] | None = Field(default=None, max_length=MAX_STOPS)
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0, le=2**31)
    stream: bool | None = None
    # Not Anthropic's.
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: int | None = Field(default=None, ge=0, le=2**63 - 1)
    speculative: Speculative | None = None
