"""Find and load cuDNN, which comes with torch for CUDA, or as a package beside torch for the CPU."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
from pathlib import Path

import torch

_CUDNN = "libcudnn.so.9"
_FIRST_WITHOUT_GPU = 90800
"""The first version that answers for a described GPU, which the machine need not have."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """The loaded library; None if it is not installed, does not load or is too old."""
    folders, cuda = _folders(), _cuda_of_cudnn()
    # cuDNN ends the process if it does not find cuBLAS, so cuBLAS is loaded first
    paths = [_found(name, folders) for name in (f"libcublasLt.so.{cuda}", _CUDNN)]
    if cuda is None or None in paths:
        return None
    try:
        *_, loaded = (ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL) for path in paths)
        loaded.cudnnGetVersion.restype = ctypes.c_size_t
        loaded.cudnnGetErrorString.restype = ctypes.c_char_p
        return loaded if loaded.cudnnGetVersion() >= _FIRST_WITHOUT_GPU else None
    except (OSError, AttributeError):
        return None


def version() -> int | None:
    """The version of the library as a number, such as 91900 for 9.19.0; None without the library."""
    loaded = library()
    return None if loaded is None else int(loaded.cudnnGetVersion())


def _cuda_of_cudnn() -> str | None:
    """The major version of CUDA for which cuDNN was built; None if it is not installed."""
    if torch.version.cuda is not None:
        return torch.version.cuda.partition(".")[0]
    installed = {package.metadata["Name"] for package in importlib.metadata.distributions()}
    return next((cuda for cuda in ("13", "12") if f"nvidia-cudnn-cu{cuda}" in installed), None)


def _folders() -> list[Path]:
    """The folders of libraries: those of NVIDIA's packages, and torch's own."""
    spec = importlib.util.find_spec("nvidia")
    roots = (spec.submodule_search_locations or ()) if spec else ()
    return [
        *(folder for root in roots for folder in sorted(Path(root).glob("*/lib"))),
        Path(torch.__file__).parent / "lib",
    ]


def _found(name: str, folders: list[Path]) -> Path | None:
    return next((folder / name for folder in folders if (folder / name).is_file()), None)
