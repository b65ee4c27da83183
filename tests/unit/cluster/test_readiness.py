"""Refusals before a start, decided from facts alone: one row per mistake. Also how launch/job.sh passes the facts."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from frontier_llm.cli.main import main
from frontier_llm.cluster import readiness, slurm
from frontier_llm.cluster.batch import BatchRun
from frontier_llm.cluster.disk import LOG_BYTES
from frontier_llm.cluster.readiness import before_the_queue, problems_of, refuse_unready
from frontier_llm.cluster.site_state import requeue_note, site_problems
from frontier_llm.cluster.sites import Site, load_site
from frontier_llm.config import RunConfig, load_run
from frontier_llm.errors import ConfigError, Problem
from frontier_llm.libraries import LIBRARIES, TORCH_OPS
from frontier_llm.machine.load import load_machine, rates
from frontier_llm.run.installation import InputFacts, Installation, KernelFacts, NotInTime, TorchFacts
from frontier_llm.run.job import Job

ROOT = Path(__file__).resolve().parents[3]
RUN_DIR = Path("/lustre/orion/abc123/scratch/me/run")
NOT_BUILT = Problem("GPU ops", "the ops for gfx90a have not been built", "python setup.py build_ops --arch gfx90a")
GOOD = Installation(
    host="login01",
    executable="/env/bin/python3",
    python="3.12.3",
    missing_modules=(),
    package="/code/frontier_llm",
    package_digest="1",
    torch=TorchFacts(version="2.10.0+rocm7.1", hip="7.1.2", cuda="", path="/env/torch", error=""),
    libraries=dict.fromkeys([*LIBRARIES, TORCH_OPS], ""),
    kernels=KernelFacts(architecture="gfx90a", digest="12", problems=(), built=("gfx90a",)),
    providers={"flash_attn": "the flash-attn package is not installed", "apex": "", "reference": ""},
    inputs=InputFacts(problems=(), run_dir_error="", run_dir_free_bytes=10**15),
)


def run(*words: str) -> RunConfig:
    return load_run("train_small", ["machine=frontier", f"train.run_dir={RUN_DIR}", *words])


def refusals(facts: Installation, *words: str, site: str = "frontier", directory: Path = RUN_DIR) -> str:
    return "\n".join(map(str, problems_of(facts, load_site(site), run(*words), directory)))


def with_torch(facts: Installation = GOOD, **fields: str) -> Installation:
    return replace(facts, torch=replace(facts.torch, **fields))


def test_a_complete_installation_is_accepted() -> None:
    assert refusals(GOOD) == ""
    assert list(problems_of(GOOD, load_site("frontier"))) == []


NO_KERNELS = replace(
    GOOD, kernels=KernelFacts(architecture="gfx90a", digest="", problems=(NOT_BUILT,), built=("sm_90",))
)
UNBUILT = dict.fromkeys(LIBRARIES, "")
MISTAKES = {
    "no torch": (
        with_torch(version="", hip="", error="ModuleNotFoundError: No module named 'torch'"),
        "torch: /env/bin/python3 cannot import torch: ModuleNotFoundError: No module named 'torch'",
    ),
    "CPU torch": (
        with_torch(version="2.10.0+cpu", hip=""),
        "has torch 2.10.0+cpu for CPUs, but frontier has amd GPUs (MI250X GCD)",
    ),
    "CUDA torch": (
        with_torch(version="2.10.0", hip="", cuda="12.8"),
        "has torch 2.10.0 for CUDA 12.8, but frontier has amd GPUs",
    ),
    "an old torch": (with_torch(version="2.9.1+rocm6.4"), "has torch 2.9.1+rocm6.4; at least 2.10 is needed"),
    "another torch than the extension's": (
        replace(GOOD, libraries={TORCH_OPS: f"{TORCH_OPS} was built for torch 2.9.1, but torch 2.10.0 is loaded"}),
        "libfrontier_ops.so was built for torch 2.9.1, but torch 2.10.0 is loaded",
    ),
    "no extension": (
        replace(GOOD, libraries={name: f"{name} has not been built" for name in GOOD.libraries}),
        "libstore_server.so, libfrontier_ops.so has not been built",
    ),
    "kernels of another architecture": (
        NO_KERNELS,
        "the ops for gfx90a have not been built; only those for sm_90 are built",
    ),
    "requirements": (replace(GOOD, missing_modules=("safetensors", "tokenizers")), "has no safetensors, tokenizers"),
    "a torch that breaks the package": (
        replace(GOOD, ops_error="AttributeError: module 'torch' has no attribute 'Tensor'", kernels=None, providers={}),
        "frontier_llm.ops cannot be imported with torch 2.10.0+rocm7.1 for ROCm 7.1.2",
    ),
    "missing data": (
        replace(
            GOOD, inputs=InputFacts((Problem("data.train", "tokens.bin: no such file", "check the path"),), "", 10**15)
        ),
        "data.train: tokens.bin: no such file",
    ),
    "a full run directory": (
        replace(GOOD, inputs=InputFacts((), "", 10**6)),
        "but /lustre/orion/abc123/scratch/me/run has 976.6 KiB free",
    ),
    "a run directory that cannot be written": (
        replace(GOOD, inputs=InputFacts((), "/lustre: No space left on device", 0)),
        "train.run_dir: cannot be written: /lustre: No space left on device",
    ),
}


@pytest.mark.parametrize("facts, message", MISTAKES.values(), ids=MISTAKES)
def test_each_mistake_is_refused(facts: Installation, message: str) -> None:
    said = refusals(facts)
    assert message in said and "fix: " in said


def test_each_problem_is_said_once_and_all_are_said() -> None:
    wrong = replace(NO_KERNELS, libraries={**GOOD.libraries, TORCH_OPS: f"{TORCH_OPS} has not been built"})
    said = refusals(with_torch(wrong, version="2.9.0", hip="", cuda="12.8"))
    assert [
        said.count(text) for text in ("at least 2.10", "for CUDA 12.8", "libfrontier_ops.so has not", "only those for")
    ] == [
        1,
        1,
        1,
        1,
    ]


def test_a_run_directory_elsewhere_is_refused_with_the_right_place() -> None:
    said = refusals(GOOD, directory=Path("/ccs/home/me/run"))
    assert "/ccs/home/me/run is not on /lustre/orion" in said and "/lustre/orion/$PROJECT/scratch/$USER" in said
    assert refusals(GOOD, site="lumi", directory=Path("/users/me/run")).startswith(
        "train.run_dir: /users/me/run is not on /scratch or"
    )


def test_back_ends_are_asked_for_only_if_the_run_names_them() -> None:
    assert "ops.attention=flash_attn: the flash-attn package is not installed" in refusals(
        GOOD, "ops.attention=flash_attn"
    )
    assert refusals(GOOD, "ops.norm=apex") == ""
    everything = [
        f"ops.{group}=reference"
        for group in ("attention", "norm", "rope", "activation", "cross_entropy", "adamw", "linear")
    ]
    assert refusals(NO_KERNELS, *everything, "ops.experts=reference", "ops.accumulate=reference") == ""
    assert refusals(NO_KERNELS, "ops.allow_fallback=true") == ""
    assert "only those for sm_90 are built" in refusals(NO_KERNELS, "ops.allow_fallback=true", "ops.norm=triton")


def test_a_run_on_cpus_needs_no_gpu() -> None:
    cpu = with_torch(replace(GOOD, kernels=NO_KERNELS.kernels), version="2.10.0+cpu", hip="")
    assert refusals(cpu, "train.device=cpu") == ""
    assert "to train on CPUs instead, set train.device=cpu" in refusals(cpu)
    assert refusals(cpu, site="local") == ""  # a machine that expects no particular GPU


def test_a_run_that_saves_nothing_needs_no_space() -> None:
    nearly_full = replace(GOOD, inputs=InputFacts((), "", LOG_BYTES))
    assert refusals(nearly_full, "train.save_interval=0", "train.save_final=false") == ""


def test_the_oldest_torch_is_that_of_setup_py() -> None:
    assert f"OLDEST_TORCH = {readiness.OLDEST_TORCH}" in (ROOT / "setup.py").read_text()


def test_op_groups_are_all_that_name_a_back_end() -> None:
    assert {getattr(load_run("train_small").ops, group) for group in readiness._op_groups(run())} == {"auto"}


def test_doctor_writes_the_method_of_adding_weight_gradients_for_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(slurm, "cluster_name", lambda: "frontier")
    monkeypatch.setenv("FRONTIER_LLM_SITE", "frontier")
    monkeypatch.setenv("FRONTIER_LLM_ROOT", str(ROOT))
    facts = GOOD
    monkeypatch.setattr(readiness, "_ask_here", lambda site, config: facts)
    emitted = tmp_path / "mine.yaml"
    command = ["doctor", "--site", "frontier", "--installation", "--emit-machine", str(emitted)]
    assert main(command) == 2
    assert "sees no GPU here" in capsys.readouterr().err
    assert not emitted.exists()
    facts = replace(GOOD, weight_gradients="fp32-product")
    assert main(command) == 0
    assert "weight gradients with the method fp32-product" in capsys.readouterr().out
    machine = load_machine(str(emitted))
    assert rates(machine).weight_gradients == "fp32-product"
    assert rates(machine).peak_flops == rates(load_machine("frontier")).peak_flops


def planted_site(tmp_path: Path, modules: str = "[]") -> Path:
    text = (
        f"name: planted\nmachine: local\ncluster: here\ngpus_per_node: 1\ntasks_per_node: 1\ncpus_per_task: "
        f"1\nmodules: {modules}\n"
    )
    (tmp_path / "planted.yaml").write_text(text)
    return tmp_path / "planted.yaml"


def test_the_interpreter_of_the_job_is_asked_with_the_modules_of_the_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`module` is a function of the login shell. In this test, `module load rocm/9` sets a variable for the
    interpreter.
    """
    monkeypatch.setattr(slurm, "cluster_name", lambda: "here")
    monkeypatch.setenv(
        "BASH_FUNC_module%%", '() { [[ "$2" != gone/* ]] && export PYTHONPATH="' + str(tmp_path) + '"; }'
    )
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('a torch of the module')")
    config = load_run("train_small", ["machine=local", f"train.run_dir={tmp_path}/run"])
    answer = before_the_queue(config, load_site(str(planted_site(tmp_path, "[rocm/9]"))), tmp_path / "run", {})
    assert re.search("cannot import torch: ImportError: a torch of the module", str(answer.problems[0]))
    answer = before_the_queue(config, load_site(str(planted_site(tmp_path, "[gone/1]"))), tmp_path / "run", {})
    said = "\n".join(map(str, answer.problems))
    assert "the module gone/1 cannot be loaded" in said and "correct slurm/sites/planted.yaml" in said
    assert not (tmp_path / "run").exists()


