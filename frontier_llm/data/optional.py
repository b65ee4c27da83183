"""Packages that only some kinds of input need: pyarrow for parquet, zstandard for .zst."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from frontier_llm.errors import BackendError


def optional(module: str, path: str | Path) -> Any:
    """Import a package to read `path`; raises BackendError with the install command when it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise BackendError(f"reading this needs {package}: {error}", where=str(path), fix="pip install 'frontier-llm[data]'") from error
