"""Attention of a sequence whose tokens several ranks hold."""

from frontier_llm.context_parallel.attention import Core, attention_core

__all__ = ["Core", "attention_core"]
