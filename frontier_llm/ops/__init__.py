"""Fused ops under one face: a reference in plain torch, prebuilt back-ends, and the choice between them."""

from .face import Ops
from .reference import statistics_dtype
from .select import select_ops

__all__ = ["Ops", "select_ops", "statistics_dtype"]
