"""The names of the formats of reasoning and of tool calls, for settings. Knows nothing else of them.

The names are vLLM's where it has one for the same form.
"""

TOOL_FORMATS = (
    *("hermes", "qwen3_coder", "glm45", "glm47"),
    *("deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4"),
    *("kimi_k2", "mistral", "mistral_args", "harmony", "llama3_json"),
)
REASONING_FORMATS = ("think", "mistral", "harmony")
