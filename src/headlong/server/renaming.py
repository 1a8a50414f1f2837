"""Errors about a chat's fields, told with the names that another dialect has for them."""

import contextlib
import re
from collections.abc import Iterator, Mapping

from headlong.errors import RequestError


def composed(names: Mapping[str, str], renamed: Mapping[str, str]) -> dict[str, str]:
    """The names for errors where a client sent some fields under other servers' names."""
    return {pattern: renamed.get(name, name) for pattern, name in names.items()} | dict(renamed)


@contextlib.contextmanager
def fields_named(names: Mapping[str, str]) -> Iterator[None]:
    """Renames the fields that errors mention. `names` maps how a field's path may begin, as a pattern, to what to say
    instead; the first match counts."""
    try:
        yield
    except RequestError as error:
        for pattern, name in names.items():
            told, found = re.subn(rf"\A{pattern}(?![a-z_])", name, str(error))
            if found:
                raise RequestError(told) from error
        raise
