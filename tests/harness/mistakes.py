"""Mistakes of an installation, planted one at a time; each is met by `submit` and by a shipped batch script on a local
Slurm.

    python -m tests.harness.mistakes [--write docs/results/planted_mistakes.md]      run all rows, print the table

The site expects AMD GPUs (machine: frontier). Another torch is a small package in front of the real one, which renames
the real one's build or fails to be imported. Everything else is as it would be: the package is a copy, some of its GPU
kernels are built, Slurm is real.
"""

from __future__ import annotations

import atexit
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from pathlib import Path

import yaml

from frontier_llm.cluster.sbatch import render_site
from frontier_llm.cluster.sites import load_site
from frontier_llm.run import run_dir
from frontier_llm.tables import markdown
from tests.harness.slurm import ROOT, LocalSlurm

# The real torch under another name. {patch} runs after it was imported.
RENAMED = """\
import importlib.machinery, importlib.util, os, sys
here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
spec = importlib.machinery.PathFinder.find_spec("torch", [path for path in sys.path if os.path.abspath(path or ".") != here])
torch = sys.modules["torch"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(torch)
{patch}
"""  # noqa: E501
ROCM = "torch.version.hip, torch.version.cuda = '7.1.25424', None\n"
CUDA = "torch.version.hip, torch.version.cuda = None, '12.8'\n"
VERSION = "torch.__version__ = '2.11.0+rocm7.1'\n"
TOY = (
    *(
        "model.layers=2",
        "model.hidden=64",
        "model.heads=8",
        "model.ffn_hidden=128",
        "model.vocab_size=250",
        "model.vocab_multiple=64",
    ),
    *(
        "model.sequence_length=16",
        "parallel.tensor=1",
        "parallel.pipeline=1",
        "batch.global_batch=24",
        "batch.micro_batch=1",
    ),
    *("train.steps=2", "train.save_interval=1", "train.tensorboard=false", "optimizer.warmup_steps=0"),
)


@cache
def some_kernels() -> Path:
    """A folder with a valid manifest of a few gfx90a kernels: all 300 take a minute, and which there are does not
    matter here.
    """
    folder = Path(tempfile.mkdtemp(prefix="fl-kernels-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    subprocess.run([sys.executable, "-c", COMPILE, str(folder)], check=True, cwd=ROOT, timeout=280)
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
    """A site of its own: a copy of the checkout, stubs, and file systems."""

    directory: Path

    @property
    def checkout(self) -> Path:
        """The copy."""
        return self.directory / "checkout"

    @property
    def kernels(self) -> Path:
        """Folder of the prebuilt GPU kernels, by architecture."""
        return self.checkout / "frontier_llm" / "_native" / "gpu"

    def build(self, torch: str, modules: tuple[str, ...]) -> None:
        """Make everything. `torch`: the planted package's source; '' leaves the real torch."""
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
        """For `submit` and sbatch. `module` is a shell function, as at a site."""
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


def _leave(place: Place) -> None:
    """Plant nothing in the files."""


def _remove_libraries(place: Place) -> None:
    for path in (place.checkout / "frontier_llm" / "_native").glob("*.so"):
        path.unlink()


def _rename_kernels(place: Place) -> None:
    (place.kernels / "gfx90a").rename(place.kernels / "gfx942")


@dataclass(frozen=True)
class Mistake:
    """One row."""

    name: str
    message: str  # that every refusal holds
    torch: str = RENAMED.format(patch=ROCM)
    plant: Callable[[Place], None] = _leave
    modules: tuple[str, ...] = ("rocm/7.1.1",)
    words: tuple[str, ...] = ()  # overrides of the run; {place} is the directory
    run_dir: str = "{place}/orion/run"
    full: bool = False  # mount a file system of 64 KiB at {place}/orion/full
    nodes: int = 1
    refused_by: tuple[str, ...] = ("submit", "batch script")


MISTAKES = (
    Mistake(
        "no torch",
        "cannot import torch: ModuleNotFoundError",
        torch="raise ModuleNotFoundError(\"No module named 'torch'\")\n",
    ),
    Mistake("CPU torch", "for CPUs; planted has amd GPUs (MI250X GCD)", torch=""),
    Mistake("CUDA torch on an AMD site", "for CUDA 12.8; planted has amd GPUs", torch=RENAMED.format(patch=CUDA)),
    Mistake(
        "another torch version", "libfrontier_ops.so was built for torch", torch=RENAMED.format(patch=ROCM + VERSION)
    ),
    Mistake("no extension", "libfrontier_ops.so has not been built", plant=_remove_libraries),
    Mistake("kernels of another architecture", "the ops for gfx90a have not been built", plant=_rename_kernels),
    Mistake("missing data", "tokens.bin: no such file", words=("data.train=[{{path: {place}/orion/tokens}}]",)),
    Mistake("run directory full", "No space left on device", run_dir="{place}/orion/full/run", full=True),
    Mistake("run directory on the wrong file system", "/home/run is not on ", run_dir="{place}/home/run"),
    Mistake("a module that is gone", "the module gone/1.0 cannot be loaded", modules=("rocm/7.1.1", "gone/1.0")),
)


@dataclass
class Refusal:
    """How one program met the mistake."""

    by: str
    exit_code: int
    seconds: float
    text: str
    started_ranks: bool = False
    steps: int = 0  # of training, that were recorded


@dataclass
class Outcome:
    """How all programs met one mistake."""

    mistake: Mistake
    refusals: list[Refusal] = field(default_factory=list)


def meet(cluster: LocalSlurm, mistake: Mistake, directory: Path) -> Outcome:
    """Plant a mistake, and let `submit` and then the shipped batch script meet it."""
    place = Place(directory)
    place.build(mistake.torch, mistake.modules)
    mistake.plant(place)
    run = Path(mistake.run_dir.format(place=directory))
    words = [*TOY, f"train.run_dir={run}", *(word.format(place=directory) for word in mistake.words)]
    outcome = Outcome(mistake)
    with _mounted(directory / "orion" / "full", mistake.full):
        if "submit" in mistake.refused_by:
            outcome.refusals.append(_submit(cluster, place, mistake, words, run))
        outcome.refusals.append(_sbatch(cluster, place, mistake, words, run))
    return outcome


@contextmanager
def _mounted(path: Path, wanted: bool):
    if not wanted:
        yield
        return
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(path)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(path)], check=True)


