"""The form of a whole output in messages, as gpt-oss writes them: thoughts, then an answer of a form, or a call.

The other formats have the form stand alone, and what the model thinks before it free up to a marker. Here messages have
headers, so that the whole output is one grammar.
"""

import json
from typing import Any

from llguidance import LLMatcher

from headlong.params import Grammar
from headlong.text.grammar_source import JSON_BLANKS, refusal
from headlong.text.tools.harmony import (
    ANALYSIS,
    CHANNEL,
    CONSTRAIN,
    END,
    FINAL,
    MESSAGE,
    NEXT,
    START,
    thought_rules,
)
from headlong.text.tools.rules import Rules, literal


def message_grammar(form: Grammar | None, calls: Grammar | None, lead: str) -> Grammar:
    """The grammar of an output whose beginning is told by the end of `lead`."""
    in_answer = not lead.rstrip().endswith((f"{START}assistant", ANALYSIS, FINAL))
    if in_answer and form is not None:
        return form
    first = f"thinking {literal(NEXT.removeprefix(END))} " if lead.endswith(ANALYSIS) else ""
    kinds = [name for name, part in (("answer", form), ("call", calls)) if part is not None]
    rules: Rules = {"start": f"{first}thoughts ({' | '.join(kinds)})"}
    if form is not None:
        rules["answer"] = (
            f"{literal(f'{CHANNEL}final')} ({literal(f' {CONSTRAIN}')} /[a-z]{{1,16}}/)? {literal(MESSAGE)} form"
        )
        rules["form"] = _form(form)
    if calls is None:
        rules |= thought_rules()
    source = "".join(f"{name}: {body}\n" for name, body in rules.items())
    own = "" if calls is None else calls.source.partition("\n")[2]  # all but its `start`
    return Grammar("lark", f"{source}{own}")


def _form(form: Grammar) -> str:
    match form.kind:
        case "json_object":
            return _json({"type": "object"})
        case "json_schema":
            return _json(_parsed(form, dict))
        case "choice":
            return " | ".join(literal(choice) for choice in _parsed(form, list) if isinstance(choice, str))
        case "regex":
            inner = json.loads(LLMatcher.grammar_from_regex(form.source))
            return inner["grammars"][0]["lark_grammar"].partition(":")[2].strip()
        case _:
            why = "an output of this model is a list of messages, and it cannot be a part of one"
            raise refusal(form, why, "send a json_schema, a regex or choices")


def _json(schema: dict[str, Any]) -> str:
    options = schema.get("x-guidance", {"whitespace_pattern": JSON_BLANKS})
    return "%json " + json.dumps({**schema, "x-guidance": options})


def _parsed(form: Grammar, kind: type[Any]) -> Any:
    try:
        found = json.loads(form.source)
    except (ValueError, RecursionError) as error:
        raise refusal(form, f"it is not valid JSON ({error})", "send it as JSON text") from error
    if not isinstance(found, kind) or not found:
        raise refusal(form, f"it is not a JSON {'object' if kind is dict else 'list of strings'}")
    return found
