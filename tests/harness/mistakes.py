"""Tests typical mistakes of an installation: makes one at a time, then runs `submit` and a shipped batch script.

    python -m tests.harness.mistakes [--write docs/generated/planted_mistakes.md]      run all rows, print the table

The jobs run on a local Slurm whose site expects AMD GPUs (machine: frontier). Another torch is simulated by a small
package in front of the real torch. This package changes the real torch's build information, or cannot be imported. The
installed package is a copy of this checkout with some GPU kernels.
"""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from pathlib import Path

import yaml

from frontier_llm.cluster.sbatch import render_site
from frontier_llm.cluster.sites import load_site
from frontier_llm.run import run_dir
from frontier_llm.run.failure import Failure, read_failure
from frontier_llm.tables import markdown
from tests.harness.slurm import ROOT, LocalSlurm

# The real torch under another name. {patch} runs after the import.
RENAMED = """\
import importlib.machinery, importlib.util, os, sys
here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
others = [path for path in sys.path if os.path.abspath(path or ".") != here]
spec = importlib.machinery.PathFinder.find_spec("torch", others)
torch = importlib.util.module_from_spec(spec)
sys.modules["torch"] = torch
spec.loader.exec_module(torch)
{patch}
"""
NO_TORCH = "raise ModuleNotFoundError(\"No module named 'torch'\")\n"
ROCM = "torch.version.hip, torch.version.cuda = '7.1.25424', None\n"
CUDA = "torch.version.hip, torch.version.cuda = None, '12.8'\n"
VERSION = "torch.__version__ = '2.11.0+rocm7.1'\n"
# Source of a stub torch: every node except n1 has one GPU of the site's architecture, whose tensors are on the CPU.
GPUS = """\
from types import SimpleNamespace
has_gpu = os.environ.get("SLURMD_NODENAME") != "n1"
ones = torch.ones
torch.ones = lambda *shape, device=None, **options: ones(*shape, **options)
torch.cuda.is_available = lambda: has_gpu
torch.cuda.device_count = lambda: int(has_gpu)
torch.cuda.set_device = lambda index: None
torch.cuda.get_device_name = lambda index: "a planted GPU"
torch.cuda.get_device_properties = lambda index: SimpleNamespace(gcnArchName="gfx90a", major=9, minor=0)
"""
TOY = (
    "model.layers=2",
    "model.hidden=64",
    "model.heads=8",
    "model.ffn_hidden=128",
    "model.vocab_size=250",
    "model.vocab_multiple=64",
    "model.sequence_length=16",
    "parallel.tensor=1",
    "parallel.pipeline=1",
    "batch.global_batch=24",
    "batch.micro_batch=1",
    "train.steps=2",
    "train.save_interval=1",
    "train.tensorboard=false",
    "optimizer.warmup_steps=0",
)


