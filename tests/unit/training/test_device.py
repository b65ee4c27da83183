"""The device of a rank comes from the machine file.

If it is missing, an error names the torch build, the host and the expected device.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
import torch

from frontier_llm import libraries
from frontier_llm.config import RunConfig, load_run
from frontier_llm.config.load import find_file
from frontier_llm.errors import FrontierError
from frontier_llm.machine.load import load_machine, own_stack, rates
from frontier_llm.ops import manifest
from frontier_llm.run.job_secret import VARIABLE
from frontier_llm.run.launchers import RankEnv
from frontier_llm.run.rank_env import node_name
from frontier_llm.topology.engine_rules import in_flight
from frontier_llm.training import device, join
from frontier_llm.training.device import DeviceError, choose_device, find_device
from tests.harness.gpus import pretend_gpus, pretend_torch


def place(local_rank: int = 0, ranks: int = 8) -> RankEnv:
    return RankEnv(local_rank, ranks, local_rank, ranks, "n0", "n0", 23456, "slurm")


def run(*words: str) -> RunConfig:
    return load_run("quickstart", ["train.device=auto", *words])


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
@pytest.mark.parametrize(
    ("machine", "torch_for", "build", "expected"),
    [
        ("frontier", "none", "torch 2.10.0 for CPUs", "an AMD GPU (gfx90a) on machine=frontier"),
        ("frontier", "nvidia", "torch 2.10.0 for CUDA 12.8", "an AMD GPU (gfx90a) on machine=frontier"),
        ("mi300x", "none", "torch 2.10.0 for CPUs", "an AMD GPU (gfx942) on machine=mi300x"),
        ("h200", "amd", "torch 2.10.0 for ROCm 7.0", "an NVIDIA GPU (sm_90) on machine=h200"),
        ("a100", "none", "torch 2.10.0 for CPUs", "an NVIDIA GPU (sm_80) on machine=a100"),
    ],
)
def test_a_torch_of_another_vendor_is_refused(
    monkeypatch: pytest.MonkeyPatch, machine: str, torch_for: str, build: str, expected: str, wanted: str
) -> None:
    pretend_torch(monkeypatch, torch_for)
    with pytest.raises(DeviceError) as caught:
        choose_device(run(f"machine={machine}", f"train.device={wanted}"), place(), None)
    said = str(caught.value)
    assert build in said and node_name() in said and expected in said and "build of torch" in said
    assert choose_device(run(f"machine={machine}", "train.device=cpu"), place(), None).type == "cpu"


@pytest.mark.parametrize(
    ("machine", "architecture"),
    [("frontier", "gfx90a:sramecc+:xnack-"), ("mi300x", "gfx942"), ("h100", "sm_90"), ("a100", "sm_86")],
)
def test_the_gpu_of_the_machine_file_is_taken(monkeypatch: pytest.MonkeyPatch, machine: str, architecture: str) -> None:
    pretend_gpus(monkeypatch, architecture=architecture)
    found = find_device(run(f"machine={machine}"), place(3), None)
    assert found.device == torch.device("cuda", 3) and found.error is None
    assert found.facts["device"] == {"sm_86": "sm_80"}.get(architecture, architecture.split(":")[0])


@pytest.mark.parametrize(
    ("machine", "architecture"), [("frontier", "gfx942"), ("mi300x", "gfx90a"), ("a100", "sm_90"), ("h100", "sm_80")]
)
def test_a_gpu_of_another_architecture_is_refused(
    monkeypatch: pytest.MonkeyPatch, machine: str, architecture: str
) -> None:
    pretend_gpus(monkeypatch, architecture=architecture)
    with pytest.raises(
        DeviceError,
        match=rf"{architecture} on {node_name()} has the architecture {architecture}, but .*machine={machine}",
    ):
        choose_device(run(f"machine={machine}"), place(), None)


def test_no_gpu_is_refused_where_one_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, count=0)
    expected = re.escape(
        f"torch 2.10.0 for ROCm 7.0 on {node_name()} sees no GPU, but train.device=auto means an AMD GPU (gfx90a)"
    )
    with pytest.raises(DeviceError, match=expected):
        choose_device(run("machine=frontier"), place(), None)
    with pytest.raises(DeviceError, match=r"sees no GPU, but train\.device=cuda needs one"):
        choose_device(run("train.device=cuda"), place(), None)
    assert choose_device(run(), place(), None).type == "cpu"


def test_a_machine_that_expects_no_gpu_takes_any(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rehearsal = tmp_path / "rehearsal.yaml"
    rehearsal.write_text("base: frontier\ndevice: {vendor: none}\n")
    for machine in ("local", str(rehearsal)):
        assert choose_device(run(f"machine={machine}"), place(), None).type == "cpu"
        with monkeypatch.context() as other:
            pretend_gpus(other, architecture="sm_90")
            assert choose_device(run(f"machine={machine}"), place(2), None) == torch.device("cuda", 2)


def test_a_machine_file_without_an_architecture_takes_any_of_the_vendor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = find_file("mi250", "machines").read_text().replace("  architecture: gfx90a\n", "")
    (tmp_path / "mine.yaml").write_text(f"environment: mi250\n{text}")
    config = run(f"machine={tmp_path}/mine.yaml")
    with monkeypatch.context() as amd:
        pretend_gpus(amd, architecture="gfx1100")
        assert choose_device(config, place(), None).type == "cuda"
    pretend_gpus(monkeypatch, architecture="sm_90")
    with pytest.raises(DeviceError, match=r"cannot use AMD GPUs, but train\.device=auto means an AMD GPU on machine="):
        choose_device(config, place(), None)


def test_a_gpu_that_does_not_compute_is_an_error_of_this_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(index: int) -> None:
        raise RuntimeError("HIP error: unspecified launch failure\nCompile with ...")

    pretend_gpus(monkeypatch)
    monkeypatch.setattr(device, "_use", broken)
    found = find_device(run("machine=frontier"), place(), None)
    assert found.device is None and found.facts["device"] == "HIP error: unspecified launch failure"
    assert f"the GPU of rank 0 on {node_name()} cannot be used: HIP error: unspecified launch failure\n    fix:" in str(
        found.error
    )


@pytest.mark.parametrize(
    ("machine", "architecture", "expected"),
    [
        ("local", "gfx90a", "one"),
        ("local", "gfx942", "many"),
        ("mi250", "gfx90a", "one"),
        ("h100", "sm_90", "many"),
        ("stated.yaml", "gfx90a", "one"),
        ("measured.yaml", "gfx90a", "many"),
    ],
)
def test_the_device_decides_how_many_communications_are_in_flight(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, machine: str, architecture: str, expected: str
) -> None:
    for name, tag in (("stated", "published"), ("measured", "measured")):
        many = f"in_flight: {{mode: many, tag: {tag}, source: a hang test}}"
        (tmp_path / f"{name}.yaml").write_text(f"base: frontier\n{many}\n")
    pretend_gpus(monkeypatch, architecture=architecture)
    config = run(f"machine={tmp_path / machine if machine.endswith('.yaml') else machine}")
    found = find_device(config, place(), None)
    assert in_flight(config, found.architecture) == expected
    if machine != "local":  # the planner uses the machine file's architecture, for this program's own stack
        numbers = load_machine(config.machine)
        assert rates(numbers, own_stack(numbers)).one_in_flight == (expected == "one")


def test_many_by_name_is_used_on_gfx90a_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend_gpus(monkeypatch)
    config = run("machine=local", "comm.in_flight=many")
    assert in_flight(config, find_device(config, place(), None).architecture) == "many"
    assert "comm.in_flight=many may hang on gfx90a: ROCm/rccl#2191" in capsys.readouterr().err


def test_fsdp_is_refused_on_a_gfx90a_that_no_machine_file_names(monkeypatch: pytest.MonkeyPatch) -> None:
    config = run("machine=local", "parallel.data_mode=fsdp")
    pretend_gpus(monkeypatch)
    assert "only one communication may be in flight on gfx90a devices" in str(find_device(config, place(), None).error)
    pretend_gpus(monkeypatch, architecture="gfx942")
    assert find_device(config, place(), None).error is None


def test_facts_tell_torches_kernels_and_libraries_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend_gpus(monkeypatch)
    monkeypatch.setattr(manifest, "GPU_DIR", tmp_path)
    monkeypatch.setattr(libraries, "DIRECTORY", tmp_path)
    seen = [find_device(run("machine=frontier"), place(rank), None).facts for rank in range(2)]
    assert seen[0] == seen[1] and seen[0]["kernels"] == "none"
    (tmp_path / "gfx90a").mkdir()
    for change in (
        lambda: (tmp_path / "gfx90a" / "manifest.json").write_text("{}"),
        lambda: (tmp_path / "gfx90a" / "manifest.json").write_text("[]"),
        lambda: (tmp_path / libraries.TORCH_OPS).write_bytes(b"1"),
        lambda: (tmp_path / libraries.TORCH_OPS).write_bytes(b"2"),
        lambda: pretend_torch(monkeypatch, "amd", "2.10.1"),
    ):
        change()
        seen.append(find_device(run("machine=frontier"), place(), None).facts)
    assert len({tuple(sorted(facts.items())) for facts in seen}) == 6


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, count=4)
    for local_rank in (0, 7):  # ranks with a GPU end with this reason too, not only ranks without a GPU
        with pytest.raises(FrontierError, match="8 ranks on n0, where torch sees 4 GPUs"):
            choose_device(run("train.device=cuda"), place(local_rank), None)


def test_one_gpu_that_several_ranks_see_by_mistake_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, os.urandom(32).hex())
    config = run("train.device=cuda")
    folder = join._Job(config, place(0, 2)).folder
    pretend_gpus(monkeypatch, count=1)
    try:
        assert choose_device(config, place(0, 2), folder).index == 0
        assert choose_device(config, place(0, 2), folder).index == 0  # the same rank joins again
        with monkeypatch.context() as another_process:
            another_process.setattr(device, "_LOCKS", {})
            with pytest.raises(
                FrontierError,
                match=r"local rank 1 on n0 sees one GPU \(bus 0xc1\), which another rank of this job already uses",
            ):
                choose_device(config, place(1, 2), folder)
            pretend_gpus(monkeypatch, count=1, bus=0xC6)
            assert choose_device(config, place(1, 2), folder).index == 0  # the other rank gets its own GPU
            for lock in device._LOCKS.values():
                lock.close()
    finally:
        for path in [path for path in device._LOCKS if Path(path).parent == folder]:
            device._LOCKS.pop(path).close()
        shutil.rmtree(folder)
