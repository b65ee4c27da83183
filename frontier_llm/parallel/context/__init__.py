"""Context parallelism: attention over a sequence whose tokens are split over several ranks."""

from frontier_llm.parallel.context.attention import Core, attention_core

__all__ = ["Core", "attention_core"]
