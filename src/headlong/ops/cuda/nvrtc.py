"""Compiles CUDA C++ to machine code with NVRTC, the compiler library that PyTorch's CUDA builds bring along; no
toolkit is needed. What was compiled is kept in a folder, so that only the first start takes the seconds."""

import ctypes
import hashlib
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile

from headlong.env import cache_folder


class CompileError(RuntimeError):
    """The library is not there, or refused the source; the message is its log."""


@cache
def _library() -> ctypes.CDLL:
    tried = []
    for name in _names():
        try:
            for needed in Path(name).parent.glob("libnvrtc-builtins.so*"):
                ctypes.CDLL(str(needed))  # it looks for this one only where the system looks
            return ctypes.CDLL(name)
        except OSError as error:
            tried.append(str(error))
    raise CompileError(f"NVRTC, the compiler of PyTorch's CUDA builds, is not found ({'; '.join(tried)})")


def _names() -> list[str]:
    """Where the library may be: wherever the system looks, then among Python's packages."""
    sonames = [f"libnvrtc.so.{major}" for major in (13, 12)]
    import torch

    packages = Path(torch.__file__).parents[1] / "nvidia"
    return sonames + [str(path) for soname in sonames for path in packages.glob(f"*/lib/{soname}")]


def machine_code(source: str, options: Sequence[str]) -> bytes:
    """Returns the machine code (a cubin) of the source."""
    version = ctypes.c_int(), ctypes.c_int()
    _library().nvrtcVersion(*map(ctypes.byref, version))
    given = "\0".join([source, *options, *(str(part.value) for part in version)])
    kept = cache_folder() / "kernels" / f"{hashlib.sha256(given.encode()).hexdigest()}.cubin"
    try:
        return kept.read_bytes()
    except OSError:
        code = _compiled(source, options)
        _keep(kept, code)
        return code


def _compiled(source: str, options: Sequence[str]) -> bytes:
    nvrtc, program, size = _library(), ctypes.c_void_p(), ctypes.c_size_t()
    status = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
    if status:
        raise CompileError(f"NVRTC made no program (status {status})")
    try:
        array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if nvrtc.nvrtcCompileProgram(program, len(options), array):
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise CompileError(log.value.decode(errors="replace"))
        nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
        code = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetCUBIN(program, code)
        return code.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _keep(path: Path, code: bytes) -> None:
    """Stores the code whole or not at all; where nothing can be stored it is compiled again next time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(code)
        os.replace(file.name, path)
    except OSError:
        pass
