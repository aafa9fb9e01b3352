"""Loads the shared library that defines the operators."""

from __future__ import annotations

import atexit
import ctypes
import pathlib

import torch

OLDEST_TORCH = (2, 11)


def load() -> None:
    found = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if found < OLDEST_TORCH:
        raise ImportError(f"kvops: torch is {torch.__version__}, expected {'.'.join(map(str, OLDEST_TORCH))} or newer")
    library = pathlib.Path(__file__).with_name("_kvops.so")
    if not library.exists():
        raise ImportError(
            f"kvops: {library} is missing: this folder was not installed by pip. Install kvops "
            "(pip install --no-build-isolation .) and run Python from another folder than its sources"
        )
    torch.ops.load_library(library)
    atexit.register(ctypes.CDLL(str(library)).kvops_at_exit)
