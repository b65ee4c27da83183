"""Checkpoints of Megatron-LM and Megatron-DeepSpeed, read without running their code; see docs/megatron.md."""
