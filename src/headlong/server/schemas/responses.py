"""The body of `/v1/responses`. Knows the wire, not the engine."""

from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from headlong.server.schemas.base import Sampling, Strict
from headlong.server.schemas.chat import MAX_TOOLS, FunctionName
from headlong.server.schemas.variants import by_type, refused

MAX_ITEMS = 9_999
"""With the instructions, as many as a chat has messages."""
ItemId = Annotated[str, Field(max_length=256)]
Status = Literal["in_progress", "completed", "incomplete"]
NOTHING_STORED = "this server stores nothing; "


class TextPart(Strict):
    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    """This and the annotations come along when an earlier output is sent back."""


class RefusalPart(Strict):
    type: Literal["refusal"]
    refusal: str


Part = Annotated[
    Annotated[TextPart, Tag("TextPart")] | Annotated[RefusalPart, Tag("RefusalPart")],
    by_type(
        {"input_text": "TextPart", "output_text": "TextPart", "text": "TextPart", "refusal": "RefusalPart"},
        "must be an input_text, output_text or refusal part; this server reads text alone",
    ),
]


class MessageItem(Strict):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]
    id: ItemId | None = None
    status: Status | None = None


class FunctionCallItem(Strict):
    type: Literal["function_call"]
    call_id: ItemId
    name: FunctionName
    arguments: str
    id: ItemId | None = None
    status: Status | None = None


class FunctionOutputItem(Strict):
    type: Literal["function_call_output"]
    call_id: ItemId
    output: str | list[Part]
    id: ItemId | None = None
    status: Status | None = None


class ReasoningText(Strict):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Strict):
    type: Literal["reasoning"]
    id: ItemId | None = None
    summary: list[ReasoningText] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None
    status: Status | None = None


Item = Annotated[
    Annotated[MessageItem, Tag("MessageItem")]
    | Annotated[FunctionCallItem, Tag("FunctionCallItem")]
    | Annotated[FunctionOutputItem, Tag("FunctionOutputItem")]
    | Annotated[ReasoningItem, Tag("ReasoningItem")],
    by_type(
        {
            "message": "MessageItem",
            "function_call": "FunctionCallItem",
            "function_call_output": "FunctionOutputItem",
            "reasoning": "ReasoningItem",
        },
        "must be a message, function_call, function_call_output or reasoning item",
        default="message",
    ),
]


class FunctionTool(Strict):
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


Tool = Annotated[
    Annotated[FunctionTool, Tag("FunctionTool")],
    by_type(
        {"function": "FunctionTool"}, "must be a function tool; this server has no built-in tools, remove it"
    ),
]


class NamedTool(Strict):
    type: Literal["function"]
    name: str


class PlainFormat(Strict):
    type: Literal["text", "json_object"]


class JsonSchemaFormat(Strict):
    type: Literal["json_schema"]
    name: str = Field(default="output", max_length=64)
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class RegexFormat(Strict):
    type: Literal["regex"]
    pattern: str


class GrammarFormat(Strict):
    type: Literal["grammar"]
    grammar: str
    syntax: Literal["lark", "gbnf"] = "lark"


Format = Annotated[
    Annotated[PlainFormat, Tag("PlainFormat")]
    | Annotated[JsonSchemaFormat, Tag("JsonSchemaFormat")]
    | Annotated[RegexFormat, Tag("RegexFormat")]
    | Annotated[GrammarFormat, Tag("GrammarFormat")],
    by_type(
        {
            "text": "PlainFormat",
            "json_object": "PlainFormat",
            "json_schema": "JsonSchemaFormat",
            "regex": "RegexFormat",
            "grammar": "GrammarFormat",
        },
        "type must be text, json_object, json_schema, regex or grammar",
    ),
]


class TextConfig(Strict):
    format: Format | None = None
    verbosity: Annotated[
        Literal["medium"] | None, refused("models here have one; leave it out or send 'medium'", "medium")
    ] = None


class ReasoningConfig(Strict):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Annotated[
        Literal["auto"] | None,
        refused("reasoning is returned in full, not summarised; leave it out or send 'auto'", "auto"),
    ] = None


class StreamOptions(Strict):
    include_obfuscation: Annotated[
        Literal[False] | None, refused("events are not padded; leave it out or send false", False)
    ] = None


class ResponsesRequest(Sampling):
    """OpenAI's response, with the sampling extensions of the chat endpoint."""

    input: str | Annotated[list[Item], Field(min_length=1, max_length=MAX_ITEMS)]
    instructions: str | None = None
    model: str | None = Field(default=None, max_length=512)
    max_output_tokens: int | None = Field(default=None, ge=1, le=2**31)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: list[Tool] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    """Reasoning always comes in full and may be sent back as it came; nothing about it is encrypted."""
    chat_template_kwargs: dict[str, Any] | None = None
    truncation: Annotated[
        Literal["disabled"] | None,
        refused("nothing is cut off silently; send what fits the context, or leave it out", "disabled"),
    ] = None
    # What follows changes no output, by OpenAI's own definition.
    user: str | None = Field(default=None, max_length=512)
    safety_identifier: str | None = Field(default=None, max_length=512)
    prompt_cache_key: str | None = Field(default=None, max_length=512)
    metadata: dict[str, str] | None = None
    service_tier: Literal["auto", "default"] | None = None
    # OpenAI's, and not here.
    store: Annotated[Literal[False] | None, refused(NOTHING_STORED + "leave it out or send false", False)] = (
        None
    )
    previous_response_id: Annotated[
        None, refused(NOTHING_STORED + "send the whole conversation in input")
    ] = None
    conversation: Annotated[None, refused(NOTHING_STORED + "send the whole conversation in input")] = None
    prompt: Annotated[None, refused(NOTHING_STORED + "send its text in instructions and input")] = None
    background: Annotated[
        Literal[False] | None, refused(NOTHING_STORED + "keep the connection open, or stream", False)
    ] = None
    max_tool_calls: Annotated[
        None, refused("it limits built-in tools, of which this server has none; leave it out")
    ] = None

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())
