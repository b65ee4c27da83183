"""Configuration of a run: frozen sections, read from YAML files and key=value overrides. Every key and value is
checked.
"""

from frontier_llm.config.durations import Stretches, in_steps, resolved
from frontier_llm.config.load import available, build, dump, find_file, load_model, load_run, own_plugins
from frontier_llm.config.model import ModelConfig, MoeConfig, RopeScaling
from frontier_llm.config.phases import (
    RunPhase,
    expired_steps,
    longest_phase,
    phase_at,
    phases_of,
    planned_tokens,
    saves_between,
    saves_nothing,
)
from frontier_llm.config.places import configs_dir
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
    "Stretches",
    "TrainConfig",
    "available",
    "build",
    "configs_dir",
    "dump",
    "expired_steps",
    "find_file",
    "in_steps",
    "load_model",
    "load_run",
    "longest_phase",
    "model_problems",
    "optimizer_problems",
    "own_plugins",
    "phase_at",
    "phase_note",
    "phases_of",
    "planned_tokens",
    "recompute_modes",
    "resolved",
    "saves_between",
    "saves_nothing",
    "warmup_note",
]
