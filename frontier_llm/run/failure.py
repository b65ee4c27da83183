"""Reads and writes `failure.json` in the run directory: the first failure of the run's newest start.

Only this module reads and writes the file.
The failed rank writes the record. If a rank died or froze, rank 0 writes the record about it (training/guard/cause.py).
The launcher adds signal, exit code and lost nodes. If no rank wrote a record, the launcher searches the ranks' logs.
The field `evidence` names the source of the record.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from frontier_llm import log
from frontier_llm.errors import CRASH, OUT_OF_MEMORY, RankFailure
from frontier_llm.files import write_atomically, write_durably
from frontier_llm.units import strict_json

FILE = "failure.json"
# exit code of a rank that refuses to run until its user changes something (errors.FrontierError.exit_code); a restart
# would fail in the same way
REFUSED = 2
STUCK = 70  # EX_SOFTWARE: exit code of a rank that its watchdog ended, because another rank made no progress
SECONDARY = "secondary failure"  # begins the last message of a rank that only lost another rank.
# Errors of this package are recognised by class and heading. All other words in these lists come from messages of
# torch, gloo, RCCL and the system.
_LOST_A_PEER = re.compile(
    rf"{RankFailure.__name__}|{SECONDARY}|connection (reset|closed|refused)|broken pipe|timed out|peer|nccl|gloo|"
    r"process group|socket|watchdog",
    re.IGNORECASE,
)
_HARDWARE = re.compile(
    r"(HIP|CUDA|HSA) error(?!.*out of memory)|uncorrectable|\bECC\b|Input/output error|Stale file handle|Bus "
    r"error|no ROCm-capable device",
    re.IGNORECASE,
)
# torch: "HIP out of memory. Tried to allocate"
# runtime and RCCL: "hipErrorOutOfMemory", "Cuda failure 2 'out of memory'"
_DEVICE_MEMORY = re.compile(
    r"OutOfMemoryError|(HIP|CUDA)( error:)? out of memory|errorOutOfMemory|(hip|cuda) failure.*out of memory",
    re.IGNORECASE,
)


class Evidence(StrEnum):
    """The source from which a record was made."""

    EXCEPTION = "exception"  # an exception of the named rank, recorded by that rank.
    COMPARISON = "comparison"  # copies that must be equal differ.
    NOTICES = "notices"  # the heartbeats of the named rank stopped or fell behind.
    SYMPTOM = "symptom"  # the named rank lost its peers without finding the cause; it may not be the first.
    ENDS = "ends"  # how processes ended: by a signal, with an exit code, or with a lost node.
    LOGS = "logs"  # the ranks' logs, searched because no rank could write a record.


@dataclass(frozen=True)
class Suspect:
    """A rank whose results cannot be trusted."""

    rank: int
    host: str
    tensor: str  # the tensor with the wrong values


@dataclass(frozen=True)
class Failure:
    """The first failure of a start."""

    what: str
    evidence: Evidence
    cause: str = CRASH  # a cause of `errors`, "node failure" or "walltime"
    rank: int | None = None  # None: unknown
    host: str = ""  # host of that rank; '' = unknown
    step: int | None = None  # None: training had not begun, or the step is unknown
    section: str = ""  # part of the program that failed: train, evaluate, save …
    host_suspect: bool = False  # the host may have caused the failure; after two such failures the run avoids the host
    fix: str = ""  # the repair of the failure, if a comparison of the ranks shows one
    message: tuple[str, ...] = ()  # the rank's traceback or last lines of output
    suspects: tuple[Suspect, ...] = ()  # set only if results were wrong
    excluded_hosts: tuple[str, ...] = ()  # hosts that the run no longer uses because of this failure
    unix_s: float = field(default_factory=time.time)

    def describe(self) -> str:
        """Return a sentence such as 'rank 2 on n0 failed first, at step 17 (train): …'."""
        if self.rank is None:
            return self.what
        where = "" if self.step is None else f", at step {self.step} ({self.section})"
        return f"rank {self.rank} on {self.host or 'an unknown host'} failed first{where}: {self.what}"

    def to_json(self) -> str:
        """Return the text for a file or the ranks' store."""
        return strict_json(asdict(self))

    @property
    def program_fault(self) -> str:
        """Error text of the program, with '#' for each number. '' if a host, the network or a lost rank may be the
        cause.

        A fault of the program recurs at every start with the same text, so starts can be compared by this text.
        """
        is_error = self.cause in (CRASH, OUT_OF_MEMORY) and self.evidence in (Evidence.EXCEPTION, Evidence.LOGS)
        if not is_error or self.host_suspect or lost_a_peer(self.what) or speaks_of_hardware(self.what):
            return ""
        return re.sub(r"[0-9]+", "#", self.what)

    @classmethod
    def from_json(cls, text: str) -> Failure:
        """Return the failure that `to_json` wrote. Raises ValueError, TypeError or KeyError for any other text."""
        content: dict[str, Any] = json.loads(text)
        content |= {name: tuple(content[name]) for name in ("message", "excluded_hosts")}
        suspects = tuple(Suspect(**suspect) for suspect in content["suspects"])
        return cls(**{**content, "suspects": suspects, "evidence": Evidence(content["evidence"])})


def write_failure(run_dir: Path, failure: Failure, *, complete: bool = False) -> None:
    """Write the record, unless another rank has already written one. With `complete`, replace an existing record.

    If the write fails, only a warning is logged, so that the error does not hide the cause of the failure.
    """
    path = run_dir / FILE
    try:
        if complete:
            write_atomically(path, failure.to_json() + "\n")
        else:
            _write_first(path, (failure.to_json() + "\n").encode())
    except FileExistsError:
        return
    except OSError as error:
        log.warn(f"cannot write {FILE}: {error.strerror}")


def _write_first(path: Path, content: bytes) -> None:
    try:
        write_durably(path, content)
    except FileExistsError:
        raise
    except OSError:
        path.unlink(missing_ok=True)  # a partly written record would keep the other ranks from writing theirs
        raise


def read_failure(run_dir: Path) -> Failure | None:
    """Return the record of the run's last start. None if that start has not failed or no rank could write."""
    try:
        return Failure.from_json((run_dir / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def forget_failure(run_dir: Path) -> None:
    """Delete the record before a new start."""
    (run_dir / FILE).unlink(missing_ok=True)


def lost_a_peer(text: str) -> bool:
    """Return True if an exception only reports the loss of another rank. Such an exception is not the cause.

    False if RCCL reports that the device's memory is exhausted, because that is a cause.
    """
    return bool(_LOST_A_PEER.search(text)) and cause_of(text) != OUT_OF_MEMORY


def speaks_of_hardware(text: str) -> bool:
    """Return True if an exception points to a fault of the host. Any other exception is a fault of the program."""
    return bool(_HARDWARE.search(text))


def cause_of(text: str) -> str:
    """Return the cause of an exception of a rank: out of the device's memory, or any other crash."""
    return OUT_OF_MEMORY if _DEVICE_MEMORY.search(text) else CRASH
