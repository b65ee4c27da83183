"""The engine that plays a schedule over the stages of a rank."""

from frontier_llm.pipeline.engine import LOSS, ActivationSpec, Engine, StageOutput

__all__ = ["LOSS", "ActivationSpec", "Engine", "StageOutput"]
