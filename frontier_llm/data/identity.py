"""Which data a run trains on: what a checkpoint records, so that a resumed run notices that its tokens are others."""

from __future__ import annotations

from frontier_llm.config import RunConfig
from frontier_llm.data.indexed import IndexedDataset


def identities(run: RunConfig) -> dict[str, str]:
    """Path → identity of each dataset of `data.train`; none of synthetic data. Raises DataError where one cannot be read."""
    sources = () if isinstance(run.data.train, str) else run.data.train
    return {source.path: IndexedDataset(source.path, scan=False).identity() for source in sources}