def test_a_module_or_image_that_is_gone_is_named_with_the_nearest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "cluster_name", lambda: "here")
    listed = "/modules:\\nrocm/\\nrocm/6.3.3\\nrocm/7.0.1(default)\\nPrgEnv-cray/8.6.0\\n"
    monkeypatch.setenv("BASH_FUNC_module%%", f"() {{ printf '{listed}'; }}")
    config = load_run("train_small", ["machine=local", f"train.run_dir={tmp_path}/run"])

    def problems(modules: str) -> list[str]:
        site = load_site(str(planted_site(tmp_path, modules)))
        return [str(problem) for problem in site_problems(site)]

    assert problems("[rocm, PrgEnv-cray, rocm/7.0.1]") == []
    (gone,) = problems("[rocm, rocm/7.0.0]")
    assert "planted has no module rocm/7.0.0" in gone and "the nearest is rocm/7.0.1" in gone
    answer = before_the_queue(config, load_site(str(planted_site(tmp_path, "[rocm/7.0.0]"))), tmp_path / "run", {})
    assert [str(problem) for problem in answer.problems] == [gone]
    images = tmp_path / "images"
    (images / "torch-2.12").mkdir(parents=True)
    (images / "torch-2.12" / "torch-2.12.sif").touch()
    monkeypatch.setenv("FRONTIER_LLM_CONTAINER", str(images / "torch-2.10" / "torch-2.10.sif"))
    (gone,) = problems("[]")
    assert "no file" in gone and f"the nearest is {images}/torch-2.12/torch-2.12.sif" in gone


