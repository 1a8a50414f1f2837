"""What `import headlong` offers: everything listed is there, documented, and nothing else is public."""

import dataclasses
import inspect
import re
import subprocess
import sys

import pytest

import headlong


def test_every_name_is_there():
    assert len(set(headlong.__all__)) == len(headlong.__all__)
    assert set(headlong.__all__) <= set(dir(headlong))
    assert all(inspect.isclass(getattr(headlong, name)) for name in headlong.__all__)
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        headlong.nothing_of_the_kind  # noqa: B018


def test_importing_it_is_cheap():
    """torch takes seconds; asking for the version or for help must not wait for it."""
    code = "import sys, headlong; headlong.__version__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_star_import():
    names: dict = {}
    exec("from headlong import *", names)
    assert set(headlong.__all__) <= names.keys()


@pytest.mark.parametrize("name", headlong.__all__)
def test_documented(name):
    public = getattr(headlong, name)
    # A dataclass without words of its own gets its signature as docstring.
    doc = inspect.getdoc(public)
    assert doc and not doc.startswith(f"{name}(")
    for member, value in vars(public).items():
        if member.startswith("_") or not callable(getattr(value, "__func__", value)):
            continue
        assert inspect.getdoc(getattr(public, member)), f"{name}.{member} has no docstring"


def test_module_docstring_and_version():
    assert headlong.__doc__ and "LLM" in headlong.__doc__
    assert re.fullmatch(r"\d+\.\d+\.\d+", headlong.__version__)


def test_errors_have_one_root():
    errors = [getattr(headlong, name) for name in headlong.__all__ if name.endswith("Error")]
    assert len(errors) == 5 and all(issubclass(error, headlong.HeadlongError) for error in errors)
    assert issubclass(headlong.RequestError, ValueError) and issubclass(headlong.ConfigError, ValueError)
    assert issubclass(headlong.HeadError, headlong.CheckpointError)


@pytest.mark.parametrize(
    "name", ["Chunk", "Completion", "MtpStatus", "SamplingParams", "Stats", "TokenLogprobs"]
)
def test_values_are_frozen(name):
    cls = getattr(headlong, name)
    assert dataclasses.is_dataclass(cls) and cls.__dataclass_params__.frozen
