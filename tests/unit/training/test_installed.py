"""The facts of an interpreter as `submit` collects them: in a separate process, with stub packages before the real
packages.
"""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from frontier_llm.errors import FrontierError
from frontier_llm.libraries import LIBRARIES, TORCH_OPS
from frontier_llm.ops import torch_linear
from frontier_llm.ops.providers import PROVIDERS
from frontier_llm.run.installation import Installation, ask, of_this_interpreter
from frontier_llm.run.rank_env import environment
from frontier_llm.training.installed import REQUIREMENTS, installation, provider_facts, torch_facts

ROOT = Path(__file__).resolve().parents[3]


def facts_with(planted: Path, files: dict[str, str], architecture: str | None = None) -> Installation:
    for name, text in files.items():
        (planted / name).parent.mkdir(parents=True, exist_ok=True)
        (planted / name).write_text(text)
    return of_this_interpreter(architecture, {**environment(), "PYTHONPATH": f"{planted}:{ROOT}"})


def test_the_facts_of_this_interpreter_survive_the_way_through_json() -> None:
    facts = installation("gfx90a")
    assert Installation.from_json(facts.as_json()) == facts
    assert facts.as_json().count("\n") == 0
    assert (facts.torch.version, facts.torch.vendor, facts.missing_modules, facts.ops_error) == (
        torch.__version__,
        "none",
        (),
        "",
    )
    assert set(facts.libraries) == {*LIBRARIES, TORCH_OPS} and set(facts.libraries.values()) == {""}
    assert facts.kernels is not None and facts.kernels.architecture == "gfx90a"
    assert facts.providers["cpu"] == "" and "not installed" in facts.providers["flash_attn"]
    assert torch_facts() == facts.torch


@pytest.mark.parametrize(
    ("architecture", "has_gpu", "method"),
    [("gfx90a", True, "fp32-product"), ("gfx90a", False, ""), (None, True, "")],
)
def test_the_method_of_adding_weight_gradients_is_tested_on_a_gpu(
    architecture: str | None, has_gpu: bool, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    methods = {(torch.bfloat16, torch.device("cuda")): "fp32-product"}
    monkeypatch.setattr(torch_linear, "weight_gradient_method", lambda *asked: methods[asked])
    facts = installation(architecture)
    assert facts.weight_gradients == method
    assert Installation.from_json(facts.as_json()) == facts


def test_a_broken_optional_package_is_one_fact_among_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> str:
        raise RuntimeError("0 active drivers\nmore lines")

    monkeypatch.setitem(PROVIDERS, "apex", replace(PROVIDERS["apex"], missing=broken))
    facts = provider_facts()
    assert facts["apex"] == "apex cannot be examined: RuntimeError: 0 active drivers"
    assert facts["cpu"] == ""


def test_an_interpreter_without_torch_gives_the_other_facts(tmp_path: Path) -> None:
    facts = facts_with(
        tmp_path,
        {"torch/__init__.py": "raise ImportError('libamdhip64.so.7: cannot open shared object file')"},
        "gfx90a",
    )
    assert facts.torch.error == "ImportError: libamdhip64.so.7: cannot open shared object file"
    assert (facts.torch.version, facts.kernels, facts.providers) == ("", None, {})
    assert facts.libraries["libsample_index.so"] == "" and TORCH_OPS not in facts.libraries


def test_a_torch_for_another_vendor_is_told_by_its_build(tmp_path: Path) -> None:
    files = {
        "torch/__init__.py": "from . import version\n__version__ = '2.10.0+cu128'",
        "torch/version.py": "cuda = '12.8'\nhip = None",
    }
    facts = facts_with(tmp_path, files)
    assert (facts.torch.vendor, facts.torch.describe()) == ("nvidia", "torch 2.10.0+cu128 for CUDA 12.8")
    assert facts.ops_error  # the stub of torch has no tensors
    assert replace(facts.torch, hip="7.1", cuda="").vendor == "amd"


def test_what_a_module_prints_is_no_fact(tmp_path: Path) -> None:
    facts = facts_with(tmp_path, {"torch/__init__.py": "print('{\"hello\": 1}')\n__version__ = '9'"})
    assert facts.torch.version == "9"


def test_the_facts_need_no_requirement(tmp_path: Path) -> None:
    planted = {f"{name}.py": "raise ImportError('planted')" for name in ("pydantic", "yaml")}
    facts = facts_with(tmp_path, {**planted, "sitecustomize.py": "import sys\nsys.modules['rich'] = None\n"})
    assert facts.ops_error.endswith("planted")
    assert (facts.torch.version, facts.missing_modules) == (torch.__version__, ("rich",))


def test_an_interpreter_that_gives_no_facts_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(FrontierError, match="cannot be started: No such file"):
        ask((str(tmp_path / "python"),), environment(), None)
    with pytest.raises(FrontierError, match="planted death"):
        ask((sys.executable, "-c", "raise SystemExit('planted death')"), environment(), None)
    with pytest.raises(FrontierError, match="did not respond within 0 s"):
        ask((sys.executable, "-c", "import time; time.sleep(60)"), environment(), None, timeout_s=0.1)


def test_requirements_and_libraries_are_those_of_setup_py() -> None:
    text = (ROOT / "setup.py").read_text()
    (packages,) = re.findall(r"install_requires=(\[.*?\])", text)
    modules = {"pyyaml": "yaml"}
    names = [re.split("[<>=]", package)[0] for package in ast.literal_eval(packages)]
    assert {modules.get(name, name) for name in names} == set(REQUIREMENTS)
    assert set(re.findall(r'\("(lib\w+)", "csrc', text)) == {name.removesuffix(".so") for name in LIBRARIES}
