"""What the user asked for: frozen, strict, composed from YAML files and key=value overrides."""

from frontier_llm.config.load import available, build, configs_dir, dump, find_file, load_model, load_run
from frontier_llm.config.model import ModelConfig, MoeConfig, RopeScaling
from frontier_llm.config.phases import RunPhase, phase_at, phases_of, planned_tokens, steps_of_tokens
from frontier_llm.config.saves import saves_between, saves_nothing
from frontier_llm.config.schema import (
    OUTPUT_Z,
    RECOMPUTE,
    BatchConfig,
    CommConfig,
    DataConfig,
    DataSource,
    GuardConfig,
    OpsConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    RunConfig,
    TrainConfig,
    recompute_modes,
)
from frontier_llm.config.validate import model_problems, optimizer_problems, phase_note, warmup_note

__all__ = [
    "OUTPUT_Z",
    "RECOMPUTE",
    "BatchConfig",
    "CommConfig",
    "DataConfig",
    "DataSource",
    "GuardConfig",
    "ModelConfig",
    "MoeConfig",
    "OpsConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "RopeScaling",
    "RunConfig",
    "RunPhase",
    "TrainConfig",
    "available",
    "build",
    "configs_dir",
    "dump",
    "find_file",
    "load_model",
    "load_run",
    "model_problems",
    "optimizer_problems",
    "phase_at",
    "phase_note",
    "phases_of",
    "planned_tokens",
    "recompute_modes",
    "saves_between",
    "saves_nothing",
    "steps_of_tokens",
    "warmup_note",
]
