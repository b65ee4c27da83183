"""Identifies a run's datasets by content, and computes the data positions that the run will reach.

If a dataset moves to another path, it stays the same dataset. Other tokens at the same path are another dataset.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from frontier_llm.config import RunConfig, RunPhase, phases_of
from frontier_llm.data.indexed import IndexedDataset
from frontier_llm.data.position import SYNTHETIC, Position, Source, Wanted


class Dataset(NamedTuple):
    """Digest and number of tokens of the dataset at a path. JSON stores them as a list."""

    identity: str
    tokens: int


def datasets_of(configs: Iterable[RunConfig]) -> dict[str, Dataset]:
    """Return path → dataset for all training data of all phases, except synthetic data.

    Raises DataError for a dataset that cannot be read.
    """
    blends = [phase.config.data.train for config in configs for phase in phases_of(config)]
    paths = dict.fromkeys(source.path for blend in blends if not isinstance(blend, str) for source in blend)
    datasets = {}
    for path in paths:  # one open dataset at a time, because each one has file descriptors
        dataset = IndexedDataset(path, scan=False)
        datasets[path] = Dataset(dataset.identity(), dataset.token_count)
    return datasets


def identities(datasets: Mapping[str, Dataset]) -> dict[str, str]:
    """Return path → identity of datasets, as a checkpoint records them."""
    return {path: dataset.identity for path, dataset in datasets.items()}


def wanted(config: RunConfig, datasets: Mapping[str, Dataset]) -> Wanted:
    """Return the blend of one phase. `datasets` must contain each of its paths."""
    blend = config.data.train
    data = config.data
    sources = []
    if isinstance(blend, str):
        sources.append(
            Source(
                dataset=SYNTHETIC,
                path=SYNTHETIC,
                tokens=0,
                weight=1.0,
            )
        )
    else:
        for one in blend:
            dataset = datasets[one.path]
            sources.append(Source(dataset.identity, one.path, dataset.tokens, one.weight))
    return Wanted(tuple(sources), config.model.sequence_length, data.packing, data.seed)


def course(run: RunConfig, position: Position, datasets: Mapping[str, Dataset]) -> Iterator[tuple[RunPhase, Position]]:
    """Yield (phase, position at its end) of each phase in which a run at `position` still has to train."""
    step = position.steps
    for phase in phases_of(run):
        steps = phase.end - max(phase.first, step)
        if steps > 0:
            position = position.enter(wanted(phase.config, datasets)).advance(phase.config.batch.global_batch, steps)
            yield phase, position
