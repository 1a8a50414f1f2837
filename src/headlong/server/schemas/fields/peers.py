"""Fields of other servers' completions that several dialects here share: vLLM, llama.cpp, TabbyAPI, SGLang, LM Studio,
Ollama, OpenRouter and LiteLLM. Rules only; who honours a name overrules them."""

from typing import Any

from headlong.server.schemas.rules import Renamed, Rule, renamed, unsupported, without_effect

ONE, OFF, ALL = (1, 1.0), (0, 0.0, False, "", [], {}), (-1,)
ORDER = ("penalties", "temperature", "top_k", "top_p", "min_p")
"""The order of the samplers here, in llama.cpp's words."""
OTHERS_SAMPLERS = frozenset({"dry", "top_n_sigma", "typ_p", "typical_p", "xtc", "infill"})
"""Samplers that are off unless a field of their own turns them on."""


def is_our_order(samplers: Any) -> bool:
    return (
        isinstance(samplers, list) and tuple(one for one in samplers if one not in OTHERS_SAMPLERS) == ORDER
    )


FORM = "use response_format or structured_outputs for the form of the output"
LIMIT = "use max_tokens"
LOGPROBS = "use logprobs for the tokens of the answer"
THINKING = "use reasoning_effort, or chat_template_kwargs for what the template knows"


def _form(form: str, *names: str) -> dict[str, Rule]:
    """Rows for fields of their own that ask for a form of the output; an empty one asks for none."""

    def fields(value: Any) -> dict[str, Any]:
        return {} if value in ("", [], False) else {"structured_outputs": {form: value}}

    return dict.fromkeys(names, Renamed(f"the same as structured_outputs.{form}", fields))


