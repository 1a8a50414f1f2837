"""Chat templates of the families, the published ones or short ones with their markers, and what they write."""

from typing import Any

from output_samples import PROPERTIES, Output, gather, template_text, tool

from headlong.text.messages import prepare_messages
from headlong.text.output import ChatFormat, Reasoning
from headlong.text.template import ChatTemplate

TOOL_LIST = "{% if tools %}{{ tools | tojson }}{% endif %}"
GLM45 = """[gMASK]<sop>{% if tools %}
<|system|>{{ tools | tojson }}
<tool_call>{function-name}
<arg_key>{arg-key-1}</arg_key>
<arg_value>{arg-value-1}</arg_value>
</tool_call>{% endif %}
{%- for m in messages %}{% if m.role == 'assistant' -%}
<|assistant|>{{ '\\n<think>' + m.reasoning_content + '</think>' if m.reasoning_content else '\\n<think></think>' }}
{%- if m.content %}{{ '\\n' + m.content }}{% endif %}
{%- for tc in m.tool_calls or [] %}{{ '\\n<tool_call>' + tc.function.name + '\\n' }}
{%- for k, v in tc.function.arguments.items() %}{{ '<arg_key>' + k + '</arg_key>\\n<arg_value>' }}
{{- v if v is string else v | tojson }}{{ '</arg_value>\\n' }}{% endfor %}{{ '</tool_call>' }}{% endfor %}
{%- else %}{{ '<|' + m.role + '|>\\n' + m.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
DEEPSEEK_V3 = """{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}
{%- for m in messages %}{% if m.role == 'user' %}{{ '<｜User｜>' + m.content + '<｜Assistant｜>' }}
{%- elif m.role == 'assistant' %}{{ m.content }}{% if m.tool_calls %}{{ '<｜tool▁calls▁begin｜>' }}
{%- for call in m.tool_calls %}{{ '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call['function']['name'] }}
{{- '\\n```json\\n' + call['function']['arguments'] + '\\n```<｜tool▁call▁end｜>' }}
{%- if not loop.last %}{{ '\\n' }}{% endif %}{% endfor %}{{ '<｜tool▁calls▁end｜>' }}{% endif %}
{{- '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}"""
DEEPSEEK_V31 = """{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}
{%- for m in messages %}{% if m.role == 'user' %}{{ '<｜User｜>' + m.content + '<｜Assistant｜></think>' }}
{%- elif m.role == 'assistant' %}{{ m.content }}{% if m.tool_calls %}{{ '<｜tool▁calls▁begin｜>' }}
{%- for call in m.tool_calls %}{{ '<｜tool▁call▁begin｜>' + call['function']['name'] + '<｜tool▁sep｜>' }}
{{- call['function']['arguments'] + '<｜tool▁call▁end｜>' }}{% endfor %}{{ '<｜tool▁calls▁end｜>' }}{% endif %}
{{- '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}"""
DEEPSEEK_V32 = template_text("DeepSeek-V4").replace("tool_calls>", "function_calls>")
KIMI = """{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}
{%- for m in messages %}{% if m.role == 'assistant' %}<|im_assistant|>assistant<|im_middle|>
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
{%- if m.tool_calls %}{{ '<|tool_calls_section_begin|>' }}{% for call in m.tool_calls %}
{{- '<|tool_call_begin|>' + call['id'] + '<|tool_call_argument_begin|>' }}{{ call.function.arguments | tojson }}
{{- '<|tool_call_end|>' }}{% endfor %}{{ '<|tool_calls_section_end|>' }}{% endif %}
{%- else %}<|im_user|>{{ m.role }}<|im_middle|>
{%- if m.role == 'tool' %}## Return of {{ m.tool_call_id }}{{ '\\n' }}{% endif %}{{ m.content }}{% endif %}<|im_end|>
{%- endfor %}{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"""
MISTRAL = """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}
{%- if tools %}{{ '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST]' + m.content + '[/INST]' }}{% elif m.tool_calls %}{{ m.content + '[TOOL_CALLS] [' }}
{%- for call in m.tool_calls %}{% if call.id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}
{{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- ', "id": "' + call.id + '"}' }}{{ '' if loop.last else ', ' }}{% endfor %}{{ ']' + eos_token }}
{%- elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('nine') }}{% endif %}
{{- '[TOOL_RESULTS]' + m.tool_call_id + m.content + '[/TOOL_RESULTS]' }}
{%- else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"""
MISTRAL_ARGS = """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}
{%- if tools %}{{ '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST]' + m.content + '[/INST]' }}{% elif m.role == 'assistant' %}
{%- if m.reasoning_content %}{{ '[THINK]' + m.reasoning_content + '[/THINK]' }}{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}{{ '[TOOL_CALLS]' + call.function.name + '[ARGS]' }}
{{- call.function.arguments | tojson }}{% endfor %}{{ eos_token }}{% endif %}{% endfor %}"""
HARMONY = """<|start|>system<|message|># Valid channels: analysis, commentary, final.<|end|>
{%- if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}
{%- for m in messages %}{% if m.role == 'assistant' %}{% if m.tool_calls %}
{%- if m.content and m.thinking %}{{ raise_exception('content and thinking') }}{% endif %}
{%- if m.content or m.thinking %}{{ '<|start|>assistant<|channel|>analysis<|message|>' }}
{{- (m.content or m.thinking) + '<|end|>' }}{% endif %}{% set call = m.tool_calls[0].function %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- (call.arguments | tojson) + '<|call|>' }}{% else %}
{%- if m.thinking %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}{% endif %}
{%- elif m.role == 'tool' %}{{ '<|start|>functions.x to=assistant<|channel|>commentary<|message|>' + m.content }}
{{- '<|end|>' }}{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
LLAMA = """{{ bos_token }}{% if tools %}{{ tools | tojson }}
Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.{% endif %}
{%- for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}
{%- if m.tool_calls %}{% set call = m.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' }}{{ call.arguments | tojson }}{{ '}' }}
{%- else %}{{ m.content }}{% endif %}{{ '<|eot_id|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

SOURCES = {
    "qwen3_coder": template_text("Qwen3-Coder"),
    "glm45": GLM45,
    "glm47": template_text("GLM-4.7-Flash"),
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "deepseek_v32": DEEPSEEK_V32,
    "deepseek_v4": template_text("DeepSeek-V4"),
    "kimi_k2": KIMI,
    "mistral": MISTRAL,
    "mistral_args": MISTRAL_ARGS,
    "harmony": HARMONY,
    "llama3_json": LLAMA,
}
SINGLE = ("harmony", "llama3_json")
"""The formats whose templates write one call to a message."""
ENDS = ("\n", "<|im_end|>", "<｜end▁of▁sentence｜>", "<|eot_id|>", "</s>", "<|call|>", "<|return|>")
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
FORMATS = {name: ChatFormat.detect(source) for name, source in SOURCES.items()}
COMPILED = {name: ChatTemplate(source, SPECIAL) for name, source in SOURCES.items()}


def rendered(name: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    return COMPILED[name].render(FORMATS[name].prepare(prepare_messages(messages)), **variables)


def assistant(content: str, made: list[tuple[str, dict[str, Any]]], **extra: str) -> dict[str, Any]:
    written = [
        {"id": f"call_{number:024x}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate(made)
    ]
    return {"role": "assistant", "content": content, "tool_calls": written, **extra}


def generated(name: str, message: dict[str, Any], tools: Any, **variables: Any) -> tuple[str, str]:
    """(prompt, output) such that the template writes the message as that output to that prompt."""
    chat = [{"role": "user", "content": "go"}]
    whole = rendered(name, [*chat, message], tools=tools, add_generation_prompt=False, **variables)
    prompt = rendered(name, chat, tools=tools, **variables)
    shared = prompt if whole.startswith(prompt) else prompt.removesuffix("<think>").removesuffix("</think>")
    assert whole.startswith(shared)
    text = whole[len(shared) :]
    for end in (*ENDS, *ENDS):
        text = text.removesuffix(end)
    return shared, text


TOOLS = [tool(name, {"type": "object", "properties": PROPERTIES}) for name in ("f", "g", "look_up-1")]
ASK = "<|start|>user<|message|>?<|end|><|start|>assistant"
"""The end of a prompt of gpt-oss."""


def read_freely(format: ChatFormat, pieces: Any, prompt: str = "", tools: Any = TOOLS) -> Output:
    """The output, whose reasoning may come after other things."""
    parser = format.parser(prompt, tools)
    events = [event for piece in pieces for event in parser.push(piece)] + parser.finish()
    thoughts = [event for event in events if isinstance(event, Reasoning)]
    said = gather([event for event in events if not isinstance(event, Reasoning)])
    said.reasoning = "".join(thought.text for thought in thoughts)
    return said
