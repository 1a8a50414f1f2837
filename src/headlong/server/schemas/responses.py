"""The body of `/v1/responses`. Knows the wire, not the engine."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, Tag

from headlong.server.schemas.base import MAX_IDS, MAX_PARTS, Sampling, Strict
from headlong.server.schemas.chat import MAX_TOOLS, FunctionName
from headlong.server.schemas.fields import openai as fields
from headlong.server.schemas.rules import Rules
from headlong.server.schemas.variants import by_type

MAX_ITEMS = 9_999
"""The most input items: with the instructions, as many as a chat may have messages."""
MAX_METADATA = 1000
ItemId = Annotated[str, Field(max_length=256)]
Status = Literal["in_progress", "completed", "incomplete"]


class TextPart(Strict):
    rules: ClassVar[Rules] = fields.RESPONSE_PART
    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = Field(default=None, max_length=MAX_PARTS)
    logprobs: list[Any] | None = Field(default=None, max_length=MAX_IDS)
    """This and the annotations come along when an earlier output is sent back."""


class RefusalPart(Strict):
    rules: ClassVar[Rules] = fields.RESPONSE_PART
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
    rules: ClassVar[Rules] = fields.ITEM
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[Part], Field(max_length=MAX_PARTS)]
    id: ItemId | None = None
    status: Status | None = None


class FunctionCallItem(Strict):
    rules: ClassVar[Rules] = fields.ITEM
    type: Literal["function_call"]
    call_id: ItemId
    name: FunctionName
    arguments: str
    namespace: FunctionName | None = None
    id: ItemId | None = None
    status: Status | None = None


class CustomCallItem(Strict):
    rules: ClassVar[Rules] = fields.ITEM
    type: Literal["custom_tool_call"]
    call_id: ItemId
    name: FunctionName
    input: str
    namespace: FunctionName | None = None
    id: ItemId | None = None
    status: Status | None = None


class FunctionOutputItem(Strict):
    rules: ClassVar[Rules] = fields.ITEM
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: ItemId
    output: str | Annotated[list[Part], Field(max_length=MAX_PARTS)]
    id: ItemId | None = None
    status: Status | None = None


class ReasoningText(Strict):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Strict):
    rules: ClassVar[Rules] = fields.ITEM
    type: Literal["reasoning"]
    id: ItemId | None = None
    summary: list[ReasoningText] | None = Field(default=None, max_length=MAX_PARTS)
    content: list[ReasoningText] | None = Field(default=None, max_length=MAX_PARTS)
    encrypted_content: str | None = None
    status: Status | None = None


Item = Annotated[
    Annotated[MessageItem, Tag("MessageItem")]
    | Annotated[FunctionCallItem, Tag("FunctionCallItem")]
    | Annotated[CustomCallItem, Tag("CustomCallItem")]
    | Annotated[FunctionOutputItem, Tag("FunctionOutputItem")]
    | Annotated[ReasoningItem, Tag("ReasoningItem")],
    by_type(
        {
            "message": "MessageItem",
            "function_call": "FunctionCallItem",
            "custom_tool_call": "CustomCallItem",
            "function_call_output": "FunctionOutputItem",
            "custom_tool_call_output": "FunctionOutputItem",
            "reasoning": "ReasoningItem",
        },
        "must be a message, a reasoning item, or a function_call or custom_tool_call or the output of one",
        default="message",
    ),
]


class FunctionTool(Strict):
    rules: ClassVar[Rules] = fields.RESPONSE_TOOL
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomFormat(Strict):
    """What the input of a custom tool may be. A grammar is told to the model, not enforced."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class CustomTool(Strict):
    """A tool that takes text."""

    rules: ClassVar[Rules] = fields.RESPONSE_TOOL
    type: Literal["custom"]
    name: FunctionName
    description: str | None = None
    format: CustomFormat | None = None


class HostedTool(BaseModel):
    """A tool that OpenAI runs itself. It is not offered, so whatever else it holds does not matter."""

    model_config = ConfigDict(extra="ignore")

    type: str


HOSTED_TOOLS = (
    *("web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11"),
    *("file_search", "code_interpreter", "computer", "computer_use", "computer_use_preview", "mcp"),
    *("image_generation", "local_shell", "shell", "apply_patch", "tool_search", "programmatic_tool_calling"),
)
_CALLED = {"function": "FunctionTool", "custom": "CustomTool"}
NestedTool = Annotated[
    Annotated[FunctionTool, Tag("FunctionTool")] | Annotated[CustomTool, Tag("CustomTool")],
    by_type(_CALLED, "must be a function or a custom tool"),
]


class NamespaceTool(Strict):
    """A group of tools under a common name."""

    rules: ClassVar[Rules] = fields.RESPONSE_TOOL
    type: Literal["namespace"]
    name: FunctionName
    description: str | None = None
    tools: list[NestedTool] = Field(max_length=MAX_TOOLS)


Tool = Annotated[
    Annotated[FunctionTool, Tag("FunctionTool")]
    | Annotated[CustomTool, Tag("CustomTool")]
    | Annotated[NamespaceTool, Tag("NamespaceTool")]
    | Annotated[HostedTool, Tag("HostedTool")],
    by_type(
        {**_CALLED, "namespace": "NamespaceTool", **dict.fromkeys(HOSTED_TOOLS, "HostedTool")},
        "must be a function, a custom tool or a namespace of such; offer this one as a function, or remove it",
    ),
]


class NamedTool(Strict):
    type: Literal["function", "custom"]
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
    verbosity: Literal["low", "medium", "high"] | None = None
    """Handed to templates that know it."""


class ReasoningConfig(Strict):
    rules: ClassVar[Rules] = fields.REASONING
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class StreamOptions(Strict):
    rules: ClassVar[Rules] = fields.STREAM_OPTIONS


class ResponsesRequest(Sampling):
    """OpenAI's response, with the sampling extensions of the chat endpoint."""

    rules: ClassVar[Rules] = fields.RESPONSE
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
    previous_response_id: ItemId | None = None
    """Goes on from a stored response: its conversation comes before the input, its instructions do not."""
    store: bool | None = None
    """Whether the response is stored, so that another one can go on from it; it is, unless this is false."""
    include: list[str] | None = Field(default=None, max_length=32)
    """`message.output_text.logprobs` counts. Reasoning always comes in full and may be sent back as it came; nothing
    about it is encrypted. The others are about tools that are not here."""
    chat_template_kwargs: dict[str, Any] | None = None
    # What follows is given back with the response and changes nothing else.
    metadata: dict[str, str] | None = Field(default=None, max_length=MAX_METADATA)
    user: str | None = Field(default=None, max_length=4096)
    safety_identifier: str | None = Field(default=None, max_length=4096)
    prompt_cache_key: str | None = Field(default=None, max_length=4096)

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())