@cache
def some_kernels() -> Path:
    """Build two gfx90a kernels with a valid manifest. Returns their folder. All 300 kernels would take a minute."""
    folder = Path(tempfile.mkdtemp(prefix="fl-kernels-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    # Other tests in this worker process of pytest may have enabled Triton's interpreter, which compiles nothing.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE, str(folder)]
    subprocess.run(command, check=True, cwd=ROOT, timeout=280, env=environment)
    return folder


COMPILE = """\
import os, sys, tempfile
from pathlib import Path
os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(dir=sys.argv[1])
from frontier_llm.ops.aot.build import all_builds, compile_one, write_manifest
folder = Path(sys.argv[1])
builds = [build for build in all_builds(["gfx90a"]) if build.kernel.startswith("swiglu")][:2]
codes = [compile_one(build, folder) for build in builds]
import shutil
shutil.rmtree(os.environ["TRITON_CACHE_DIR"])
write_manifest(folder, "gfx90a", codes)
"""


@dataclass(frozen=True)
class Place:
    """A planted site: a copy of the checkout, stub packages, and run directories."""

    directory: Path

    @property
    def checkout(self) -> Path:
        """Copy of the package, the scripts and the configurations."""
        return self.directory / "checkout"

    @property
    def kernels(self) -> Path:
        """Folder of the prebuilt GPU kernels, by architecture."""
        return self.checkout / "frontier_llm" / "_native" / "gpu"

    def build(self, torch: str, modules: tuple[str, ...]) -> None:
        """Create all files. `torch` is the source of the stub package; '' keeps the real torch."""
        for name in ("frontier_llm", "launch", "slurm", "configs"):
            shutil.copytree(ROOT / name, self.checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.rmtree(self.kernels, ignore_errors=True)
        shutil.copytree(some_kernels(), self.kernels / "gfx90a")
        for folder in ("orion", "home", "stubs"):
            (self.directory / folder).mkdir()
        if torch:
            (self.directory / "stubs" / "torch").mkdir()
            (self.directory / "stubs" / "torch" / "__init__.py").write_text(torch)
        site = yaml.safe_load((ROOT / "slurm" / "sites" / "local.yaml").read_text())
        site |= {
            "name": "planted",
            "machine": "frontier",
            "modules": list(modules),
            "run_roots": [str(self.directory / "orion")],
        }
        path = self.checkout / "slurm" / "sites" / "planted.yaml"
        path.write_text(yaml.safe_dump(site))
        path.with_suffix(".sh").write_text(render_site(load_site(str(path))))

    def environment(self) -> dict[str, str]:
        """Return the variables for `submit` and sbatch. `module` is a shell function, as at a site."""
        gone = 'echo "Lmod has detected the following error: these module(s) are unknown: $2" >&2; return 1'
        return {
            "FRONTIER_LLM_ROOT": str(self.checkout),
            "FRONTIER_LLM_SITE": "planted",
            "FRONTIER_LLM_PYTHON": sys.executable,
            "FRONTIER_LLM_CONTINUE": "never",
            "FRONTIER_LLM_SIGNAL_LEAD_S": "10",
            "PYTHONPATH": str(self.directory / "stubs"),
            "BASH_FUNC_module%%": f'() {{ if [[ "$2" == gone/* ]]; then {gone}; fi; }}',
        }


def _change_nothing(place: Place) -> None:
    """Change no file."""


def _remove_libraries(place: Place) -> None:
    for path in (place.checkout / "frontier_llm" / "_native").glob("*.so"):
        path.unlink()


def _rename_kernels(place: Place) -> None:
    (place.kernels / "gfx90a").rename(place.kernels / "gfx942")


def _change_a_kernel(place: Place) -> None:
    with (place.checkout / "frontier_llm" / "ops" / "triton" / "norm.py").open("a") as file:
        file.write("CHANGED_AFTER_THE_BUILD = True\n")


def _write_half_a_tokenizer(place: Place) -> None:
    (place.directory / "orion" / "tokenizer.json").write_text('{"model": ')


@dataclass(frozen=True)
class Mistake:
    """A planted mistake and the expected refusal."""

    name: str
    message: str  # part of the text of every refusal
    torch: str = RENAMED.format(patch=ROCM)
    plant: Callable[[Place], None] = _change_nothing
    modules: tuple[str, ...] = ("rocm/7.1.1",)
    words: tuple[str, ...] = ()  # overrides of the run; {place} is the directory
    run_dir: str = "{place}/orion/run"
    full: bool = False  # mount a file system of 64 KiB at {place}/orion/full
    nodes: int = 1
    refused_by: tuple[str, ...] = ("submit", "batch script")
    cause: str = ""  # expected cause in failure.json, if the ranks refuse


MISTAKES = (
    Mistake(
        name="none: only the GPU is missing",
        message="n0 sees no GPU",
        refused_by=("ranks",),
        cause="refused",
    ),
    Mistake(name="no torch", message="cannot import torch: ModuleNotFoundError", torch=NO_TORCH),
    Mistake(name="CPU torch", message="for CPUs, but planted has amd GPUs (MI250X GCD)", torch=""),
    Mistake(
        name="CUDA torch on an AMD site",
        message="for CUDA 12.8, but planted has amd GPUs",
        torch=RENAMED.format(patch=CUDA),
    ),
    Mistake(
        name="another torch version",
        message="libfrontier_ops.so was built for torch",
        torch=RENAMED.format(patch=ROCM + VERSION),
    ),
    Mistake(name="no extension", message="libfrontier_ops.so has not been built", plant=_remove_libraries),
    Mistake(
        name="kernels of another architecture",
        message="the ops for gfx90a have not been built",
        plant=_rename_kernels,
    ),
    Mistake(
        name="stale kernels",
        message="other versions of the kernel sources norm.py; out of date: ",
        plant=_change_a_kernel,
    ),
    Mistake(
        name="missing data",
        message="tokens.bin: no such file",
        words=("data.train=[{{path: {place}/orion/tokens}}]",),
    ),
    Mistake(
        name="unreadable tokenizer",
        message="is not a Hugging Face tokenizer",
        plant=_write_half_a_tokenizer,
        words=("data.tokenizer={place}/orion/tokenizer.json",),
    ),
    Mistake(
        name="run directory full",
        message="No space left on device",
        run_dir="{place}/orion/full/run",
        full=True,
    ),
    Mistake(
        name="run directory on the wrong file system",
        message="/home/run is not on ",
        run_dir="{place}/home/run",
    ),
    Mistake(
        name="one node without a GPU",
        message="n1 sees no GPU",
        torch=RENAMED.format(patch=ROCM + GPUS),
        nodes=3,
        refused_by=("ranks",),
        cause="node failure",
    ),
    Mistake(
        name="a module that is gone",
        message="the module gone/1.0 cannot be loaded",
        modules=("rocm/7.1.1", "gone/1.0"),
    ),
)


@dataclass(frozen=True)
class Refusal:
    """One program's refusal of the mistake."""

    by: str
    exit_code: int
    seconds: float
    text: str
    failure: Failure | None = None  # failure.json


@dataclass
class Outcome:
    """How `submit`, the batch script and the ranks reacted to one mistake."""

    mistake: Mistake
    refusals: list[Refusal] = field(default_factory=list)
    step_count: int = 0  # training steps that were recorded


def meet(cluster: LocalSlurm, mistake: Mistake, directory: Path) -> Outcome:
    """Plant a mistake, and run `submit` and then the shipped batch script with it.

    If only the ranks can refuse, `submit --dry-run` has to accept. Raises AssertionError if it does not.
    """
    place = Place(directory)
    place.build(mistake.torch, mistake.modules)
    mistake.plant(place)
    run = Path(mistake.run_dir.format(place=directory))
    words = [*TOY, f"train.run_dir={run}", *(word.format(place=directory) for word in mistake.words)]
    outcome = Outcome(mistake)
    with _mounted(directory / "orion" / "full", mistake.full):
        if "submit" in mistake.refused_by:
            outcome.refusals.append(_submit(cluster, place, mistake, words))
        else:
            accepted = _submit(cluster, place, mistake, [*words, "--dry-run"])
            assert accepted.exit_code == 0, accepted.text
        outcome.refusals.append(_sbatch(cluster, place, mistake, words, run))
        outcome.step_count = len(run_dir.steps(run))
    return outcome


@contextmanager
def _mounted(path: Path, wanted: bool) -> Iterator[None]:
    if not wanted:
        yield
        return
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(path)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(path)], check=True)


def _submit(cluster: LocalSlurm, place: Place, mistake: Mistake, words: list[str]) -> Refusal:
    environment = {**cluster.env, **place.environment()}
    environment["PYTHONPATH"] = f"{place.checkout}:{environment['PYTHONPATH']}"
    program = [sys.executable, "-P", "-m", "frontier_llm.cli.main"]
    arguments = ["submit", "train_small", "--site", "planted", "--nodes", str(mistake.nodes)]
    started_s = time.monotonic()
    done = subprocess.run(
        [*program, *arguments, *words],
        env=environment,
        cwd=place.directory,
        capture_output=True,
        text=True,
        timeout=300,
    )
    seconds = time.monotonic() - started_s
    return Refusal(by="submit", exit_code=done.returncode, seconds=seconds, text=done.stderr)


def _sbatch(cluster: LocalSlurm, place: Place, mistake: Mistake, words: list[str], run: Path) -> Refusal:
    options = [
        "--partition=local",
        f"--nodelist=n[0-{mistake.nodes - 1}]",
        f"--nodes={mistake.nodes}",
        "--ntasks-per-node=1",
        "--time=20",
        f"--output={place.directory}/job.out",
    ]
    script = str(place.checkout / "slurm" / "train_small.sbatch")
    job_id = cluster.submit(*options, script, *words, cwd=place.checkout, env=place.environment())
    job = cluster.wait_job(job_id, 400)
    started = datetime.fromisoformat(job["StartTime"])
    ended = datetime.fromisoformat(job["EndTime"])
    return Refusal(
        by="ranks" if run_dir.attempts(run) else "batch script",
        exit_code=int(job["ExitCode"].split(":")[0]),
        seconds=(ended - started).total_seconds(),
        text=(place.directory / "job.out").read_text(errors="replace"),
        failure=read_failure(run),
    )


def told(refusal: Refusal, mistake: Mistake, directory: Path) -> str:
    """Return the line of a refusal that names the mistake, with the paths of this test removed."""
    line = next((line for line in refusal.text.splitlines() if mistake.message in line), "")
    for name, written in ((directory / "checkout", ""), (directory, ""), (Path(sys.executable), "python")):
        line = line.replace(f"{name}/", written).replace(str(name), written)
    return line.strip().removeprefix("error: ").removeprefix("warning: ").strip()


HEAD = """\
# Planted mistakes

Each row is a mistake of an installation, planted on a local Slurm whose site expects AMD GPUs (`machine: frontier`).
No row reaches a training step.

| refused by | when |
| --- | --- |
| submit | `frontier-llm submit`, before the job is queued |
| batch script | a shipped script, queued by `sbatch`, before its first `srun` |
| ranks | before the first collective; `submit --dry-run` and the batch script have accepted the installation |

The first row of the table below is the control: nothing is planted.
Only the GPU is missing, because the test machine has none.
"After s" is the time of the whole command for `submit`, and the time from the job's start to its end for the others.
The test machine has two cores, and other tests ran at the same time.
Other builds of torch are small packages in front of the CPU build, and so is the GPU of the nodes that have one.
No MI250X was used.

`python -m tests.harness.mistakes --write docs/generated/planted_mistakes.md` writes this page (Slurm 22.05, as root).
`tests/slurm/test_mistakes.py` tests who refuses, and the message.

"""


def table(rows: list[tuple[Outcome, Path]]) -> str:
    """Return the table in Markdown."""
    cells = [
        [outcome.mistake.name, refusal.by, f"{refusal.seconds:.0f}", told(refusal, outcome.mistake, directory)]
        for outcome, directory in rows
        for refusal in outcome.refusals
    ]
    return markdown(["mistake", "refused by", ">after s", "message"], cells)


def main(words: list[str]) -> int:
    """Run every row and print the table; with --write also into a page."""
    from tests.harness.scenarios import training_cluster

    rows = []
    with training_cluster(nodes=3) as cluster, tempfile.TemporaryDirectory() as folder:
        for index, mistake in enumerate(MISTAKES):
            directory = Path(folder) / str(index)
            directory.mkdir()
            rows.append((meet(cluster, mistake, directory), directory))
            print(table(rows[-1:]), file=sys.stderr, flush=True)
        text = table(rows)
    print(text)
    if words[:1] == ["--write"]:
        Path(words[1]).write_text(HEAD + text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
