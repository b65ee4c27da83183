"""Which data a run trains on: what a checkpoint records, so that a resumed run notices that its tokens are others."""

from __future__ import annotations

from frontier_llm.config import RunConfig, phases_of
from frontier_llm.data.indexed import IndexedDataset


def identities(run: RunConfig) -> dict[str, str]:
    """Path → identity of each dataset that any phase trains on; none of synthetic data. Raises DataError where one cannot be read."""
    blends = [phase.config.data.train for phase in phases_of(run)]
    paths = dict.fromkeys(source.path for blend in blends if not isinstance(blend, str) for source in blend)
    return {path: IndexedDataset(path, scan=False).identity() for path in paths}
