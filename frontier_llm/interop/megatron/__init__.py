"""Read checkpoints of Megatron-LM and Megatron-DeepSpeed without running their code (docs/megatron.md)."""
