"""Flat buckets, gradient synchronisation, ZeRO-1 AdamW, loss scale and learning rate."""

from frontier_llm.optim.adamw import AdamW, BucketState
from frontier_llm.optim.buckets import Bucket, OwnedRange, build_buckets
from frontier_llm.optim.engines import EngineInputs, build_update, gradient_destination
from frontier_llm.optim.loss_scale import LossScaler, initial_loss_scale
from frontier_llm.optim.lr_schedule import learning_rate
from frontier_llm.optim.state import KINDS, GradientSums, Optimizer, StateRectangle
from frontier_llm.optim.sync import GradientSync

__all__ = [
    "KINDS",
    "AdamW",
    "Bucket",
    "BucketState",
    "EngineInputs",
    "GradientSums",
    "GradientSync",
    "LossScaler",
    "Optimizer",
    "OwnedRange",
    "StateRectangle",
    "build_buckets",
    "build_update",
    "gradient_destination",
    "initial_loss_scale",
    "learning_rate",
]
