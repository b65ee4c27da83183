"""Executes the examples of docs/extending.md. Each example extends the program through a documented interface, and the
training results must equal the serial oracle's.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from frontier_llm.certificate.axis_types.check import check_axis_types
from frontier_llm.certificate.section import CertificateSection, SectionVerdict
from frontier_llm.cli.checks import check
from frontier_llm.config import load_run
from frontier_llm.config.plugins import import_plugins
from frontier_llm.errors import ConfigError, LayoutError
from frontier_llm.interop.huggingface import HuggingFaceModel, export_huggingface
from frontier_llm.topology.plan import make_plan
from tests.docs.pages import ROOT
from tests.harness.pool import RankPool
from tests.oracle.optimizers import momentum
from tests.parity.cases import STEPS, Case
from tests.parity.compare import differences, gather
from tests.parity.three_steps import RankResult, train_case
from tests.parity.witness import witness

TOLERANCE = 1e-11


def python_of_the_page() -> list[str]:
    return re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "docs" / "extending.md").read_text(encoding="utf-8"), flags=re.M | re.S
    )


@pytest.fixture(scope="module")
def extensions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the page's Python to one file, as a user would."""
    blocks = python_of_the_page()
    assert len(blocks) == 7
    path = tmp_path_factory.mktemp("extensions") / "my_extensions.py"
    path.write_text("\n\n".join(blocks), encoding="utf-8")
    return path


def train_case_with(rank: int, plugin: str, case: Case) -> RankResult:
    """Run a case on one rank that has imported the plugin."""
    import_plugins([plugin])
    return train_case(rank, case)


def further_losses(rank: int, plugin: str, case: Case) -> list[float]:
    """Return the registered loss term of three steps, as the step reports it."""
    from frontier_llm.training.step import train_step
    from tests.parity.three_steps import build

    import_plugins([plugin])
    state = build(rank, case)
    return [train_step(state).further_losses["small-activations"] for _ in range(STEPS)]


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["gpt", "llama"], ids=["tied", "untied"])
def test_a_schedule_with_another_placement_trains_as_the_oracle(ranks: RankPool, extensions: Path, family: str) -> None:
    case = Case(family, pp=2, dp=2, schedule="v-gpipe", settings=("parallel.chunks=2",))
    ours = gather(ranks.run(case.world_size, train_case_with, str(extensions), case))
    assert differences(ours, witness(case.serial(), ours.initial)) == []


def axis_types_with(rank: int, plugin: str, case: Case) -> CertificateSection:
    """Check a case's axis types in a process that has imported the plugin."""
    import_plugins([plugin])
    return check_axis_types(case.config(), case.world_size)


def test_a_loss_term_that_forgets_a_sum_is_refused_with_its_line(ranks: RankPool, extensions: Path) -> None:
    case = Case("llama", tp=2, sequence_parallel=True, settings=("train.loss_weights={activation-norm: 0.5}",))
    section = ranks.run(1, axis_types_with, str(extensions), case)[0]
    lines = extensions.read_text(encoding="utf-8").splitlines()
    summed = 1 + lines.index("    square = x.double().square().sum()")
    assert section.verdict is SectionVerdict.REFUSED
    assert section.problems[0].where == f"{extensions}:{summed} (activation_norm)"
    assert f"partial over tp (P), and {extensions}:{summed + 1}" in section.problems[0].what


@pytest.mark.thorough
def test_an_optimizer_with_one_state_trains_as_the_oracle(ranks: RankPool, extensions: Path) -> None:
    case = Case("llama", tp=2, dp=2, settings=("optimizer.name=momentum",))
    ours = gather(ranks.run(case.world_size, train_case_with, str(extensions), case))
    assert differences(ours, witness(case, ours.initial, momentum(case.config().optimizer.betas[0]))) == []


@pytest.mark.thorough
def test_a_loss_term_is_the_same_on_every_layout_and_changes_the_gradient(ranks: RankPool, extensions: Path) -> None:
    weighted = ("train.loss_weights={small-activations: 0.5}",)
    serial = Case("llama", settings=weighted)
    plain = gather(ranks.run(1, train_case_with, str(extensions), serial.serial()))
    alone = gather(ranks.run(1, train_case_with, str(extensions), serial))
    assert differences(alone, plain) != []  # the term has an effect
    terms = ranks.run(1, further_losses, str(extensions), serial)[0]
    for case in (
        Case("llama", pp=2, dp=2, settings=weighted),
        Case("llama", tp=2, pp=2, sequence_parallel=True, settings=weighted),
    ):
        ours = gather(ranks.run(case.world_size, train_case_with, str(extensions), case))
        assert differences(ours, alone) == [], str(case)
        for reported in ranks.run(case.world_size, further_losses, str(extensions), case):
            assert reported == pytest.approx(terms, rel=TOLERANCE)


