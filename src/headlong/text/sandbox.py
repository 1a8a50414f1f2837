"""Jinja's immutable sandbox, with every operation that a hostile template could abuse made to ask `bounds` first.

Filters, tests and calls are intercepted where Jinja lets one; what Jinja writes as plain Python (`~`,
comparisons, slices, displays, loops) is rewritten in the syntax tree to go through a hook. Knows no chat
messages: it runs any template the way `transformers` does, only not for as long.
"""

import json
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, markup_join, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer

from headlong.errors import RequestError
from headlong.text.bounds import (
    BUDGET,
    DROPPED_FILTERS,
    FILTERS,
    MAX_WIDTH,
    check_method,
    check_percent,
    check_power,
    check_product,
    check_sum,
    check_walk,
    listed,
    written_len,
)

MAX_NODES = 10_000
"""The most nodes of a template's syntax tree. The largest templates in use have a few thousand; many more take long to
compile."""
_COMPARING_TESTS = ("==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", ">=", "ge")
_COMPARING_TESTS += ("<", "lt", "lessthan", "<=", "le", "in")


class Refusal(jinja2.TemplateError):
    """What `raise_exception` raises: the template itself refuses the messages."""


class Sandbox(ImmutableSandboxedEnvironment):
    """An environment for one template or many. Rendering needs a `Budget` in the context variable."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, loopcontrols],
            finalize=_writable,
        )
        self.filters["tojson"] = _tojson
        self.filters["sum"] = _sum
        for name in DROPPED_FILTERS:
            del self.filters[name]
        self.filters = {name: _bounded_filter(name, filter) for name, filter in self.filters.items()}
        self.tests |= {name: _bounded_test(self.tests[name]) for name in _COMPARING_TESTS}
        self.globals.pop("lipsum")
        self.globals["namespace"] = _QuietNamespace
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(getattr(obj, "__wrapped__", obj), "__self__", None)
        if owner is self:  # a hook: templates cannot name them
            return obj(*args)
        budget = BUDGET.get()
        budget.step()
        if isinstance(obj, Macro | LoopContext):
            return super().call(context, obj, *args, **kwargs)
        args = check_method(owner, getattr(obj, "__name__", ""), args, kwargs)
        return budget.keep(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = BUDGET.get()
        budget.step()
        if operator == "**":
            check_power(left, right)
        elif operator == "*":
            check_product(left, right)
        elif operator == "+":
            check_sum(left, right)
        elif operator == "%" and isinstance(left, str | bytes):
            check_percent(left, right)
        return budget.keep(super().call_binop(context, operator, left, right), item_bytes=8)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, tuple):
            check_walk(argument)  # it will be hashed
        return super().getitem(obj, argument)

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """The text of a macro, a block or a `set` block."""
        parts: list[str] = []
        length = 0
        for piece in pieces:
            length += len(piece)
            check_product("x", length)
            parts.append(piece)
        return BUDGET.get().keep("".join(parts))

    def step(self) -> None:
        """Hook for a turn of a loop or a call of a macro."""
        BUDGET.get().step()

    def joined(self, context: Context, *values: Any) -> str:
        """Hook for `a ~ b`."""
        budget = BUDGET.get()
        budget.step()
        check_product("x", sum(map(written_len, values)))
        join = markup_join if context.eval_ctx.autoescape else str_join
        return budget.keep(join(values))

    def comparable(self, value: Any) -> Any:
        """Hook for a side of a comparison, or for the key of a dict display."""
        BUDGET.get().step()
        check_walk(value)
        return value

    def sliced(self, value: Any) -> Any:
        """Hook for the value that `value[a:b]` is about to copy a part of."""
        budget = BUDGET.get()
        budget.step()
        return budget.keep(value, item_bytes=8)

    def built(self, value: Any) -> Any:
        """Hook for a list, tuple or dict that is written in the template."""
        budget = BUDGET.get()
        budget.step()
        return budget.keep(value)

    def spread(self, values: Any) -> list[Any]:
        """Hook for the `x` of `f(*x)`."""
        return listed(values)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        if sum(1 for _ in tree.find_all(nodes.Node)) > MAX_NODES:
            raise RequestError(f"chat_template: has over {MAX_NODES} parts; shorten it")
        return _Guard().visit(tree).set_environment(self)


def _hook(name: str, *args: nodes.Expr) -> nodes.Call:
    call = nodes.Call(nodes.EnvironmentAttribute(name), list(args), [], None, None)
    call.set_lineno(args[-1].lineno if args else 0)
    return call


class _Guard(NodeTransformer):
    """Puts the hooks into a syntax tree. Nested ranges, or macros that call themselves twice, print nothing
    and still never end, so loops and macros count their turns."""

    def _count(self, node: Any) -> Any:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_hook("step")).set_lineno(node.lineno))
        return node

    visit_For = visit_Macro = visit_CallBlock = _count

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        return _hook("joined", nodes.ContextReference(), *node.nodes)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Expr:
        self.generic_visit(node)
        node.expr = _comparable(node.expr)
        for operand in node.ops:
            operand.expr = _comparable(operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _hook("sliced", node.node)
        return node

    def visit_List(self, node: nodes.List) -> nodes.Expr:
        self.generic_visit(node)
        return _hook("built", node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        self.generic_visit(node)
        return _hook("built", node) if node.ctx == "load" else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Expr:
        self.generic_visit(node)
        for pair in node.items:
            pair.key = _comparable(pair.key)
        return _hook("built", node)

    def _limit_spread(self, node: Any) -> Any:
        self.generic_visit(node)
        if node.dyn_args is not None:
            node.dyn_args = _hook("spread", node.dyn_args)
        return node

    visit_Call = visit_Filter = visit_Test = _limit_spread


def _comparable(node: nodes.Expr) -> nodes.Expr:
    return node if isinstance(node, nodes.Const) else _hook("comparable", node)


def _bounded_filter(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    check = FILTERS.get(name)
    wanted = getattr(getattr(original, "jinja_pass_arg", None), "name", None)

    @pass_context  # which also keeps the compiler from working it out beforehand
    def bounded(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = BUDGET.get()
        budget.step()
        if check is not None:
            value = check(value, *args, **kwargs)
        given = {
            None: (),
            "context": (context,),
            "eval_context": (context.eval_ctx,),
            "environment": (context.environment,),
        }[wanted]
        result = original(*given, value, *args, **kwargs)
        return result if result is value else budget.keep(result)

    return bounded


def _bounded_test(original: Callable[..., Any]) -> Callable[..., Any]:
    @pass_context
    def bounded(_: Context, value: Any, *args: Any) -> Any:
        BUDGET.get().step()
        check_walk(value, *args)
        return original(value, *args)

    return bounded


@pass_context
def _writable(_: Context, value: Any) -> Any:
    """Every `{{ value }}` that is about to be written out."""
    check_walk(value)
    return value


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The `tojson` filter, which writes plain JSON. Jinja's own escapes `<`, `>`, `&` and `'` for HTML, which no model
    was shown."""
    written_len(value)
    options: dict[str, Any] = {
        "ensure_ascii": ensure_ascii,
        "indent": indent,
        "separators": separators,
        "sort_keys": sort_keys,
    }
    if indent is None and written_len(separators or "") < 64:
        return json.dumps(value, **options)
    if isinstance(indent, int) and indent > MAX_WIDTH:
        raise OverflowError("an indent is too wide")
    return Sandbox.concat(json.JSONEncoder(**options).iterencode(value))


@pass_context
def _sum(context: Context, iterable: Any, attribute: str | int | None = None, start: Any = 0) -> Any:
    environment: Any = context.environment
    if attribute is not None:
        iterable = environment.call_filter("map", iterable, kwargs={"attribute": attribute}, context=context)
    for item in iterable:
        start = environment.call_binop(context, "+", start, item)
    return start


class _QuietNamespace(Namespace):
    """A namespace that prints no members, since they may contain each other."""

    def __repr__(self) -> str:
        return "<Namespace>"


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; here it is only a scope."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it as an instance attribute)

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


def _raise_exception(message: Any) -> NoReturn:
    raise Refusal(str(message))


def _strftime_now(format: str) -> str:
    if len(format) > 256:
        raise OverflowError("a date format is too long")
    return datetime.now().strftime(format)
