"""The engine that plays a schedule over the stages of a rank."""

from frontier_llm.pipeline.engine import ActivationSpec, Engine

__all__ = ["ActivationSpec", "Engine"]
