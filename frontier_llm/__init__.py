"""Pretraining with tensor x pipeline x ZeRO-1 data parallelism on MI250X supercomputers, and on a laptop."""

__version__ = "0.1.0"
