"""What Ollama's clients call a model: its name with a tag, `latest` unless there is another."""

from headlong.server.pool import ModelPool

LATEST = ":latest"


def tagged(name: str) -> str:
    return name if ":" in name else f"{name}{LATEST}"


def served_name(pool: ModelPool, name: str) -> str:
    """The model's name without the tag that every model has, unless it serves under just that name."""
    if pool.find(name) is not None:
        return name
    return name.removesuffix(LATEST) or name
