"""Published weak and strong scaling efficiencies, which reports print next to the predicted ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

# effects that can lower the measured efficiencies, but are not part of the prediction
LEFT_OUT = (
    "the prediction leaves out contention with other jobs, the variation of devices (frontier.yaml has no "
    "speed_variation), "
    "and the paper's smallest point, which it does not state"
)


@dataclass(frozen=True)
class Published:
    """One published scaling efficiency: mode, model, number of devices and value."""

    mode: str  # weak | strong
    model: str
    label: str
    devices: int
    efficiency: float
    source: str


# arXiv 2312.12705 (ORNL, Frontier). Its abstract gives efficiencies of 100 % for weak scaling, and of 89 % and 87 % for
# strong scaling. Its text gives more digits.
PUBLISHED = (
    Published(
        mode="weak",
        model="gpt-175b",
        label="ORNL 175B",
        devices=1024,
        efficiency=1.00,
        source="arXiv 2312.12705, abstract",
    ),
    Published(
        mode="weak",
        model="gpt-1t",
        label="ORNL 1T",
        devices=3072,
        efficiency=1.00,
        source="arXiv 2312.12705, abstract",
    ),
    Published(
        mode="strong",
        model="gpt-175b",
        label="ORNL 175B, batch 8000",
        devices=1024,
        efficiency=0.8993,
        source="arXiv 2312.12705 (abstract: 89 %)",
    ),
    Published(
        mode="strong",
        model="gpt-1t",
        label="ORNL 1T, batch 8016",
        devices=3072,
        efficiency=0.8705,
        source="arXiv 2312.12705 (abstract: 87 %)",
    ),
)


def beside_published(mode: str, model: str, efficiencies: Iterable[tuple[int, float | None]]) -> Iterator[str]:
    """Yield a line of text for each published efficiency whose number of devices is in the predicted series.

    Args:
        mode: weak or strong.
        model: name of the model.
        efficiencies: (devices, predicted efficiency) of the points of the series.
    """
    predicted = dict(efficiencies)
    for point in PUBLISHED:
        share = predicted.get(point.devices)
        if (point.mode, point.model) != (mode, model) or share is None:
            continue
        difference = 100 * (share - point.efficiency)
        yield (
            f"{point.label}, {mode}, {point.devices} devices: {100 * point.efficiency:.1f} % measured "
            f"({point.source}), {100 * share:.1f} % predicted ({difference:+.1f} points); {LEFT_OUT}"
        )
