"""Optimizers and gradient synchronisation: flat buckets, ZeRO-1, FSDP, DeepSpeed, loss scale and learning rate."""

from frontier_llm.optim.adafactor import Adafactor
from frontier_llm.optim.buckets import Bucket, OwnedRange, build_buckets
from frontier_llm.optim.elementwise import AdamW, Lion
from frontier_llm.optim.engines import EngineInputs, build_update, draw_masters, gradient_destination
from frontier_llm.optim.muon import Muon
from frontier_llm.optim.registry import Slice, SliceUpdate, register
from frontier_llm.optim.scalars import LossScaler, initial_loss_scale, learning_rate
from frontier_llm.optim.state import GradientSums, Optimizer, StateRectangle
from frontier_llm.optim.sync import GradientSync
from frontier_llm.optim.zero import Zero

__all__ = [
    "Adafactor",
    "AdamW",
    "Bucket",
    "EngineInputs",
    "GradientSums",
    "GradientSync",
    "Lion",
    "LossScaler",
    "Muon",
    "Optimizer",
    "OwnedRange",
    "Slice",
    "SliceUpdate",
    "StateRectangle",
    "Zero",
    "build_buckets",
    "build_update",
    "draw_masters",
    "gradient_destination",
    "initial_loss_scale",
    "learning_rate",
    "register",
]