def test_an_observer_hears_of_evaluations_on_a_data_source_of_its_own(tmp_path: Path) -> None:
    """The test starts its own process, because a registration cannot be undone."""
    (tmp_path / "mine.py").write_text(
        next(block for block in python_of_the_page() if "observers" in block), encoding="utf-8"
    )
    source: dict[str, Any] = {}
    exec(next(block for block in python_of_the_page() if "IndexedWriter" in block), source)  # the page's own example
    source["write_sums"](tmp_path / "sums", 12)
    run = {
        "plugins": [str(tmp_path / "mine.py")],
        "model": {"base": "llama-tiny", "sequence_length": 64},
        "batch": {"global_batch": 2},
        "data": {"train": str(tmp_path / "sums"), "validation": str(tmp_path / "sums")},
        "train": {
            "run_dir": str(tmp_path / "run"),
            "steps": 2,
            "eval_interval": 1,
            "eval_samples": 2,
            "device": "cpu",
            "tensorboard": False,
            "save_final": False,
            "observers": ["announcements"],
        },
    }
    (tmp_path / "run.yaml").write_text(json.dumps(run), encoding="utf-8")
    subprocess.run(
        [sys.executable, "-m", "frontier_llm.cli.main", "train", str(tmp_path / "run.yaml")],
        check=True,
        cwd=ROOT,
        timeout=120,
    )
    lines = (tmp_path / "run" / "announcements.txt").read_text(encoding="utf-8").splitlines()
    assert [line.split(":")[0] for line in lines][-2:] == ["after step 1", "after step 2"]


def refusal(rank: int, plugin: str, case: Case) -> str:
    """Return the error of a layout's check. Runs in another process, because a registration cannot be undone."""
    import_plugins([plugin])
    with pytest.raises(LayoutError) as error:
        make_plan(case.config(), case.world_size)
    return str(error.value)


def test_names_that_nobody_registered_are_refused_with_the_nearest(ranks: RankPool, extensions: Path) -> None:
    case = Case("gpt", pp=2, schedule="v-gpip", settings=("parallel.chunks=2",))
    assert "v-gpipe" in ranks.run(1, refusal, str(extensions), case)[0]


def compare_and_export_starcoder2(rank: int, plugin: str, folder: Path) -> None:
    """Compare an imported model with `transformers`, export it, and compare every tensor of the export."""
    import transformers

    from tests.unit.interop.huggingface.test_parity import compare, imported

    import_plugins([plugin])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "theirs", dtype=torch.float32)
    compare(imported(folder / "theirs", "fp32"), theirs, 1e-5)
    exported = export_huggingface(HuggingFaceModel(folder / "theirs"), folder / "ours", torch.float32)
    assert exported.model_type == "starcoder2"
    back = transformers.AutoModelForCausalLM.from_pretrained(folder / "ours")
    assert all(torch.equal(tensor, theirs.state_dict()[name]) for name, tensor in back.state_dict().items())


@pytest.mark.thorough
def test_a_family_of_hugging_face_computes_what_transformers_computes(
    ranks: RankPool, extensions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    from tests.unit.interop.huggingface.families import VARIANTS, llama, saved

    monkeypatch.setitem(VARIANTS, "starcoder2", lambda: llama("Starcoder2", norm_epsilon=1e-5, sliding_window=5))
    saved("starcoder2", tmp_path / "theirs")
    command = [sys.executable, "-m", "frontier_llm", "checkpoint", "import-hf", str(tmp_path / "theirs")]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (
        refused.returncode
        and "'Starcoder2ForCausalLM' is not supported" in refused.stderr
        and "--plugin MODULE" in refused.stderr
    )
    shown = subprocess.run([*command, "--plugin", str(extensions)], capture_output=True, text=True, check=True)
    assert "norm: layernorm" in shown.stdout and "sliding_window: 5" in shown.stdout
    ranks.run(1, compare_and_export_starcoder2, str(extensions), tmp_path)


def test_a_plugin_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no plugin file .*nowhere\.py"):
        load_run("quickstart", [f"plugins=[{tmp_path / 'nowhere.py'}]"])


def test_a_loss_that_nobody_registered_is_refused_before_ranks_start(tmp_path: Path) -> None:
    config = load_run("train_small", ["train.loss_weights={small-activation: 0.1}", f"train.run_dir={tmp_path}/run"])
    with pytest.raises(ConfigError, match="'small-activation' is not a registered loss"):
        check(config, 4)
