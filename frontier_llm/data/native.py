"""NumPy interface to the compiled sample index (csrc/sample_index.cpp). setup.py compiles the library, and this module
loads it with ctypes.

There is no Python fallback. A missing library raises an error that names the build command.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frontier_llm.errors import DataError
from frontier_llm.libraries import LIBRARIES, load_library

ABI = LIBRARIES["libsample_index.so"]["fl_abi"]  # part of a cached index's file name (samples.py)
FAILURES = {
    -1: "a sequence has a negative length, or a document lies outside the sequences: the .idx is damaged",
    -2: "the cached sample index was made for another dataset",
    -3: "internal error: a position is past the end of the sample index",
    -4: "internal error: an argument of the sample index is out of range",
    -5: "internal error: the weights of the blend do not sum to its period",
}
_SIGNATURES = {  # function → kinds of its arguments: p = pointer, u = u64
    "fl_permute": "uupup",
    "fl_build": "ppuuuup",
    "fl_pieces": "pppuuupuupppp",
    "fl_count_pieces": "ppuuuup",
    "fl_count_packed": "ppuuupuuup",
    "fl_pack": "pppuuupuuuppppp",
    "fl_blend": "puup",
}


@functools.cache
def library() -> ctypes.CDLL:
    """Return the shared library.

    Raises a BackendError with the build command if the library is missing, cannot be loaded or has another version.
    """
    kinds = {"p": ctypes.c_void_p, "u": ctypes.c_uint64}
    functions = {name: (ctypes.c_int64, [kinds[kind] for kind in arguments]) for name, arguments in _SIGNATURES.items()}
    return load_library("libsample_index.so", functions)


def call(name: str, *arguments: Any, where: str = "") -> int:
    """Call a library function. Arrays are passed as pointers, None as a null pointer.

    Raises DataError for a negative result. `where` is the place that the error names.
    """
    pointers = [argument.ctypes.data if isinstance(argument, np.ndarray) else argument for argument in arguments]
    result = int(getattr(library(), name)(*pointers))
    if result < 0:
        if result != -2:
            fix = "check the dataset with `frontier-llm data inspect`"
        else:
            fix = "delete the folder data.cache_dir; by default this is index_cache/ beside the dataset"
        raise DataError(FAILURES.get(result, f"{name} failed with code {result}"), where=where, fix=fix)
    return result


def permute(size: int, key: int, positions: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the images of `positions` under the keyed permutation of [0, size)."""
    positions = np.ascontiguousarray(positions, np.uint64)
    images = np.empty_like(positions)
    call(
        "fl_permute",
        size,
        key,
        positions,
        positions.size,
        images,
    )
    return images
