"""Fused ops under one face: a reference in plain torch, prebuilt back-ends, and the choice between them."""

from .face import AdamWUpdate, Ops, Scores
from .reference import statistics_dtype
from .select import select_ops

__all__ = ["AdamWUpdate", "Ops", "Scores", "select_ops", "statistics_dtype"]
