"""Describes the Python installation that the ranks use (`Installation`), and requests the description from it (`ask`).

`ask` starts the ranks' interpreter. In that process `training/installed.py` collects the facts. This module imports
neither torch nor pydantic, so that it works in an interpreter that lacks both.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from frontier_llm.errors import FrontierError, Problem
from frontier_llm.files import write_durably
from frontier_llm.units import strict_json

COLLECTOR = "frontier_llm.training.installed"
TIMEOUT_S = 600.0  # torch's first import from a busy parallel file system takes minutes


class NotInTime(FrontierError):
    """The interpreter did not describe itself in time."""


@dataclass(frozen=True)
class TorchFacts:
    """The torch installation of an interpreter."""

    version: str  # torch.__version__; '' if torch cannot be imported.
    hip: str  # torch.version.hip; '' if torch was built without ROCm.
    cuda: str  # torch.version.cuda; '' if torch was built without CUDA.
    path: str  # directory of the torch package.
    error: str  # reason that torch cannot be imported; '' if it can.

    @property
    def vendor(self) -> str:
        """Vendor of the GPUs that this build can use: amd, nvidia or none."""
        if self.hip:
            return "amd"
        return "nvidia" if self.cuda else "none"

    def describe(self) -> str:
        """Return a phrase for messages, such as 'torch 2.10.0 for ROCm 7.0'."""
        if self.error:
            return f"no usable torch ({self.error})"
        if self.hip:
            return f"torch {self.version} for ROCm {self.hip}"
        return f"torch {self.version} for CUDA {self.cuda}" if self.cuda else f"torch {self.version} for CPUs"


@dataclass(frozen=True)
class KernelFacts:
    """The GPU kernels that were built ahead of time."""

    architecture: str  # the requested architecture.
    digest: str  # sha256 of the manifest, the list of all code objects' digests; '' without a manifest.
    # A missing manifest, a build from other sources, or damaged code objects; each problem names the build command.
    problems: tuple[Problem, ...]
    built: tuple[str, ...]  # architectures that have a manifest.


@dataclass(frozen=True)
class InputFacts:
    """The inputs and outputs of a run, checked in the ranks' interpreter. A container sees other file systems than its
    host.
    """

    problems: tuple[Problem, ...]  # problems of data and tokenizer
    run_dir_error: str  # why the run directory cannot be written; '' if it can
    run_dir_free_bytes: int  # free space of its file system


@dataclass(frozen=True)
class Installation:
    """The facts about one interpreter and its packages."""

    host: str
    executable: str
    python: str  # version of Python.
    missing_modules: tuple[str, ...]  # requirements of the package that cannot be found.
    package: str  # directory from which frontier_llm is imported.
    package_digest: str  # digest of its Python sources.
    torch: TorchFacts
    libraries: Mapping[str, str]  # file name -> why it cannot be used; '' if it can.
    kernels: KernelFacts | None  # None if no architecture was requested, or if torch cannot be used.
    providers: Mapping[str, str]  # op back-end (except triton, see `kernels`) -> why it cannot be used, or ''.
    # How torch adds bf16 weight gradients to fp32 (blueprint.items.WeightGradients); '' if not tested on a GPU.
    weight_gradients: str = ""
    ops_error: str = ""  # why frontier_llm.ops cannot be imported with this torch.
    inputs: InputFacts | None = None  # None if no run was given, or if the run file cannot be read in this interpreter.
    seconds: float = field(default=0.0, compare=False)  # time that the collection took.

    def as_json(self) -> str:
        """Return one line of JSON."""
        return strict_json(asdict(self), indent=None)

    @classmethod
    def from_json(cls, line: str) -> Installation:
        """Return the object that `as_json` wrote. Raises ValueError, KeyError or TypeError for any other text."""
        fields: dict[str, Any] = json.loads(line)
        kernels = fields["kernels"]
        inputs = fields["inputs"]
        if kernels is not None:
            kernels = KernelFacts(**{**kernels, "problems": _problems(kernels), "built": tuple(kernels["built"])})
        if inputs is not None:
            inputs = InputFacts(**{**inputs, "problems": _problems(inputs)})
        nested = {"torch": TorchFacts(**fields["torch"]), "kernels": kernels, "inputs": inputs}
        return cls(**{**fields, **nested, "missing_modules": tuple(fields["missing_modules"])})


def _problems(fields: Mapping[str, Any]) -> tuple[Problem, ...]:
    return tuple(Problem(**problem) for problem in fields["problems"])


def ask(
    command: Sequence[str],
    environment: Mapping[str, str],
    architecture: str | None,
    run_text: str | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Installation:
    """Return the facts of the interpreter that `command` starts.

    `command` is for example ("python", "-P", "-m") or ("launch/job.sh", SITE, "--as-rank"). `run_text` is the content
    of a run file. The interpreter then also checks the run's data, tokenizer and run directory.
    Raises NotInTime after `timeout_s`, and FrontierError with the last lines of the output if there are no facts.
    """
    words = [*command, COLLECTOR, architecture or "none"]
    if run_text is not None:
        words.append("-")
    try:
        done = subprocess.run(  # noqa: S603 a list
            words,
            env=dict(environment),
            input=run_text or "",
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_s,
        )
    except OSError as error:
        raise FrontierError(
            f"cannot be started: {error.strerror}", "set FRONTIER_LLM_PYTHON to another interpreter", words[0]
        ) from error
    except subprocess.TimeoutExpired as error:
        raise NotInTime(
            f"did not respond within {timeout_s:.0f} s",
            "check whether the file system of the environment is slow",
            words[0],
        ) from error
    for line in reversed(done.stdout.splitlines()):
        if line.startswith("{"):
            return Installation.from_json(line)
    complaint = done.stderr.strip().splitlines() or [f"ended with exit code {done.returncode} and without a message"]
    raise FrontierError("\n".join(complaint[-8:]), f"run it by hand: {' '.join(words)}", "the ranks' interpreter")


def of_this_interpreter(architecture: str | None, environment: Mapping[str, str]) -> Installation:
    """Start this process's interpreter again with `environment`, and return its facts (`ask`)."""
    return ask((sys.executable, "-P", "-m"), environment, architecture)


def storage(directory: Path, host: str) -> tuple[str, int, float]:
    """Measure a directory, which is created if it is missing. Return (error, free bytes, seconds).

    The seconds are the time to write and flush 1 MiB.
    """
    started_s = time.monotonic()
    path = directory / f".doctor-{host}-{os.getpid()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_durably(path, bytes(2**20))
        free = shutil.disk_usage(directory).free
    except OSError as error:
        return f"{directory}: {error.strerror}", 0, 0.0
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)
    return "", free, time.monotonic() - started_s
