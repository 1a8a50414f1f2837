"""Rules for the fields of Ollama's API that schemas here do not honour, object by object."""

from headlong.server.schemas.fields.peers import ADVICE, SAMPLING
from headlong.server.schemas.rules import Rule, unsupported, without_effect

BOOKS = "bookkeeping that no template reads"
OTHERS = "belongs into options"
NEVER_CUT = "a text that is too long is refused, never cut or shifted"
LOADING = "how models are loaded is the server's affair"

COMMON: dict[str, Rule] = {
    **ADVICE,
    **without_effect(NEVER_CUT, "truncate", "shift"),
    **unsupported("the server shows no prompts; leave it out", "_debug_render_only", harmless=(False,)),
    **unsupported(
        OTHERS,
        *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "num_predict", "repeat_penalty"),
        *("repeat_last_n", "presence_penalty", "frequency_penalty"),
        harmless=(),
    ),
    **unsupported("use options.num_predict", "max_tokens", "n_predict", harmless=()),
    **unsupported("this server reads text alone", "images", "image"),
    **unsupported("use format", "response_format"),
}

CHAT: dict[str, Rule] = {
    **COMMON,
    **unsupported("the checkpoint's own template serves; leave it out", "template"),
    **unsupported("use a message of role system", "system"),
    **unsupported("use messages, or /api/generate", "prompt"),
    **unsupported("there is no choice to be made in Ollama's form; use /v1/chat/completions", "tool_choice"),
}

GENERATE: dict[str, Rule] = {
    **COMMON,
    **unsupported("the checkpoint's own template serves; use raw for a prompt of your own", "template"),
    **unsupported("the model writes on; it fills no gaps", "suffix"),
    **unsupported("this server makes no images", "width", "height", "steps", harmless=(0,)),
    **unsupported("use /api/chat", "messages", "tools"),
}

OPTIONS: dict[str, Rule] = {
    **SAMPLING,
    **ADVICE,
    **without_effect(
        LOADING,
        *("numa", "main_gpu", "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap", "use_mlock"),
        *("embedding_only", "num_gqa", "rope_frequency_base", "rope_frequency_scale", "draft_num_predict"),
    ),
    **without_effect("a text that is too long is refused; nothing of it needs to be kept", "num_keep"),
    **unsupported("a penalty falls on every token alike; leave it out", "penalize_newline", harmless=(True,)),
    **unsupported("use repeat_penalty", "repetition_penalty", harmless=(1, 1.0)),
    **unsupported("use num_predict", "max_tokens", "n_predict", harmless=()),
}

MESSAGE: dict[str, Rule] = {
    **without_effect(BOOKS, "id", "name", "model", "created_at", "done", "done_reason", "metadata"),
    **unsupported("this server reads text alone; describe the picture in words", "images"),
}
TOOL_CALL: dict[str, Rule] = without_effect(BOOKS, "type", "index")
CALLED_FUNCTION: dict[str, Rule] = without_effect(BOOKS, "index", "description")
TOOL: dict[str, Rule] = without_effect("tools are called by what their function says", "items")

SHOWN: dict[str, Rule] = without_effect(
    "what is shown does not depend on it", "verbose", "system", "template", "options"
)
PULLED: dict[str, Rule] = {
    **without_effect("Hugging Face is asked over HTTPS, with the server's own token", "insecure"),
    **unsupported("the server has a token of its own (HF_TOKEN); leave it out", "username", "password"),
}
