"""Flat buckets, gradient synchronisation, ZeRO-1 AdamW, loss scale and learning rate."""

from frontier_llm.optim.adamw import AdamW, BucketState
from frontier_llm.optim.buckets import Bucket, OwnedRange, build_buckets
from frontier_llm.optim.loss_scale import LossScaler
from frontier_llm.optim.schedule import learning_rate
from frontier_llm.optim.sync import GradientSync

__all__ = ["AdamW", "Bucket", "BucketState", "GradientSync", "LossScaler", "OwnedRange", "build_buckets", "learning_rate"]
