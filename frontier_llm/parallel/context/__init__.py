"""Attention of a sequence whose tokens several ranks hold."""

from frontier_llm.parallel.context.attention import Core, attention_core

__all__ = ["Core", "attention_core"]
