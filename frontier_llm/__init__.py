"""Pretraining with tensor, pipeline and ZeRO-1 data parallelism on MI250X supercomputers. Also runs on a laptop."""

__version__ = "0.1.0"