ADVICE: dict[str, Rule] = {
    **without_effect("a name for the client's own books", "user", "metadata", "safety_identifier"),
    **without_effect(
        "a name for the client's own books",
        *("request_id", "rid", "trace", "trace_id", "session_id", "tags", "generation_name"),
    ),
    **without_effect("every request is served alike; priority says who goes first", "service_tier"),
    **without_effect(
        "prefixes are cached by their tokens, for everybody, and a hit changes no token",
        *(
            "prompt_cache_key",
            "prompt_cache_retention",
            "prompt_cache_options",
            "cache_control",
            "cache_salt",
        ),
        *("extra_key", "cache_prompt", "id_slot", "slot_id", "n_keep", "n_discard", "n_cache_reuse"),
    ),
    **without_effect(
        "which machine computes it is the server's affair", "data_parallel_rank", "inference_geo"
    ),
    **without_effect("drafting changes no token; see speculative", "draft_model", "speculative_ngram"),
    **without_effect("a model stays loaded until another takes its place", "keep_alive", "ttl"),
    **without_effect("the length of the context is the server's", "num_ctx", "n_ctx"),
    **without_effect("the device and its threads are the server's", "num_thread", "num_gpu", "num_batch"),
    **without_effect("figures come with the end of every answer", "timings_per_token", "return_progress"),
    **without_effect("figures come with every answer", "return_cached_tokens_details", "usage"),
    **without_effect("other servers' bookkeeping", "provider_specific_fields", "provider", "route", "models"),
    **without_effect("there is one way to compute grammars here", "guided_decoding_backend"),
    **without_effect(
        "shapes something that is off",
        *("xtc_threshold", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_range"),
        *("dry_sequence_breakers", "mirostat_tau", "mirostat_eta", "smoothing_curve", "dynatemp_exponent"),
        *("min_temp", "max_temp", "temp_exponent", "adaptive_decay", "grammar_lazy", "grammar_triggers"),
    ),
}
"""What cannot change the text here, whoever sends it."""

SAMPLING: dict[str, Rule] = {
    **unsupported(
        "there is no such sampler; use temperature, top_p, top_k or min_p",
        *("typical_p", "typical", "tfs", "tfs_z", "cfg_scale"),
        harmless=ONE,
    ),
    **unsupported(
        "there is no such sampler; use temperature, top_p, top_k or min_p",
        *("top_a", "xtc_probability", "dry_multiplier", "mirostat", "mirostat_mode", "smoothing_factor"),
        *("dynatemp_range", "skew", "negative_prompt", "token_healing", "repetition_detection"),
        harmless=OFF,
    ),
    **unsupported(
        "there is no such sampler; use temperature, top_p, top_k or min_p",
        *("top_n_sigma", "nsigma", "adaptive_target"),
        harmless=(0, 0.0, -1, -1.0),
    ),
    **unsupported("use repetition_penalty, which counts the whole text", "repeat_penalty", harmless=ONE),
    **unsupported(
        "repetition_penalty counts the whole text; leave it out",
        *("repeat_last_n", "penalty_range", "repetition_range", "repetition_decay"),
        harmless=(-1, 0),
    ),
    **unsupported(
        "there is no beam search; use n for several answers",
        "use_beam_search",
        "beam_width",
        "early_stopping",
    ),
    **unsupported("there is no beam search; leave it out", "length_penalty", harmless=ONE),
    **unsupported("every answer is returned; use n", "best_of", harmless=ONE),
    **unsupported("filters keep at least one token; leave it out", "min_keep", harmless=(0, 1)),
    **unsupported(
        f"the order of the samplers is fixed: {', '.join(ORDER)}; send that or leave it out",
        "samplers",
        harmless=(is_our_order, []),
    ),
    **unsupported(
        "the order of the samplers is fixed; leave it out",
        *("sampler_seq", "sampler_priority", "sampler_order", "temperature_last"),
    ),
    **unsupported(LIMIT, "n_predict", "num_predict", "max_new_tokens", "max_length", harmless=ALL),
    **unsupported("use min_tokens", "min_new_tokens", "min_length", harmless=(0,)),
    **unsupported(FORM, "grammar", "json_schema", "regex", "ebnf", "regex_pattern", "grammar_string"),
    **unsupported(FORM, "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag"),
    **unsupported("schemas have a white space of their own; leave it out", "guided_whitespace_pattern"),
    **unsupported(
        "use the server's request_timeout; leave it out",
        *("t_max_predict_ms", "t_max_prompt_ms"),
        harmless=(0, -1),
    ),
    **unsupported(LOGPROBS, "n_probs", "logprob_token_ids", harmless=OFF),
    **unsupported("use /v1/chat/completions, which has it", "prompt_logprobs"),
    **unsupported("log-probabilities are the model's own; leave it out", "post_sampling_probs"),
    **unsupported(
        "answers have text; /v1/token/encode has a text's tokens",
        *("return_tokens", "return_token_ids", "return_tokens_as_token_ids", "return_hidden_states"),
        *("return_routed_experts", "response_fields"),
    ),
    **unsupported(
        "no adapter is loaded; load a model that has it merged",
        "lora",
        "lora_path",
        "lora_name",
        "adapter_id",
    ),
    **unsupported(
        "no code of others runs here; use logit_bias, bad_token_ids or a grammar",
        *("logits_processors", "custom_logit_processor", "custom_params", "vllm_xargs"),
    ),
    **unsupported("use a regex or a grammar as response_format", "allowed_token_ids"),
    **unsupported("use /v1/chat/completions, which has it", "bad_words", "banned_strings", "banned_tokens"),
    **unsupported("use ignore_eos", "ban_eos_token"),
    **unsupported("the tokenizer decides; leave it out", "add_bos_token", harmless=(True,)),
    **unsupported(
        "special tokens are left out of answers; send true or leave it out",
        *("skip_special_tokens", "spaces_between_special_tokens"),
        harmless=(True,),
    ),
    **unsupported("stop strings are left out of answers", "include_stop_str_in_output", "no_stop_trim"),
    **unsupported("use stop", "stop_regex"),
    **unsupported("nothing is cut off silently; send what fits the context", "truncate_prompt_tokens"),
    **unsupported(
        "a prompt is text or tokens; use /v1/completions for tokens",
        *("input_ids", "input_embeds", "prompt_embeds"),
    ),
    **unsupported(
        "one server computes an answer; leave it out",
        *("kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room", "session_params"),
    ),
    **unsupported("the client's messages are not changed; leave it out", "transforms", "plugins"),
}
"""What would change the text of an answer, and is not to be had."""

NAMES: dict[str, Rule] = {
    **renamed("repetition_penalty", "repeat_penalty", "rep_pen"),
    **renamed("min_tokens", "min_new_tokens", "min_length"),
    **renamed("bad_token_ids", "banned_tokens"),
    **renamed("banned_strings", "bad_words"),
    **_form("json", "guided_json", "json_schema"),
    **_form("regex", "guided_regex", "regex", "regex_pattern"),
    **_form("choice", "guided_choice"),
    **_form("grammar", "guided_grammar", "grammar"),
}
"""Other servers' names of what OpenAI's chat and completions honour here."""

CHAT: dict[str, Rule] = {
    **unsupported("a chat's echo would be its template; use /v1/completions", "echo"),
    **unsupported("only /v1/chat/completions has it; use that", "continue_final_message", harmless=(False,)),
    **unsupported("only /v1/chat/completions has it; use that", "add_generation_prompt", harmless=(True,)),
    **unsupported("the template writes the special tokens", "add_special_tokens"),
    **unsupported("put them into messages or chat_template_kwargs", "documents"),
    **unsupported(
        "the checkpoint's own template serves; put another into its folder",
        *("chat_template", "chat_template_content_format", "chat_format"),
    ),
    **unsupported("this server reads text alone", "mm_processor_kwargs", "image", "images"),
    **unsupported(
        "reasoning is always told apart from the answer",
        *("include_reasoning", "separate_reasoning", "stream_reasoning", "parse_tool_calls"),
        harmless=(True,),
    ),
    **unsupported("the server's reasoning_format decides", "reasoning_format", harmless=("auto", "deepseek")),
    **unsupported(THINKING, "enable_thinking", "thinking_budget", harmless=()),
    **unsupported(
        THINKING,
        *("thinking_token_budget", "reasoning_budget", "thinking_budget_tokens", "thinking_forced_open"),
        harmless=(-1, False),
    ),
}
"""What concerns templates and reasoning, in every dialect of chat."""