def _submit(cluster: LocalSlurm, place: Place, mistake: Mistake, words: list[str], run: Path) -> Refusal:
    environment = {**cluster.env, **place.environment()}
    environment["PYTHONPATH"] = f"{place.checkout}:{environment['PYTHONPATH']}"
    command = [
        sys.executable,
        "-P",
        "-m",
        "frontier_llm.cli.main",
        "submit",
        "train_small",
        "--site",
        "planted",
        "--nodes",
        "1",
    ]
    started_s = time.monotonic()
    done = subprocess.run(
        [*command, *words], env=environment, cwd=place.directory, capture_output=True, text=True, timeout=300
    )
    seconds = time.monotonic() - started_s
    queued = done.returncode == 0
    return Refusal("submit", done.returncode, seconds, done.stderr, queued, len(run_dir.steps(run)))


def _sbatch(cluster: LocalSlurm, place: Place, mistake: Mistake, words: list[str], run: Path) -> Refusal:
    options = [
        "--partition=local",
        f"--nodes={mistake.nodes}",
        "--ntasks-per-node=1",
        "--time=20",
        f"--output={place.directory}/job.out",
    ]
    script = str(place.checkout / "slurm" / "train_small.sbatch")
    job_id = cluster.submit(*options, script, *words, cwd=place.checkout, env=place.environment())
    job = cluster.wait_job(job_id, 400)
    times = [datetime.fromisoformat(job[name]) for name in ("StartTime", "EndTime")]
    started = len(run_dir.attempts(run)) > 0
    by = "ranks" if started else "batch script"
    code = int(job["ExitCode"].split(":")[0])
    text = (place.directory / "job.out").read_text(errors="replace")
    return Refusal(by, code, (times[1] - times[0]).total_seconds(), text, started, len(run_dir.steps(run)))


def told(refusal: Refusal, mistake: Mistake, directory: Path) -> str:
    """The line of a refusal that names the mistake, without this run's own folders."""
    line = next((line for line in refusal.text.splitlines() if mistake.message in line), "")
    for name, written in ((directory / "checkout", ""), (directory, ""), (Path(sys.executable), "python")):
        line = line.replace(f"{name}/", written).replace(str(name), written)
    return line.strip().removeprefix("error: ").removeprefix("warning: ")


HEAD = """\
# Planted mistakes

Each row is a mistake of an installation, planted on a local Slurm whose site expects AMD GPUs (`machine: frontier`).
"submit" is `frontier-llm submit`; "batch script" is a shipped script, queued by `sbatch`, before its first `srun`; No row reaches a training step.
Other builds of torch are small packages in front of the CPU build; no MI250X was used. Seconds are those of this test machine: of the whole command for
`submit`, and from the job's start to its end for the others.

Generated by `python -m tests.harness.mistakes --write docs/results/planted_mistakes.md` (Slurm 22.05, as root); `tests/slurm/test_mistakes.py` holds who refuses
and the message.

"""  # noqa: E501


def table(rows: list[tuple[Outcome, Path]]) -> str:
    """The table in Markdown."""
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
