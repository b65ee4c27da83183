"""Checkpoints that any layout writes and any layout loads; format in docs/checkpoint_format.md."""
