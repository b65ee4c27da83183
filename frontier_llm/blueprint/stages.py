"""What one virtual stage of the model holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StageSpec:
    """A run of consecutive layers, with the embedding in front of the first one and the head behind the last one."""

    first_layer: int
    num_layers: int
    embedding: bool  # token (and learned position) embedding in front
    head: bool  # final norm, output head and loss behind

    @property
    def layers(self) -> range:
        """Global indices of its layers."""
        return range(self.first_layer, self.first_layer + self.num_layers)
