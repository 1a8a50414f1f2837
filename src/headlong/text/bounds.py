"""How much one rendering of a template may cost, and what each of its operations will cost before it is run.

A template is a program from a stranger. A few characters of it can ask for gigabytes (`"x"|center(10**9)`)
or for hours (comparing lists that share their parts), inside a single call that nothing can interrupt. So
sizes are worked out before the call is made. Knows values and the names of filters and methods; how they
are intercepted is `sandbox`'s affair.
"""

import re
import sys
import time
from collections.abc import Callable, ItemsView, Iterable, KeysView, Mapping, ValuesView
from contextvars import ContextVar
from itertools import islice
from string import Formatter
from typing import Any

from headlong.errors import RequestError

MAX_VALUE_CHARS = 8 << 20
"""The most characters that one value may have when it is written out."""
MAX_ITEMS = 250_000
"""The most items of one list, and of a value counted with everything inside it."""
MAX_MADE_BYTES = 96 << 20
"""The most bytes of all values that one rendering makes, those that it has thrown away included."""
MAX_NUMBER_BITS = 4096
MAX_WIDTH = 9999
"""The largest width in a format string. A number of five digits is refused wherever it stands in one."""
SLOW_CHARS = 16 << 10
"""The most characters for filters that are slow per character, or slower than linear."""
_MAX_SEARCH = 50_000_000  # character comparisons in a search whose time is a product of two lengths
_CONTAINERS = (list, tuple, Mapping, set, frozenset, KeysView, ValuesView, ItemsView)


class Budget:
    """What one rendering has used so far. Every intercepted operation counts as one step."""

    def __init__(self, max_steps: int, max_seconds: float):
        """`max_seconds` is processor time of the current thread."""
        self._max_steps = max_steps
        self._max_seconds = max_seconds
        self._steps = 0
        self._made = 0
        self._start = time.thread_time()
        self._look_at = time.monotonic() + max_seconds

    def step(self) -> None:
        self._steps += 1
        if self._steps > self._max_steps:
            raise RequestError(f"chat_template: more than {self._max_steps} steps; send fewer messages")
        if time.monotonic() > self._look_at:
            self._look_at_clock()

    def keep(self, value: Any, item_bytes: int = 64) -> Any:
        """Count a value that an operation has made, and return it."""
        if isinstance(value, str | bytes):
            _check_chars(len(value))
            self._made += sys.getsizeof(value)
        elif isinstance(value, list | tuple | dict):
            _check_items(len(value))
            self._made += item_bytes * (len(value) + 1)
        elif isinstance(value, int) and value.bit_length() > MAX_NUMBER_BITS:
            raise OverflowError("a number is too large")
        if self._made > MAX_MADE_BYTES:
            raise RequestError(
                "chat_template: makes too much text on the way; send fewer or shorter messages"
            )
        return value

    def _look_at_clock(self) -> None:
        spent = time.thread_time() - self._start
        if spent > self._max_seconds:
            raise RequestError(
                f"chat_template: takes over {self._max_seconds:.1f} s; send fewer or shorter messages"
            )
        self._look_at = time.monotonic() + self._max_seconds - spent


BUDGET: ContextVar[Budget] = ContextVar("budget")
"""The budget of the rendering that this thread is running. Some of Jinja's hooks get no argument to find it by."""


