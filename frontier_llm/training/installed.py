"""Facts of this interpreter: torch, the requirements, the C++ libraries, the GPU kernels and the op back-ends.

    python -P -m frontier_llm.training.installed [ARCHITECTURE|none [-]]

prints the facts as one JSON line. With `-` it reads a run file from stdin.

`submit`, the batch script and `doctor` run this module in the interpreter of the ranks. A rank calls `installation`. If
one part fails, the other facts are still reported, for example by an interpreter without torch.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import platform
import sys
import tempfile
import time
from pathlib import Path

from frontier_llm.errors import BackendError, Problem, in_one_line
from frontier_llm.files import package_digest
from frontier_llm.libraries import LIBRARIES, TORCH_OPS, load_library
from frontier_llm.run.installation import InputFacts, Installation, KernelFacts, TorchFacts, storage
from frontier_llm.run.rank_env import node_name

# Names of the modules that the packages in setup.py's install_requires provide.
REQUIREMENTS = ("numpy", "yaml", "pydantic", "rich", "safetensors", "sentencepiece", "tokenizers")


def installation(architecture: str | None = None, run_text: str | None = None) -> Installation:
    """Return all facts of this interpreter.

    `architecture`, such as gfx90a, selects the GPU kernels to examine. `run_text` is the content of a run file.
    """
    started_s = time.monotonic()
    torch = torch_facts()
    ops_error = torch.error or _import_error("frontier_llm.ops")
    libraries = {name: _library_error(name) for name in LIBRARIES}
    providers = {}
    kernels = None
    weight_gradients = ""
    if not ops_error:
        libraries[TORCH_OPS] = _torch_ops_error()
        providers = provider_facts()
        if architecture:
            kernels = kernel_facts(architecture)
            weight_gradients = weight_gradient_facts()
    inputs_error = _import_error("frontier_llm.data.loader")
    return Installation(
        host=node_name(),
        executable=sys.executable,
        python=platform.python_version(),
        missing_modules=tuple(name for name in REQUIREMENTS if importlib.util.find_spec(name) is None),
        package=str(Path(__file__).resolve().parents[1]),
        package_digest=package_digest(),
        torch=torch,
        libraries=libraries,
        kernels=kernels,
        providers=providers,
        weight_gradients=weight_gradients,
        ops_error="" if torch.error else ops_error,
        inputs=None if run_text is None or inputs_error else input_facts(run_text),
        seconds=time.monotonic() - started_s,
    )


def torch_facts() -> TorchFacts:
    """Return version and build of torch, or the reason that it cannot be imported."""
    error = _import_error("torch")
    if error:
        return TorchFacts(version="", hip="", cuda="", path="", error=error)
    torch = importlib.import_module("torch")
    version = getattr(torch, "version", None)
    return TorchFacts(
        version=str(getattr(torch, "__version__", "unknown")),
        hip=str(getattr(version, "hip", None) or ""),
        cuda=str(getattr(version, "cuda", None) or ""),
        path=os.path.dirname(str(getattr(torch, "__file__", "") or "")),
        error="",
    )


def kernel_facts(architecture: str) -> KernelFacts:
    """Return the state of the prebuilt GPU kernels (code objects) of one architecture. Requires torch."""
    from frontier_llm.ops.kernel_table import ARCHITECTURES
    from frontier_llm.ops.manifest import GPU_DIR, manifest_digest, read_manifest

    problems: tuple[Problem, ...] = ()
    try:
        read_manifest(architecture)
    except BackendError as error:
        problems = error.problems
    built = tuple(name for name in ARCHITECTURES if (GPU_DIR / name / "manifest.json").is_file())
    return KernelFacts(architecture=architecture, digest=manifest_digest(architecture), problems=problems, built=built)


def weight_gradient_facts() -> str:
    """Return how torch adds bf16 weight gradients to fp32 on a GPU of this node. '' without a usable GPU.

    Requires torch. The method depends on the GPU and on the version of torch, and only a test on the GPU finds it.
    """
    import torch

    from frontier_llm.ops.torch_linear import weight_gradient_method

    try:
        return weight_gradient_method(torch.bfloat16, torch.device("cuda")) if torch.cuda.is_available() else ""
    except RuntimeError:  # a broken GPU, which the checks of the node report
        return ""


def provider_facts() -> dict[str, str]:
    """Return, for each op back-end, the reason that this interpreter cannot use it, or ''. Requires torch.

    Triton's back-end can only be checked on a GPU. Login nodes have no GPU. There `kernel_facts` examines the code
    objects of Triton's back-end.
    """
    from frontier_llm.ops.providers import PROVIDERS

    facts = {}
    for name, provider in PROVIDERS.items():
        if name == "triton":
            continue
        try:
            facts[name] = str(provider.missing())
        except Exception as error:  # a broken package concerns only a run that uses it
            facts[name] = f"{name} cannot be examined: {in_one_line(error)}"
    return facts


def input_facts(run_text: str) -> InputFacts | None:
    """Examine data, tokenizer and run directory of a run file.

    Returns None if the interpreter lacks a module for reading the file. A test for write access leaves no file behind.
    If the run directory does not exist yet, its nearest existing parent is tested.
    """
    from frontier_llm.config import load_run
    from frontier_llm.data.loader import data_problems
    from frontier_llm.data.position import START
    from frontier_llm.data.recorded import as_it_stands, recorded_position

    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        file.write(run_text)
        file.flush()
        config = as_it_stands(load_run(file.name))
    directory = Path(config.train.run_dir).resolve()
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    error, free_bytes, _ = storage(existing, node_name())
    problems = data_problems(config, recorded_position(directory) or START)
    return InputFacts(problems=tuple(problems), run_dir_error=error, run_dir_free_bytes=free_bytes)


def _import_error(name: str) -> str:
    """Return the reason that a module cannot be imported, in one line, or ''.

    A broken torch can raise any kind of exception.
    """
    try:
        importlib.import_module(name)
    except Exception as error:
        return in_one_line(error)
    return ""


def _library_error(name: str) -> str:
    """Return the reason that a library of LIBRARIES cannot be used, or ''."""
    try:
        load_library(name, {})
    except BackendError as error:
        return error.problems[0].what
    return ""


def _torch_ops_error() -> str:
    """Return the reason that the C++ ops cannot be used, or ''."""
    from frontier_llm.ops.native import load_cpu_library

    return load_cpu_library()


def main(words: list[str]) -> int:
    """Print the facts as one JSON line. If a module prints at its import, this output goes to stderr."""
    with contextlib.redirect_stdout(sys.stderr):
        architecture = words[0] if words and words[0] != "none" else None
        facts = installation(architecture, sys.stdin.read() if words[1:] == ["-"] else None)
    print(facts.as_json(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
