"""The DeepSpeed JSON is passed on and completed from the run file. A key in which the two disagree is refused by
name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from frontier_llm.config import BatchConfig, OptimizerConfig, ParallelConfig, RunConfig, load_model
from frontier_llm.config.deepspeed import deepspeed_settings
from frontier_llm.errors import ConfigError


def settings(tmp_path: Path, content: Any) -> dict[str, Any]:
    path = tmp_path / "ds.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    config = RunConfig(
        model=load_model("llama-tiny"),
        batch=BatchConfig(global_batch=8, micro_batch=2),
        parallel=ParallelConfig(zero=1),
        optimizer=OptimizerConfig(engine="deepspeed", deepspeed_config=str(path)),
    )
    return deepspeed_settings(config, microbatches=2)


def test_what_the_run_file_decides_is_filled_in_and_the_rest_is_passed_on(tmp_path: Path) -> None:
    given = {
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 1000, "allgather_bucket_size": "auto"},
        "train_batch_size": "auto",
        "steps_per_print": 7,
        "optimizer": "auto",
        "bf16": {"enabled": True},
        "fp16": {"enabled": False, "loss_scale": "auto"},
        "gradient_clipping": 1.0,
        "flops_profiler": {"enabled": False},
    }
    assert settings(tmp_path, given) == {
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 1000, "overlap_comm": False},
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "fp16": {"enabled": False},
        "flops_profiler": {"enabled": False},
        "steps_per_print": 7,
        "communication_data_type": "fp32",
    }  # fmt: skip


def test_every_contradiction_is_named_with_the_run_files_key(tmp_path: Path) -> None:
    given = {
        "train_batch_size": 16,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "Adam"},
        "bf16": {"enabled": False},
        "zero_optimization": {
            "stage": 2,
            "zenflow": {},
            "round_robin_gradients": True,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/x"},
        },
    }
    with pytest.raises(ConfigError) as error:
        settings(tmp_path, given)
    said = {problem.where.rsplit(": ")[-1]: str(problem) for problem in error.value.problems}
    assert set(said) == {
        "train_batch_size",
        "gradient_clipping",
        "optimizer",
        "bf16.enabled",
        "zero_optimization.stage",
        "zero_optimization.zenflow",
        "zero_optimization.round_robin_gradients",
        "zero_optimization.offload_optimizer",
    }
    assert (
        "is 16, but the run file requires 8" in said["train_batch_size"]
        and "batch.global_batch" in said["train_batch_size"]
    )
    assert "parallel.zero" in said["zero_optimization.stage"]
    assert "precision.dtype" in said["bf16.enabled"]


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("{", "is not JSON"),
        ("[]", "a JSON object of settings"),
        ({"zero_optimization": 1}, "a JSON object of settings"),
    ],
)
def test_a_file_that_is_no_deepspeed_configuration_is_refused(tmp_path: Path, content: Any, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        settings(tmp_path, content)


def test_a_missing_file_is_named() -> None:
    config = RunConfig(
        model=load_model("llama-tiny"),
        batch=BatchConfig(global_batch=8),
        optimizer=OptimizerConfig(deepspeed_config="nowhere.json"),
    )
    with pytest.raises(ConfigError, match=r"nowhere\.json: cannot be read: No such file"):
        deepspeed_settings(config, 8)


def test_overlap_is_refused_where_it_means_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"overlap_comm": true}}')
    config = RunConfig(
        model=load_model("llama-tiny"),
        batch=BatchConfig(global_batch=8),
        optimizer=OptimizerConfig(engine="deepspeed", deepspeed_config=str(path)),
    )
    with pytest.raises(ConfigError, match=r"zero_optimization\.overlap_comm: is true, but the run file requires false"):
        deepspeed_settings(config, 8)