def written_len(value: Any) -> int:
    """About how long `str(value)` is. Parts that occur twice count twice, as whatever walks the value visits them
    twice."""
    if isinstance(value, str | bytes):
        return len(value)
    length = num_items = 0
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str | bytes):
            length += len(value) + 4
        elif isinstance(value, _CONTAINERS):
            length += 4 * len(value) + 4
            num_items += len(value)
            _check_items(num_items)
            if isinstance(value, Mapping):
                waiting.extend(value.values())
                waiting.extend(value.keys())
            else:
                waiting.extend(value)
        else:
            length += 32 + (value.bit_length() // 3 if isinstance(value, int) else 0)
        _check_chars(length)
    return length


def check_walk(*values: Any) -> None:
    """Refuse values that take long to compare, hash or write out."""
    for value in values:
        if isinstance(value, _CONTAINERS):
            written_len(value)


def listed(values: Iterable[Any]) -> list[Any]:
    """The values as a list; refuses more than `MAX_ITEMS`."""
    found = list(islice(values, MAX_ITEMS + 1))
    _check_items(len(found))
    return found


def check_power(left: Any, right: Any) -> None:
    bits = left.bit_length() if isinstance(left, int) else 64
    if isinstance(right, int) and bits * abs(right) > MAX_NUMBER_BITS:
        raise OverflowError("a power is too large")


def check_product(left: Any, right: Any) -> None:
    for sized, count in ((left, right), (right, left)):
        if isinstance(sized, str | bytes | list | tuple) and isinstance(count, int):
            _check_repeated(len(sized) * count, isinstance(sized, str | bytes))


def check_sum(left: Any, right: Any) -> None:
    for kind, check in ((str | bytes, _check_chars), (list | tuple, _check_items)):
        if isinstance(left, kind) and isinstance(right, kind):
            check(len(left) + len(right))


def check_percent(format: str | bytes, values: Any) -> None:
    text = format if isinstance(format, str) else format.decode("latin-1")
    given = values if isinstance(values, tuple) else (values,)
    if "*" in text and any(isinstance(value, int) and abs(value) > MAX_WIDTH for value in given):
        raise OverflowError("a format's width is too large")
    _check_fields(text, text.count("%"), given)


def check_format(format: str, values: Iterable[Any]) -> None:
    _check_chars(8 * len(format))
    specs = [spec for _, _, spec, _ in Formatter().parse(format) if spec is not None]
    if any("{" in spec for spec in specs):
        raise OverflowError("a format has fields inside fields")
    _check_fields(format, len(specs), values)


def _check_fields(format: str, num_fields: int, values: Iterable[Any]) -> None:
    numbers = re.findall("[0-9]+", format)
    if any(len(number) > 4 for number in numbers):
        raise OverflowError("a format's width is too large")
    longest = max(map(written_len, values), default=0) + max(map(int, numbers), default=0)
    _check_chars(len(format) + num_fields * longest)


def _check_chars(count: int) -> None:
    if count > MAX_VALUE_CHARS:
        raise OverflowError(f"a text is too long (over {MAX_VALUE_CHARS} characters)")


def _check_items(count: int) -> None:
    if count > MAX_ITEMS:
        raise OverflowError(f"a list is too long (over {MAX_ITEMS} items)")


def _check_repeated(count: int, is_text: bool) -> None:
    if count > (MAX_VALUE_CHARS if is_text else MAX_ITEMS):
        raise OverflowError("a repeated string or list is too long")


def _check_slow(value: Any, *others: Any, **named: Any) -> Any:
    if sum(map(written_len, (value, *others, *named.values()))) > SLOW_CHARS:
        raise OverflowError(f"a filter is too slow for over {SLOW_CHARS} characters")
    return value


# Filters: each takes what the filter takes, refuses what would cost too much, and returns the value to
# filter; a generator comes back as a list, since looking at it uses it up.


def _plain(value: Any, *others: Any, **named: Any) -> Any:
    check_walk(value, *others, *named.values())
    return value


def _whole(value: Any, *others: Any, **named: Any) -> Any:
    if not isinstance(value, str | Mapping):
        value = listed(value)
    return _plain(value, *others, **named)


def _listed(value: Any) -> Any:
    return listed(value)


def _padded(value: Any, width: int = 80) -> Any:
    _check_chars(max(width, written_len(value)))
    return value


def _escaped(value: Any) -> Any:
    _check_chars(5 * written_len(value))
    return value


def _indented(s: Any, width: int | str = 4, *_: Any, **__: Any) -> Any:
    text = s if isinstance(s, str) else str(_plain(s))
    _check_chars(4 * len(text))
    indent_len = width if isinstance(width, int) else written_len(width)
    _check_chars(len(text) + (len(text.splitlines()) + 1) * indent_len)
    return s


def _wrapped(s: Any, *others: Any, **named: Any) -> Any:
    separators = [text for text in (*others, *named.values()) if isinstance(text, str)]
    _check_slow(s)
    _check_chars((written_len(s) + 1) * (1 + max(map(len, separators), default=1)))
    return s


def _replaced(s: Any, old: Any, new: Any, count: int | None = None) -> Any:
    check_walk(s, old, new)
    parts: list[Any] = [part if isinstance(part, str | bytes) else str(part) for part in (s, old, new)]
    text, old, new = parts
    times = text.count(old)
    if count is not None and count >= 0:
        times = min(count, times)
    _check_chars(len(text) + times * max(0, len(new) - len(old)))
    return s


def _joined(value: Any, d: Any = "", *_: Any, **__: Any) -> Any:
    items = value if isinstance(value, str) else listed(value)
    _check_chars(written_len(items) + len(items) * written_len(d))
    return items


def _batched(value: Any, linecount: int, *_: Any, **__: Any) -> Any:
    _check_items(linecount)
    return value


def _sliced(value: Any, slices: int, *_: Any, **__: Any) -> Any:
    _check_items(slices)
    return value


def _rounded(value: Any, precision: int = 0, *_: Any, **__: Any) -> Any:
    if abs(precision) > 300:
        raise OverflowError("a precision is too large")
    return value


def _formatted(value: Any, *args: Any, **kwargs: Any) -> Any:
    text = value if isinstance(value, str) else str(_plain(value))
    check_percent(text, kwargs or args)
    return text


def _trimmed(value: Any, chars: str | None = None) -> Any:
    _check_strip(chars)
    return _plain(value)


FILTERS: Mapping[str, Callable[..., Any]] = {
    **dict.fromkeys(("string", "upper", "lower", "capitalize", "truncate", "tojson"), _plain),
    **dict.fromkeys(("sort", "unique", "min", "max", "groupby", "dictsort"), _whole),
    **dict.fromkeys(("title", "wordcount", "urlencode", "int"), _check_slow),
    **dict.fromkeys(("e", "escape", "forceescape"), _escaped),
    "list": _listed,
    "center": _padded,
    "indent": _indented,
    "wordwrap": _wrapped,
    "replace": _replaced,
    "join": _joined,
    "batch": _batched,
    "slice": _sliced,
    "round": _rounded,
    "format": _formatted,
    "trim": _trimmed,
}
"""The check of each filter that may cost more than its input; every other filter needs none."""

DROPPED_FILTERS = ("pprint", "striptags", "urlize", "xmlattr")
"""Filters that are not offered: they make HTML or reports, which no prompt needs, and their cost is hard to bound."""


def _check_strip(chars: Any) -> None:
    if isinstance(chars, str | bytes) and len(chars) > MAX_WIDTH:
        raise OverflowError("a set of characters is too large")


def check_method(owner: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Refuse a call that would cost too much; return the arguments to call it with (`kwargs` is changed)."""
    check_walk(*args, *kwargs.values())
    if isinstance(owner, str | bytes):
        if name in ("split", "rsplit"):
            args = _limit_split(args, kwargs)
        return _check_text_method(owner, name, args, (*args, *kwargs.values()))
    if name == "to_bytes" and isinstance(owner, int):
        if any(isinstance(value, int) and value > MAX_WIDTH for value in (*args, *kwargs.values())):
            raise OverflowError("a number is too large")
    elif name in ("count", "index"):
        check_walk(owner)
    return args


def _limit_split(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Limits a split to one part more than a list may have, so that too many parts are noticed without being made."""
    wanted = args[1] if len(args) > 1 else kwargs.pop("maxsplit", -1)
    if not isinstance(wanted, int) or not 0 <= wanted <= MAX_ITEMS:
        wanted = MAX_ITEMS
    kwargs["maxsplit"] = wanted
    return args[:1]


def _check_text_method(
    owner: Any, name: str, args: tuple[Any, ...], values: tuple[Any, ...]
) -> tuple[Any, ...]:
    first = values[0] if values else None
    if name in ("center", "ljust", "rjust", "zfill"):
        _check_chars(first if isinstance(first, int) else 0)
    elif name == "expandtabs":
        width = first if isinstance(first, int) else 8
        _check_chars(len(owner) + max(0, width) * owner.count("\t" if isinstance(owner, str) else b"\t"))
    elif name == "replace":
        _replaced(owner, *args)
    elif name == "join":
        return (_joined(first, owner),)
    elif name == "translate" and isinstance(first, Mapping):
        _check_chars(len(owner) * max(map(written_len, first.values()), default=1))
    elif name in ("format", "format_map"):
        check_format(owner, values)
    elif name in ("strip", "lstrip", "rstrip"):
        _check_strip(first)
    elif name in ("rfind", "rindex", "rsplit", "rpartition"):
        if isinstance(first, str | bytes) and len(first) * len(owner) > _MAX_SEARCH:
            raise OverflowError("a search is too slow")
    elif name == "striptags":
        _check_slow(owner)
    elif name == "splitlines":
        _check_chars(4 * len(owner))
    return args
