"""Fetch from the Hugging Face Hub: a dataset's file list with `datasets`, a tokenizer's files with huggingface_hub.

Code in a repository is never executed.

dataset://OWNER/NAME?subset=S&split=train&revision=R      an input; NAME may also be a local directory
hf://OWNER/NAME@REVISION                                  a tokenizer
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType
from urllib.parse import parse_qsl, unquote

from frontier_llm.data.inputs import DATASET
from frontier_llm.data.remote import UnreachableError, reason_of
from frontier_llm.data.tokenizer import MAXIMUM_BYTES
from frontier_llm.errors import DataError, FrontierError, not_installed, suggest
from frontier_llm.files import LIFT_HINT, lifted_bound
from frontier_llm.units import format_bytes

HUB = "hf://"
FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
CONFIG = "tokenizer_config.json"
PARTS = ("subset", "split", "revision")


def dataset_files(url: str) -> list[str]:
    """Return the paths and URLs of a split's files, at the commit to which `revision` points now.

    The library `datasets` maps a subset and a split to files. This package's own readers read them within size limits.
    Raises DataError for a missing split or subset, UnreachableError if the Hub cannot be reached, and FrontierError if
    `datasets` is not installed.
    """
    try:
        from datasets import load_dataset_builder
    except ModuleNotFoundError:
        raise FrontierError(not_installed("datasets", where=url)) from None
    name, _, query = url.removeprefix(DATASET).partition("?")
    chosen = dict(parse_qsl(query, keep_blank_values=True))
    if unknown := [key for key in chosen if key not in PARTS]:
        raise DataError(
            f"unknown parameter {unknown[0]!r} after the ? of the dataset", where=url, fix=suggest(unknown[0], PARTS)
        )
    subset = chosen.get("subset")
    split = chosen.get("split", "train")
    revision = chosen.get("revision")
    local = Path(unquote(name)).expanduser()
    try:
        builder = load_dataset_builder(str(local) if local.is_dir() else name, subset, revision=revision)
        splits = builder.config.data_files or {}
    except ValueError as error:
        raise DataError(
            f"cannot be opened: {reason_of(error)}",
            where=url,
            fix="choose another subset: ?subset=NAME",
        ) from None
    except Exception as error:  # errors of datasets, huggingface_hub and the network library have no common base
        fix = (
            f"{name} is not a local directory; for a dataset of the Hub, check the name, the network, and HF_TOKEN "
            f"if it "
            f"is private or gated"
        )
        raise UnreachableError(f"cannot be opened: {reason_of(error)}", where=url, fix=fix) from None
    if split not in splits:
        raise DataError(f"has no split {split!r}", where=url, fix=suggest(split, map(str, splits)))
    return [str(file) for file in splits[split]]


def tokenizer_directory(spec: str) -> Path:
    """Return the directory of a Hub tokenizer's files in the client's local cache.

    The Hub is contacted only if files are missing, so that a compute node needs no network. If the revision has moved,
    the tokenizer's digest differs from the digest in a dataset's record. Raises UnreachableError if the Hub cannot be
    reached, DataError for a repository without a tokenizer.
    """
    if (cached := cached_tokenizer(spec)) is not None and (cached / CONFIG).is_file():
        return cached
    hub = _client(spec)
    name, revision = _named(spec)
    try:
        info = hub.HfApi().model_info(name, revision=revision, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or () if file.rfilename in (*FILES, CONFIG)}
        if not sizes.keys() & set(FILES):
            raise DataError(
                f"has none of the files {', '.join(FILES)}", where=spec, fix="give a repository with a tokenizer"
            )
        if max(sizes.values()) > lifted_bound(MAXIMUM_BYTES):
            raise DataError(
                f"has a file of {format_bytes(max(sizes.values()))}, more than the limit of "
                f"{format_bytes(lifted_bound(MAXIMUM_BYTES))} for a tokenizer",
                where=spec,
                fix=LIFT_HINT,
            )
        paths = [hub.hf_hub_download(name, file, revision=revision) for file in sizes]
        return Path(paths[0]).parent
    except DataError:
        raise
    except Exception as error:  # errors of the client and of its network library, which depends on the client's version
        if cached is not None:
            return cached
        fix = (
            "check the name, the network, and HF_TOKEN if it is private or gated; without a network, fetch it into "
            "this "
            "HF_HOME on a machine that has one"
        )
        fix += " (with `frontier-llm data tokenize` or `hf download`)"
        raise UnreachableError(f"cannot be fetched: {reason_of(error)}", where=spec, fix=fix) from None


def cached_tokenizer(spec: str) -> Path | None:
    """Return the cache directory of a tokenizer that was fetched before, or None."""
    name, revision = _named(spec)
    paths = [_client(spec).try_to_load_from_cache(name, file, revision=revision) for file in FILES]
    return next((Path(path).parent for path in paths if isinstance(path, str)), None)


def _named(spec: str) -> tuple[str, str | None]:
    """Return (OWNER/NAME, revision).

    Raises DataError for a name that no repository on the Hub can have, because its parts name folders of the local
    cache.
    """
    name, _, revision = spec.removeprefix(HUB).partition("@")
    part = r"(?!\.)(?!.*\.\.)[A-Za-z0-9._-]{1,96}(?<!\.)"
    if not re.fullmatch(f"({part}/)?{part}", name) or not re.fullmatch(r"(?!.*\.\.)[A-Za-z0-9._/-]{0,255}", revision):
        raise DataError(
            "is not the name of a tokenizer of the Hub",
            where=spec[:200],
            fix="write hf://OWNER/NAME or hf://OWNER/NAME@REVISION",
        )
    return name, revision or None


def _client(spec: str) -> ModuleType:
    try:
        return importlib.import_module("huggingface_hub")
    except ModuleNotFoundError:
        raise FrontierError(not_installed("huggingface_hub", where=spec)) from None
