"""Checkpoints that can be written and loaded with any layout. Format: docs/checkpoint_format.md."""
