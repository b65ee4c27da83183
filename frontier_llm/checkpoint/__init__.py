"""Checkpoints that can be loaded with any parallel layout. docs/checkpoint_format.md describes their format."""