@pytest.mark.parametrize(("setting", "noted"), [("JobRequeue              = 0", True), ("JobRequeue = 1", False)])
def test_a_site_that_does_not_requeue_is_pointed_out(
    setting: str, noted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "call", lambda command, timeout_s: f"JobFileAppend = 0\n{setting}\nKillWait = 30\n")
    assert ("JobRequeue=0" in requeue_note()) is noted


def test_an_archive_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "cluster_name", lambda: "here")
    monkeypatch.setenv("FRONTIER_LLM_ENV_ARCHIVE", f"{tmp_path}/env.tar.gz")
    site = load_site(str(planted_site(tmp_path)))
    answer = before_the_queue(load_run("train_small"), site, tmp_path / "run", {})
    assert f"no file {tmp_path}/env.tar.gz" in str(answer.problems[0])
    (tmp_path / "env.tar.gz").touch()
    config = load_run("train_small", ["machine=local", f"train.run_dir={tmp_path}/run"])
    answer = before_the_queue(config, site, tmp_path / "run", {})
    assert answer.problems == () and "is unpacked only in the job" in answer.open_points[0]


def test_a_job_on_another_cluster_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "there")
    allocation = slurm.Allocation("1", ("n0",), "n0", tasks_per_node=1, cpus_per_task=1)
    job = Job(run_dir=str(tmp_path), words=("x",), site="planted", nodes=1, warning_s=60.0)
    site = load_site(str(planted_site(tmp_path)))
    batch = BatchRun(job=job, config=run(), site=site, allocation=allocation)
    with pytest.raises(ConfigError, match="this job runs on cluster there, but planted is cluster here"):
        refuse_unready(batch)

    def too_slow(site: Site, config: RunConfig) -> Installation:
        raise NotInTime("did not respond within 600 s")

    monkeypatch.setenv("SLURM_CLUSTER_NAME", "here")
    monkeypatch.setattr(readiness, "_ask_here", too_slow)
    refuse_unready(batch)  # a slow file system does not end a chain of jobs: the ranks check their installation, too
    assert "the installation is not checked: did not respond within 600 s" in capsys.readouterr().err
