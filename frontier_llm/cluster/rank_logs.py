"""Finds a failure in the logs of ranks if no rank could write the record of it (`frontier_llm.run.failure`)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from itertools import dropwhile
from pathlib import Path

from frontier_llm.errors import PEER_HEADING
from frontier_llm.run.failure import lost_a_peer

_TRACEBACK = "Traceback (most recent call last)"
# lines between chained tracebacks
_CHAIN = ("During handling of the above exception", "The above exception was the direct cause")
# printed by cli.main above a FrontierError
_REFUSAL = re.compile(rf"frontier-llm [a-z]+: (error|{PEER_HEADING})")
_HEADING = re.compile(rf"({re.escape(_TRACEBACK)}|{_REFUSAL.pattern}$)")
RANKS_PER_FOLDER = 1000  # a folder with tens of thousands of files is slow on Lustre
TAIL_LINES = 40  # last lines that are returned for a log that has neither a traceback nor a refusal
KEPT_STARTS = 20  # newest starts of which the logs of all ranks are kept
TAIL_BYTES = 1 << 20  # only the log's last bytes are searched: thousands of logs lie on the parallel file system


def rank_log(log_dir: Path, rank: int) -> Path:
    """Return the log of a rank. The first RANKS_PER_FOLDER ranks write into `log_dir`, and others into its folders.

    launch/rank.sh chooses the same path. Older versions of this program wrote all logs into `log_dir`. Such a log is
    found too.
    """
    flat = log_dir / f"rank_{rank}.log"
    first = rank - rank % RANKS_PER_FOLDER
    if first == 0 or flat.exists():
        return flat
    return log_dir / f"{first:06}" / flat.name


def rank_logs(log_dir: Path) -> list[Path]:
    """Return the logs of all ranks of a start. Links to folders are not followed."""
    folders = [path for path in log_dir.glob("[0-9]" * 6) if path.is_dir() and not path.is_symlink()]
    return [path for folder in (log_dir, *folders) for path in folder.glob("rank_*.log")]


def failure_lines(log: Path) -> list[str]:
    """Return the last Python traceback of a log with its chained exceptions.

    Without a traceback, return the last error message of a `frontier-llm` command. If there is none, return the last
    lines of the log.
    """
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith(_TRACEBACK)]
    if not starts:
        refused = [number for number, line in enumerate(lines) if _REFUSAL.fullmatch(line)]
        return lines[refused[-1] :] if refused else lines[-TAIL_LINES:]
    start = starts.pop()
    while starts and any(line.startswith(_CHAIN) for line in lines[max(0, start - 3) : start]):
        start = starts.pop()
    return lines[start:]


def conclusion(message: Sequence[str]) -> Sequence[str]:
    """Return the lines after the frames of the last traceback, or after the heading of a command's error.

    They begin with the exception's message.
    """
    headings = [number for number, line in enumerate(message) if _HEADING.match(line)]
    if not headings:
        return ()
    last = message[headings[-1] + 1 :]
    if message[headings[-1]].startswith("Traceback"):
        return tuple(dropwhile(lambda line: line.startswith(" "), last))
    return last


def first_traceback(log_dir: Path) -> tuple[int | None, bool, tuple[str, ...]]:
    """Return (rank, whether its error only reports a lost peer, its last traceback) of the rank that failed first.

    Errors that report a lost peer are ignored, unless all errors report a lost peer. The rank with the earliest
    remaining error is returned.
    """
    tracebacks: list[tuple[bool, int, int, tuple[str, ...]]] = []
    for path in rank_logs(log_dir):
        lines = tuple(failure_lines(path))
        if last_words := conclusion(lines):
            heading = next(line for line in reversed(lines) if _HEADING.match(line))
            is_own_message = _REFUSAL.fullmatch(heading) is not None
            secondary = heading.endswith(PEER_HEADING) if is_own_message else lost_a_peer("\n".join(last_words))
            tracebacks.append((secondary, path.stat().st_mtime_ns, int(path.stem.removeprefix("rank_")), lines))
    secondary, _, rank, lines = min(tracebacks, default=(False, 0, None, ()))
    return rank, secondary, lines


def prune(logs: Path, kept: int = KEPT_STARTS) -> None:
    """Delete the logs of old starts, except the logs of rank 0. Thousands of files per start would fill a quota.

    Links are not followed. A file that cannot be deleted stays.
    """
    starts = sorted(path for path in logs.glob("attempt_*") if path.is_dir() and not path.is_symlink())
    for folder in starts[:-kept]:
        for path in rank_logs(folder):
            if path.name != "rank_0.log" and not path.is_symlink():
                with suppress(OSError):
                    path.unlink()
