"""Checkpoints of Megatron-LM and Megatron-DeepSpeed, read without running anything they contain; see
docs/megatron.md.
"""

from frontier_llm.interop.megatron.weights import MegatronModel

__all__ = ["MegatronModel"]
