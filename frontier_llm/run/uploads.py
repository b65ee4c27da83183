"""The record of a run's copies at a URL: `RUN_DIR/remote.json`. Does not import torch.

The file states which step was uploaded last, which steps wait, and the last problem. It also has the name under which
this run directory writes at the URL (`checkpoint.remote_writer`). It contains no credentials.
"""

from __future__ import annotations

import uuid
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from frontier_llm.files import write_atomically
from frontier_llm.run.records import DamagedRecord, is_count, is_number, read_json
from frontier_llm.units import strict_json

FILE = "remote.json"
_FIX = "delete it; if a start then refuses the URL: frontier-llm checkpoint pull URL RUN_DIR --take-over"


@dataclass(frozen=True)
class UploadRecord:
    """Copies of a run's checkpoints at a URL."""

    writer: str  # random name of this run directory
    url: str = ""
    uploaded_step: int | None = None  # newest uploaded step; None: no checkpoint has been uploaded
    uploaded_unix_s: float = 0.0
    pending: tuple[int, ...] = ()  # steps that are to be uploaded
    problem: str = ""  # why the last upload failed; '' after a success.
    # After a rewind, remote checkpoints above this step belong to steps that are repeated, and are to be deleted.
    discard_above: int | None = None
    # Step from which the run continued although it could not read the checkpoints at the URL. None: it could read them.
    branched_at: int | None = None

    @property
    def known_step(self) -> int | None:
        """Last step that this run directory knows. Later steps at the URL were written by another run directory. None
        if the run has read the URL at its start.
        """
        if self.branched_at is None:
            return None
        return max(self.branched_at, self.uploaded_step or 0)


def read_uploads(run_dir: Path) -> UploadRecord | None:
    """Return the record. None if the run has never used a URL. Raises DamagedRecord."""
    path = run_dir / FILE
    content = read_json(path, dict, _FIX)
    if content is None:
        return None
    record = _record(content)
    if record is None:
        raise DamagedRecord("is not a record of uploads", _FIX, str(path))
    return record


def _record(content: dict[str, Any]) -> UploadRecord | None:
    try:
        record = UploadRecord(**content)
        record = replace(record, pending=tuple(record.pending))
    except TypeError:
        return None
    texts = (record.writer, record.url, record.problem)
    steps = (record.uploaded_step, record.discard_above, record.branched_at)
    is_sound = (
        all(isinstance(text, str) for text in texts)
        and bool(record.writer)
        and all(step is None or is_count(step) for step in steps)
        and all(map(is_count, record.pending))
        and is_number(record.uploaded_unix_s)
    )
    return record if is_sound else None


def write_uploads(run_dir: Path, record: UploadRecord) -> None:
    """Replace the record. Raises OSError."""
    write_atomically(run_dir / FILE, strict_json(asdict(record)) + "\n")


def after_discard(record: UploadRecord) -> UploadRecord:
    """Return the record after all steps above `record.discard_above` have been deleted at the URL."""
    left = record.uploaded_step
    if left is not None and record.discard_above is not None:
        left = min(left, record.discard_above)
    return replace(record, uploaded_step=left, discard_above=None, problem="")


def uploads_to(run_dir: Path, url: str) -> UploadRecord:
    """Return the record for copies at `url`, the URL of the run from now on.

    A missing record is created. The record of another URL is replaced by a new record.

    Raises DamagedRecord or OSError.
    """
    record = read_uploads(run_dir) or UploadRecord(writer=uuid.uuid4().hex)
    if record.url != url:
        record = UploadRecord(writer=record.writer, url=url)
        write_uploads(run_dir, record)
    return record
