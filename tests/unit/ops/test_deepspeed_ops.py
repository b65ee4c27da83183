"""The DeepSpeed ops that are prebuilt, and the error of a run with --no-jit if one is missing."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

from frontier_llm.cli.main import main
from frontier_llm.config import RunConfig, load_run
from frontier_llm.ops.deepspeed_ops import LOADED_BY, PIN_BACKEND, missing_ops, op_states, run_ops

NATIVE = {PIN_BACKEND: "native"}
TORCH = ".".join(importlib.metadata.version("torch").split(".")[:2])


@pytest.fixture
def deepspeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package named deepspeed with pin_memory prebuilt for CPUs."""
    package = tmp_path / "packages" / "deepspeed"
    (package / "ops" / "pin_memory").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "ops" / "pin_memory" / "pin_memory_op.cpython-311-x86_64-linux-gnu.so").touch()
    record(package, TORCH)
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
    return package


def record(package: Path, torch: str) -> None:
    """Write the record of installed ops as DeepSpeed's setup.py does."""
    ops = {"pin_memory": 1, "fused_adam": 1, "cpu_adam": False}
    lines = [f"installed_ops={ops}", "accelerator_name='cpu'", f"torch_info={{'version': '{torch}'}}"]
    (package / "git_version_info_installed.py").write_text("\n".join(lines))


def pinned(tmp_path: Path, *words: str) -> RunConfig:
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": true}}}')
    return load_run(
        "quickstart", ["optimizer.engine=deepspeed", f"optimizer.deepspeed_config={path}", "ops.no_jit=true", *words]
    )


def test_an_op_counts_only_with_its_library_and_this_torch(deepspeed: Path) -> None:
    assert op_states() == {"fused_adam": "not prebuilt", "cpu_adam": "not prebuilt", "pin_memory": "prebuilt for cpu"}
    record(deepspeed, "2.1")
    assert op_states()["pin_memory"] == f"built for torch 2.1, but torch {TORCH} is installed"
    (deepspeed / "git_version_info_installed.py").unlink()
    assert op_states() == dict.fromkeys(LOADED_BY, "not prebuilt")


def test_ops_list_shows_them(deepspeed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", "list"]) == 0
    shown = capsys.readouterr().out
    assert "pin_memory prebuilt for cpu (loaded by offload" in shown and "fused_adam not prebuilt" in shown


def test_a_run_loads_an_op_only_for_native_pinning(tmp_path: Path) -> None:
    assert run_ops(pinned(tmp_path), {}) == [] and run_ops(load_run("quickstart"), NATIVE) == []
    assert run_ops(pinned(tmp_path), NATIVE) == ["pin_memory"]


def test_a_missing_op_is_refused_before_ranks_start(deepspeed: Path, tmp_path: Path) -> None:
    assert list(missing_ops(pinned(tmp_path), NATIVE)) == []
    on_gpu = list(missing_ops(pinned(tmp_path, "train.device=cuda"), NATIVE))
    assert [problem.where for problem in on_gpu] == ["ops.no_jit"]
    assert list(missing_ops(pinned(tmp_path, "ops.no_jit=false"), NATIVE)) == []
    record(deepspeed, "2.1")
    (problem,) = missing_ops(pinned(tmp_path), NATIVE)
    assert "compile its op pin_memory" in problem.what and "scripts/build_deepspeed_ops.sh" in problem.fix


def test_train_refuses_a_missing_op(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("deepspeed", reason="pip install --no-build-isolation deepspeed==0.19.8")
    monkeypatch.setenv(PIN_BACKEND, "native")
    pinned(tmp_path)
    words = [
        "optimizer.engine=deepspeed",
        f"optimizer.deepspeed_config={tmp_path}/ds.json",
        f"train.run_dir={tmp_path}/run",
    ]
    words += ["data.train=synthetic", "data.validation=null", "data.tokenizer=null", "train.tensorboard=false"]
    monkeypatch.setattr("frontier_llm.ops.deepspeed_ops.op_states", lambda: dict.fromkeys(LOADED_BY, "not prebuilt"))
    assert main(["train", "quickstart", "--no-jit", "--dry-run", *words]) == 1
    said = capsys.readouterr().out
    assert "DeepSpeed would compile its op pin_memory at run time" in said and "scripts/build_deepspeed_ops.sh" in said
