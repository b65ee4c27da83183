"""Checkpoints that any layout writes and any layout loads; format in docs/checkpoint_format.md."""

from frontier_llm.checkpoint.directory import is_there, point_best
from frontier_llm.checkpoint.lock import Superseded
from frontier_llm.checkpoint.manager import CheckpointManager
from frontier_llm.checkpoint.manifest import DamagedCheckpoint, Manifest, Progress

__all__ = ["CheckpointManager", "DamagedCheckpoint", "Manifest", "Progress", "Superseded", "is_there", "point_best"]
