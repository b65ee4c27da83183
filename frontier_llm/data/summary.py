"""What a run is about to read: the size of each dataset, its share, and how often the run's steps go through it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from frontier_llm import log
from frontier_llm.config import DataSource, RunConfig, phases_of
from frontier_llm.data.indexed import IndexedDataset
from frontier_llm.errors import Problem
from frontier_llm.units import format_count

MANY_EPOCHS = 4  # up to here repeated tokens teach almost as much as new ones (Muennighoff et al. 2023, arXiv:2305.16264)


def log_datasets(run: RunConfig) -> None:
    """One line per dataset, and a warning for each that is trained on more than MANY_EPOCHS times. The datasets are sound already."""
    phases = phases_of(run)
    for blend in dict.fromkeys(phase.config.data.train for phase in phases):
        tokens = sum(phase.steps * phase.tokens_per_step for phase in phases if phase.config.data.train == blend)
        _log_blend("train", blend, tokens, "in this run's steps")
    for split, blend in run.data.held_out.items():
        _log_blend(split.replace("/", "."), blend, run.train.eval_samples * run.model.sequence_length, "in each evaluation")


def too_often(run: RunConfig) -> Iterator[Problem]:
    """A problem for each dataset that the run's steps go through more often than its max_epochs."""
    phases, tokens, limits = phases_of(run), Counter[str](), dict[str, float]()
    for phase in phases:
        blend = phase.config.data.train
        for source in () if isinstance(blend, str) else blend:
            share = source.weight / sum(other.weight for other in blend if not isinstance(other, str))
            tokens[source.path] += round(phase.steps * phase.tokens_per_step * share)
            if source.max_epochs is not None:
                limits[source.path] = min(source.max_epochs, limits.get(source.path, source.max_epochs))
    for path, limit in limits.items():
        epochs = tokens[path] / IndexedDataset(path, scan=False).token_count
        if epochs > limit:
            what = f"the run goes {epochs:.3g} times through {path}, and its max_epochs is {limit:g}"
            fix = f"at most {limit / epochs:.1%} of its weight or of the steps, more data, or another max_epochs"
            yield Problem("data.train", what, fix)


def _log_blend(split: str, sources: tuple[DataSource, ...] | str | None, tokens: int, purpose: str) -> None:
    if isinstance(sources, str):
        log.info(f"data.{split}: synthetic: made-up tokens without any text, for benchmarks and tests")
        return
    total_weight = sum(source.weight for source in sources or ())
    for source in sources or ():
        dataset, share = IndexedDataset(source.path, scan=False), source.weight / total_weight
        epochs = tokens * share / dataset.token_count
        documents = "1 document" if dataset.document_count == 1 else f"{format_count(dataset.document_count)} documents"
        size = f"{documents}, {format_count(dataset.token_count)} tokens"
        log.info(f"data.{split}: {source.path}: {size}, weight {share:.3g}, {epochs:.3g} epochs {purpose}")
        if split == "train" and epochs > MANY_EPOCHS:
            what = f"the run goes {epochs:.1f} times through {source.path}; beyond {MANY_EPOCHS} epochs a model learns little more from it"
            log.warn(f"{what} (arXiv:2305.16264): give more data, less weight or fewer train.steps")
