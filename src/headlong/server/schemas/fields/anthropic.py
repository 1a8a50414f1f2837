"""Rules for the fields of Anthropic's messages that schemas here do not honour, object by object."""

from typing import Any

from headlong.server.schemas.fields.peers import ADVICE, CHAT, SAMPLING
from headlong.server.schemas.rules import Rule, unsupported, without_effect

BOOKS = "bookkeeping that no template reads"
CACHE = "prefixes are cached by their tokens, and a hit changes no token"
OPENAI = "use /v1/chat/completions, which has it"
NO_SERVER_TOOLS = "this server runs no tools; offer tools of your own"


def clears_nothing(context_management: Any) -> bool:
    """Whether edits leave the conversation as it is, as the one does that keeps all thinking."""
    edits = context_management.get("edits", []) if isinstance(context_management, dict) else None
    return isinstance(edits, list) and all(
        isinstance(edit, dict)
        and str(edit.get("type")).startswith("clear_thinking_")
        and edit.get("keep") == "all"
        for edit in edits
    )


COUNTED: dict[str, Rule] = {
    **without_effect(
        "counting writes nothing",
        *(
            "max_tokens",
            "stop_sequences",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "seed",
            "stream",
            "speculative",
        ),
    ),
    **ADVICE,
    **without_effect("asked for by header or body, it changes no prompt", "betas"),
    **without_effect(
        "accounts and billing are not this server's",
        *("billing_policy", "fallback_credit_token", "user_profile_id", "workspace_id", "diagnostics"),
    ),
    **without_effect("every request is served as fast as it can be", "speed"),
    **without_effect("the model asked for always answers", "fallbacks"),
    **unsupported(NO_SERVER_TOOLS, "mcp_servers", "container"),
    **unsupported("nothing is summarised here; send shorter messages", "compaction"),
    **unsupported(
        "nothing is cleared from a conversation; leave out what the model is not to read",
        "context_management",
        harmless=(clears_nothing,),
    ),
    **unsupported(
        "this server keeps no conversations; send all messages",
        "thread",
        details={"error_code": "thread_unsupported_request", "unsupported": ["thread"]},
    ),
}
"""Fields of a prompt that is counted, and of one that is answered."""

MESSAGES: dict[str, Rule] = {
    **SAMPLING,
    **CHAT,
    **unsupported("a message has one answer; ask several times", "n", harmless=(1,)),
    **unsupported("use max_tokens", "max_completion_tokens", "max_output_tokens"),
    **unsupported("use stop_sequences", "stop"),
    **unsupported("use output_config.format", "response_format", "output_format", "structured_outputs"),
    **unsupported("use thinking or output_config.effort", "reasoning_effort", "reasoning"),
    **unsupported("use tool_choice.disable_parallel_tool_use", "parallel_tool_calls", harmless=(True,)),
    **unsupported("use a tool with an input_schema", "functions", "function_call"),
    **unsupported(
        OPENAI,
        *("logprobs", "top_logprobs", "logit_bias", "presence_penalty", "frequency_penalty"),
        *("repetition_penalty", "stop_token_ids", "bad_token_ids", "min_tokens", "ignore_eos", "priority"),
        harmless=(0, 0.0, False, [], {}),
    ),
    **without_effect("usage comes with every stream", "stream_options"),
}

BLOCK: dict[str, Rule] = {
    **without_effect(BOOKS, "id", "citations", "index", "caller", "toolset_name", "extras", "parsed_output"),
    **without_effect(BOOKS, "provider_specific_fields", "title", "cache_edits", "cache_reference"),
    **without_effect(CACHE, "cache_control"),
}
MESSAGE: dict[str, Rule] = {
    **without_effect(
        BOOKS,
        *(
            "id",
            "type",
            "model",
            "stop_reason",
            "stop_sequence",
            "stop_details",
            "usage",
            "container",
            "thread",
        ),
        *("provider_specific_fields", "context_management", "diagnostics", "metadata", "timestamp"),
    ),
    **without_effect(CACHE, "cache_control"),
    **unsupported("a message stays where it is", "clear_at", harmless=("never",)),
    **unsupported("use output_config of the whole request", "output_config"),
}
TOOL: dict[str, Rule] = {
    **without_effect(CACHE, "cache_control"),
    **without_effect("arguments always stream as they come", "eager_input_streaming"),
    **without_effect("every tool is shown to the model at once", "defer_loading"),
    **without_effect("templates have no place for them; put them into the description", "input_examples"),
    **without_effect(BOOKS, "provider_specific_fields", "extras"),
    **unsupported("models here call tools themselves", "allowed_callers", harmless=(["direct"], [])),
}
THINKING: dict[str, Rule] = without_effect("whatever thinking is sent back is taken", "block_binding")
OUTPUT_CONFIG: dict[str, Rule] = without_effect("advice that no template reads", "task_budget")
