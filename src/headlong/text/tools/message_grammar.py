"""The form of a whole output in messages, as gpt-oss writes them: thoughts, then an answer of a form, or a call.

The other formats have the form stand alone, and what the model thinks before it free up to a marker. Here messages have
headers, so that the whole output is one grammar.
"""

import json

from headlong.params import Grammar
from headlong.text.grammar_source import refusal, translate
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
    if calls is None:
        rules |= thought_rules()
    source = "".join(f"{name}: {body}\n" for name, body in rules.items())
    source += "" if form is None else _form(form)
    own = "" if calls is None else calls.source.partition("\n")[2]  # all but its `start`
    return Grammar("lark", f"{source}{own}")


def _form(form: Grammar) -> str:
    """The rule `form`, and those it needs, made of what the library would be given for the form alone."""
    if form.kind in ("lark", "gbnf"):
        why = "an output of this model is a list of messages, and it cannot be a part of one"
        raise refusal(form, why, "send a json_schema, a regex or choices")
    source = translate(form)
    if form.kind in ("json_schema", "json_object"):
        schema = json.loads(source)["grammars"][1]["json_schema"]
        return f"form: %json {json.dumps(schema)}\n"
    return f"form{source.removeprefix('start').rpartition('%llguidance')[0]}"
