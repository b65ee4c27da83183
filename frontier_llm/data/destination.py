"""Guards the path of a new dataset.

An existing dataset is replaced only on request. Only one process at a time writes a dataset to the path. Errors name
the file that cannot be written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from frontier_llm import log
from frontier_llm.data.cache import held, is_alive
from frontier_llm.data.indexed import IndexedDataset, idx_path
from frontier_llm.data.meta import DatasetMeta, read_meta
from frontier_llm.errors import DataError
from frontier_llm.units import format_count


def existing_dataset(prefix: str | Path, digest: str, overwrite: bool) -> DatasetMeta | None:
    """Return the record of the dataset at `prefix` if it was made from the plan with this digest, otherwise None.

    With `overwrite`, and for a damaged dataset of the same plan, the result is None. Raises DataError for a dataset of
    another plan.
    """
    if overwrite or not idx_path(prefix).exists():
        return None
    meta = read_meta(prefix)
    if meta is None or meta.inputs_digest != digest:
        fix = "choose another --output, or add --overwrite to replace it"
        raise DataError(
            "already exists, and was made from other inputs or with another tokenizer or other options",
            where=str(prefix),
            fix=fix,
        )
    try:
        tokens = IndexedDataset(prefix).token_count
    except DataError as error:
        log.warn(f"{prefix}: is damaged and will be made again: {error}")
        return None
    if tokens != meta.tokens:
        log.warn(f"{prefix}: has {tokens} tokens instead of the recorded {meta.tokens} and will be made again")
        return None
    log.info(f"{prefix}: already exists with {format_count(tokens)} tokens from these inputs; nothing to do")
    return meta


@contextlib.contextmanager
def sole_maker(prefix: str | Path, digest: str, fix: str) -> Iterator[None]:
    """Hold the lock file of `prefix`, so that no other process writes a dataset to it.

    Raises a DataError that names the live process if another process holds the lock. An OSError in the `with` body
    becomes a DataError with this `fix`.
    """
    lock = Path(f"{prefix}.lock")
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        while True:
            with held(lock, digest) as mine:
                if mine:
                    yield
                    return
            if is_alive(lock):
                host, pid, _, other = (*lock.read_text(encoding="utf-8").split(), "?", "?", "?", "?")[:4]
                what = (
                    f"process {pid} on {host} is writing it, from {'the same' if other == digest else 'other'} inputs"
                )
                raise DataError(
                    what,
                    where=str(lock.with_suffix("")),
                    fix="wait until it has ended, or choose another --output",
                )
            lock.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(
            f"cannot write: {error.strerror or error}",
            where=str(error.filename or prefix),
            fix=fix,
        ) from error
