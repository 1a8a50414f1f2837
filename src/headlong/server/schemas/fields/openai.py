"""Rules for the fields of OpenAI's endpoints that schemas here do not honour, object by object."""

from typing import Any

from headlong.server.schemas.fields.peers import ADVICE, CHAT, NAMES, SAMPLING, THINKING
from headlong.server.schemas.rules import Renamed, Rule, renamed, unsupported, without_effect

NO_SOUND = "this server writes text alone; leave it out"
NO_SEARCH = "this server searches nothing; offer a function of your own that does"
STORED = "nothing is stored; the answer is the same"
NO_CONVERSATIONS = (
    "only single responses are stored; use previous_response_id, or send the conversation in input"
)
CACHE = "prefixes are cached by their tokens, and a hit changes no token"
BOOKS = "bookkeeping that no template reads"
MODERATION = "nothing is moderated here; ask a moderation service yourself"

LIMITS = ("n_predict", "num_predict", "max_new_tokens")


def _all_that_fits(limit: Any) -> dict[str, Any]:
    return {"max_tokens": 2**31 if limit in (-1, -2) else limit}


COMMON: dict[str, Rule] = {
    **ADVICE,
    **without_effect(STORED, "store"),
    **unsupported(MODERATION, "moderation"),
}

STREAM_OPTIONS: dict[str, Rule] = {
    **without_effect("events are not padded", "include_obfuscation"),
    **without_effect("usage comes with the last chunk", "continuous_usage_stats", "chunk_include_usage"),
}

CHAT_COMPLETION: dict[str, Rule] = {
    **SAMPLING,
    **COMMON,
    **CHAT,
    **NAMES,
    **renamed("max_tokens", *LIMITS, nothing=(-1, -2)),
    "n_probs": Renamed(
        "the same as logprobs and top_logprobs",
        lambda count: {"logprobs": True, "top_logprobs": count} if count else {},
    ),
    **without_effect("a guess at the answer changes no token of it", "prediction"),
    **unsupported(NO_SOUND, "audio"),
    **unsupported(NO_SOUND, "modalities", harmless=(["text"], [])),
    **unsupported(NO_SEARCH, "web_search_options", "search_parameters", "web_search"),
    **unsupported("use tools", "functions"),
    **unsupported("use tool_choice", "function_call", harmless=("none", "auto", "", {})),
    **unsupported("use max_completion_tokens", "max_output_tokens"),
    **unsupported("use stop", "stop_sequences"),
    **unsupported("use messages", "input", "prompt"),
    **unsupported("use a message of role system", "system", "instructions"),
    **unsupported(THINKING, "thinking", "reasoning"),
    **unsupported("use response_format", "text", "output_config", "format"),
    **unsupported("send the whole conversation in messages", "previous_response_id", "conversation"),
}

MESSAGE: dict[str, Rule] = {
    **without_effect(
        BOOKS,
        *(
            "id",
            "object",
            "created",
            "created_at",
            "timestamp",
            "model",
            "thread",
            "metadata",
            "status",
            "phase",
        ),
        *("index", "usage", "finish_reason", "stop_reason", "response_metadata", "additional_kwargs", "type"),
        *("provider_specific_fields", "extra_content", "parsed", "logprobs", "annotations", "citations"),
    ),
    **without_effect(CACHE, "cache_control", "prompt_cache_breakpoint"),
    **without_effect(
        "its words are in reasoning_content", "thinking_blocks", "reasoning_details", "reasoning_items"
    ),
    **unsupported("use tool_calls", "function_call"),
    **unsupported("this server reads and writes text alone", "audio", "images"),
}
PART: dict[str, Rule] = {
    **without_effect(CACHE, "cache_control", "prompt_cache_breakpoint"),
    **without_effect(BOOKS, "id", "index", "annotations", "citations", "logprobs", "extras"),
    **without_effect(BOOKS, "provider_specific_fields", "metadata"),
}
TOOL_CALL: dict[str, Rule] = {
    **without_effect(BOOKS, "provider_specific_fields", "extra_content", "caller", "status", "metadata"),
    **without_effect(CACHE, "cache_control"),
    **unsupported("use a function with one text as its argument", "custom"),
}
CALLED_FUNCTION: dict[str, Rule] = without_effect(
    BOOKS, "parsed_arguments", "provider_specific_fields", "output"
)
TOOL: dict[str, Rule] = {
    **without_effect(CACHE, "cache_control"),
    **without_effect("strict belongs to the function; every schema is kept", "strict"),
    **without_effect(BOOKS, "provider_specific_fields", "extras"),
    **unsupported("use a function with one text as its argument", "custom"),
}
FUNCTION: dict[str, Rule] = {
    **without_effect(CACHE, "cache_control"),
    **without_effect(
        "the model sees the results themselves", "returns", "return", "response", "output_schema"
    ),
    **without_effect("every tool is shown to the model at once", "defer_loading"),
}
RESPONSE_FORMAT: dict[str, Rule] = {
    **unsupported("use type json_schema, with the schema in json_schema.schema", "schema"),
    **without_effect("every schema is kept", "strict"),
}

COMPLETION: dict[str, Rule] = {
    **SAMPLING,
    **COMMON,
    **NAMES,
    **dict.fromkeys(LIMITS, Renamed("the same as max_tokens; -1 is all that fits", _all_that_fits)),
    **renamed("logprobs", "n_probs", nothing=(0,)),
    **unsupported("use max_tokens", "max_completion_tokens", "max_output_tokens"),
    **unsupported("use stop", "stop_sequences"),
    **unsupported("use /v1/chat/completions", "messages", "tools", "tool_choice", "chat_template_kwargs"),
    **unsupported("text comes with its tokens' names", "return_text_offset"),
}

RESPONSE: dict[str, Rule] = {
    **SAMPLING,
    **COMMON,
    **CHAT,
    **unsupported(NO_CONVERSATIONS, "conversation"),
    **unsupported("no prompts are stored; send its text in instructions and input", "prompt"),
    **unsupported("responses are made while the client waits; stream", "background", harmless=(False,)),
    **unsupported("nothing is left out of the input; shorten it yourself", "context_management"),
    **without_effect("a text that is too long is refused, never cut", "truncation"),
    **without_effect("it limits built-in tools, of which there are none", "max_tool_calls"),
    **without_effect("there are no images and no programmes here", "image", "access_programs"),
    **unsupported("use max_output_tokens", "max_tokens", "max_completion_tokens"),
    **unsupported("use input", "messages"),
    **unsupported("use text.format", "response_format"),
    **unsupported("use reasoning.effort", "reasoning_effort", "thinking"),
    **unsupported("use include with message.output_text.logprobs", "logprobs", harmless=(False,)),
}
RESPONSE_PART: dict[str, Rule] = PART
ITEM: dict[str, Rule] = {
    **without_effect(BOOKS, "phase", "metadata", "created_by", "caller", "provider_specific_fields", "async"),
    **without_effect("the call's id says whose it is", "name", "namespace"),
    **without_effect(BOOKS, "parsed_arguments", "agent"),
}
RESPONSE_TOOL: dict[str, Rule] = {
    **FUNCTION,
    **unsupported("models here call tools themselves", "allowed_callers", harmless=(["direct"], [])),
    **unsupported("calls are answered before the model goes on; leave it out", "async"),
}
REASONING: dict[str, Rule] = {
    **without_effect("reasoning is returned in full", "summary", "generate_summary"),
    **without_effect("what is sent back goes to the template, which decides", "context"),
    **unsupported("models have one mode here", "mode", harmless=("standard",)),
}
