"""Who failed first: the one record of it, `failure.json` in the run directory, written and read here alone.

The rank that failed writes it, or rank 0 about one that died or froze (training/guard/cause.py). Whoever started the
ranks completes it with what only he sees: signal, exit code, a node that is gone. Where no rank could write, he
searches their logs, and `evidence` says so.
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
from frontier_llm.files import write_atomically, write_durably
from frontier_llm.units import strict_json

FILE = "failure.json"
# exit code of a rank whose user has to change something: trying again is useless (errors.FrontierError.exit_code)
REFUSED = 2
STUCK = 70  # EX_SOFTWARE: a rank's watchdog ended it, because another did not move
_LOST_A_PEER = re.compile(
    r"RankFailure|secondary failure|has died or left|connection (reset|closed|refused)|broken pipe|timed "
    r"out|peer|nccl|gloo|"
    r"process group|socket|watchdog",
    re.IGNORECASE,
)
_HARDWARE = re.compile(
    r"(HIP|CUDA|HSA) error(?!.*out of memory)|uncorrectable|\bECC\b|Input/output error|Stale file handle|Bus "
    r"error|no ROCm-capable device",
    re.IGNORECASE,
)


class Evidence(StrEnum):
    """What a record rests on."""

    EXCEPTION = "exception"  # of the named rank, told by itself
    COMPARISON = "comparison"  # copies that must be equal are not
    NOTICES = "notices"  # that all ranks keep posting: the named one fell silent or behind
    SYMPTOM = "symptom"  # the named rank lost its peers and could ask nobody: it need not be the first
    ENDS = "ends"  # of the processes: signals, exit codes, nodes that are gone
    LOGS = "logs"  # searched, because no rank could write a record


@dataclass(frozen=True)
class Suspect:
    """A rank whose results cannot be trusted."""

    rank: int
    host: str
    tensor: str  # in which it shows


@dataclass(frozen=True)
class Failure:
    """What ended a run first."""

    what: str
    evidence: Evidence
    cause: str = "crash"  # crash | wrong results | node failure | refused | walltime
    rank: int | None = None  # None: nobody knows
    host: str = ""  # of that rank; '' = unknown
    step: int | None = None  # None: training had not begun, or nobody knows
    section: str = ""  # of the program: train, evaluate, save …
    host_suspect: bool = False  # only a host can fail so: again on this one, and it is avoided
    message: tuple[str, ...] = ()  # the rank's traceback or last words
    suspects: tuple[Suspect, ...] = ()  # with wrong results
    excluded_hosts: tuple[str, ...] = ()  # no longer used because of it
    unix_s: float = field(default_factory=time.time)

    def describe(self) -> str:
        """'rank 2 on n0 failed first, at step 17 (train): …'."""
        if self.rank is None:
            return self.what
        where = "" if self.step is None else f", at step {self.step} ({self.section})"
        return f"rank {self.rank} on {self.host or 'an unknown host'} failed first{where}: {self.what}"

    def to_json(self) -> str:
        """For a file or the ranks' store."""
        return strict_json(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Failure:
        """What `to_json` gave. Raises ValueError, TypeError or KeyError for anything else."""
        content: dict[str, Any] = json.loads(text)
        content |= {name: tuple(content[name]) for name in ("message", "excluded_hosts")}
        suspects = tuple(Suspect(**suspect) for suspect in content["suspects"])
        return cls(**{**content, "suspects": suspects, "evidence": Evidence(content["evidence"])})


def write_failure(run_dir: Path, failure: Failure, *, complete: bool = False) -> None:
    """Record it. Among the ranks the first one wins; `complete` replaces the ranks' record with one that knows more.

    A disk that fails must not hide the cause: it is a warning.
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
        path.unlink(missing_ok=True)  # half a record would keep the other ranks from writing theirs
        raise


def read_failure(run_dir: Path) -> Failure | None:
    """The record of the run's last start; None when that has not failed, or no rank could write."""
    try:
        return Failure.from_json((run_dir / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def forget_failure(run_dir: Path) -> None:
    """Before a new start."""
    (run_dir / FILE).unlink(missing_ok=True)


def lost_a_peer(text: str) -> bool:
    """Whether an exception only says that another rank is gone: then it is not the cause."""
    return bool(_LOST_A_PEER.search(text))


def speaks_of_hardware(text: str) -> bool:
    """Whether an exception says that the host may be at fault; any other is the program's own, wherever its rank
    sits.
    """
    return bool(_HARDWARE.search(text))
