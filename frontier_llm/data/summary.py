"""What a run is about to read: the size of each dataset, its share, and how often the run's steps go through it."""

from __future__ import annotations

from frontier_llm import log
from frontier_llm.config import DataSource, RunConfig
from frontier_llm.data.indexed import IndexedDataset
from frontier_llm.units import format_count

MANY_EPOCHS = 4  # up to here repeated tokens teach almost as much as new ones (Muennighoff et al. 2023, arXiv:2305.16264)


def log_datasets(run: RunConfig) -> None:
    """One line per dataset, and a warning for each that is trained on more than MANY_EPOCHS times. The datasets are sound already."""
    for split, samples in (("train", run.train.steps * run.batch.global_batch), ("validation", run.train.eval_samples)):
        sources: tuple[DataSource, ...] | str | None = getattr(run.data, split)
        if isinstance(sources, str):
            log.info(f"data.{split}: synthetic: made-up tokens without any text, for benchmarks and tests")
            continue
        total_weight = sum(source.weight for source in sources or ())
        for source in sources or ():
            dataset, share = IndexedDataset(source.path, scan=False), source.weight / total_weight
            epochs = samples * share * run.model.sequence_length / dataset.token_count
            documents = "1 document" if dataset.document_count == 1 else f"{format_count(dataset.document_count)} documents"
            size = f"{documents}, {format_count(dataset.token_count)} tokens"
            purpose = "in this run's steps" if split == "train" else "in each evaluation"
            log.info(f"data.{split}: {source.path}: {size}, weight {share:.3g}, {epochs:.3g} epochs {purpose}")
            if split == "train" and epochs > MANY_EPOCHS:
                what = (
                    f"the run goes {epochs:.1f} times through {source.path}; beyond {MANY_EPOCHS} epochs a model learns little more from it"
                )
                log.warn(f"{what} (arXiv:2305.16264): give more data, less weight or fewer train.steps")
