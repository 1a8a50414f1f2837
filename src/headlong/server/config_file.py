"""Reads config.yml as plain data, strictly: one mapping, no key twice, no references, bounded in size.

Knows YAML and nothing of settings. Errors name the file and the line, never a line's text: it may hold a secret.
"""

import errno
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError
from yaml.events import AliasEvent

from headlong.errors import ConfigError
from headlong.small_files import read_bytes

MAX_BYTES = 65536


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which here also refuses repeated keys and aliases, whose merging can explode."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[union-attr]
            raise ConstructorError(None, None, "aliases are not supported; write the value out", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        names = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        seen: set[str] = set()
        for key in names:
            if key.value in seen:
                raise ConstructorError(None, None, f"the key {key.value[:80]!r} occurs twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read(path: Path) -> dict[str, Any]:
    """Reads the mapping that the file holds; an empty file holds an empty mapping."""
    try:
        data = read_bytes(path, MAX_BYTES)
    except OSError as error:
        fix = "this is no settings file" if error.errno in (errno.EFBIG, errno.EINVAL) else "check --config"
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error}); {fix}") from error
    try:
        content = yaml.load(data.decode("utf-8"), _Loader)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}{_where(error)}: {_problem(error)}; correct it") from None
    except (
        RecursionError,
        ValueError,
        OverflowError,
    ) as error:  # nested too deeply, impossible dates and numbers
        raise ConfigError(f"{path}: cannot be read as YAML ({type(error).__name__}); simplify it") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must hold `name: value` lines, not a {type(content).__name__}")
    return content


def _where(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return "" if mark is None else f", line {mark.line + 1}"


def _problem(error: yaml.YAMLError) -> str:
    return getattr(error, "problem", None) or "not valid YAML"
