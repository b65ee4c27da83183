"""Fused ops: a reference implementation in plain torch, prebuilt back-ends, and the selection of a back-end."""

from .attention_table import AttentionShape
from .dropout import Mask, philox, stream_key
from .dtypes import statistics_dtype, working_dtype
from .providers import AttentionNeeds
from .reference import AdamWUpdate, Ops, Scores, merge, softcapped
from .routing import Routing
from .select import attention_needs, select_ops, select_run_ops, sizes_of

__all__ = [
    "AdamWUpdate",
    "AttentionNeeds",
    "AttentionShape",
    "Mask",
    "Ops",
    "Routing",
    "Scores",
    "attention_needs",
    "merge",
    "philox",
    "select_ops",
    "select_run_ops",
    "sizes_of",
    "softcapped",
    "statistics_dtype",
    "stream_key",
    "working_dtype",
]
