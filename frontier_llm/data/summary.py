"""Describes the data that a run will read: size, share and number of epochs of each dataset."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from frontier_llm import log
from frontier_llm.config import DataSource, RunConfig, phases_of
from frontier_llm.data.identity import course, datasets_of
from frontier_llm.data.indexed import IndexedDataset
from frontier_llm.data.position import START, SYNTHETIC, Position
from frontier_llm.errors import Problem
from frontier_llm.units import format_count

# up to 4 epochs, repeated tokens are almost as useful as new ones (Muennighoff et al. 2023, arXiv:2305.16264)
MANY_EPOCHS = 4


def log_datasets(run: RunConfig, position: Position = START) -> None:
    """Log the lines and warnings of a run's datasets, which must have been checked before."""
    for line in dataset_lines(run, position):
        log.info(line)
    for warning in dataset_warnings(run, position):
        log.warn(warning)


def dataset_lines(run: RunConfig, position: Position = START) -> Iterator[str]:
    """Yield one line per dataset, and a note for held-out data that is also trained on."""
    yield from _training_lines(run, position)
    for split, blend in run.data.held_out.items():
        name = f"data.{split.replace('/', '.')}"
        if isinstance(blend, str):
            yield _synthetic_line(name)
            continue
        tokens = run.train.eval_samples * run.model.sequence_length
        total_weight = sum(source.weight for source in blend)
        for source in blend:
            share = source.weight / total_weight
            yield _dataset_line(name, source.path, share, tokens * share, "in each evaluation")
    yield from also_trained_on(run)


def dataset_warnings(run: RunConfig, position: Position = START) -> Iterator[str]:
    """Yield a warning for each dataset that is trained on for more than MANY_EPOCHS epochs."""
    end = _end(run, position)
    for stream in {stream.dataset: stream for stream in end.streams if stream.dataset_tokens}.values():
        epochs = end.tokens_of(stream.dataset) / stream.dataset_tokens
        if epochs > MANY_EPOCHS:
            what = (
                f"the run reads {stream.path} {epochs:.1f} times; according to published measurements, a model learns "
                f"little from more than {MANY_EPOCHS} "
                f"epochs"
            )
            yield f"{what} (arXiv:2305.16264): add data, reduce the weight of this dataset, or reduce train.steps"


def also_trained_on(run: RunConfig) -> Iterator[str]:
    """Yield a note for each held-out dataset whose tokens are also trained on, at the same path or another."""
    trained = {dataset.identity: path for path, dataset in datasets_of([run]).items()}
    for split, blend in run.data.held_out.items():
        for source in () if isinstance(blend, str) else blend:
            path = trained.get(IndexedDataset(source.path, scan=False).identity())
            if path is not None:
                same = "" if path == source.path else f" as {path}"
                yield (
                    f"data.{split.replace('/', '.')}: {source.path} is also training data{same}, so its loss does "
                    f"not show "
                    f"how the model does on new text"
                )


def too_often(run: RunConfig, position: Position = START) -> Iterator[Problem]:
    """Yield a Problem for each dataset that the whole run reads more often than its `max_epochs`."""
    sources = list(_sources(run))
    if all(source.max_epochs is None for source in sources):
        return
    datasets = datasets_of([run])
    end = _end(run, position)
    limits: dict[str, tuple[float, str]] = {}  # identity of a dataset → (its max_epochs, its path)
    for source in sources:
        if source.max_epochs is not None:
            identity = datasets[source.path].identity
            limits[identity] = min(
                limits.get(identity, (source.max_epochs, source.path)),
                (source.max_epochs, source.path),
            )
    for identity, (limit, path) in limits.items():
        tokens = datasets[path].tokens
        epochs = end.tokens_of(identity) / tokens
        if epochs > limit:
            done = position.tokens_of(identity) / tokens
            before = f" ({done:.3g} of them so far)" if done else ""
            what = f"the run reads {path} {epochs:.3g} times{before}, more than its max_epochs of {limit:g}"
            fix = f"reduce its weight or the steps to {limit / epochs:.1%}, add data, or increase max_epochs"
            yield Problem(where="data.train", what=what, fix=fix)


def news(before: Position, after: Position) -> Iterator[str]:
    """Yield a note for each source that is read from its beginning although its dataset or path was read before.

    `before` is the position before a blend is entered, `after` the position after it.
    """
    for stream in after.current:
        if stream.taken or stream.dataset == SYNTHETIC:
            continue
        elsewhere = [other for other in before.streams if other.dataset == stream.dataset and other.tokens_read]
        for other in elsewhere:
            if other.sequence_length != stream.sequence_length:
                where = f"at sequence length {other.sequence_length}"
            else:
                where = "in another order"
            what = (
                f"{format_count(other.tokens_read)} of its {format_count(stream.dataset_tokens)} tokens were already "
                f"read {where}"
            )
            yield f"{stream.path} is read from its beginning at sequence length {stream.sequence_length}: {what}"
        smaller = [
            other
            for other in before.streams
            if other.path == stream.path and other.dataset != stream.dataset and other.tokens_read
        ]
        for other in smaller[-1:]:
            what = (
                f"it has {format_count(stream.dataset_tokens)} tokens instead of "
                f"{format_count(other.dataset_tokens)}, of "
                f"which {format_count(other.tokens_read)} were read"
            )
            yield (f"{stream.path} has changed and is read from its beginning: {what}")


def _sources(run: RunConfig) -> Iterator[DataSource]:
    """Yield every dataset that any phase names."""
    for phase in phases_of(run):
        if not isinstance(phase.config.data.train, str):
            yield from phase.config.data.train


def _end(run: RunConfig, position: Position) -> Position:
    ends = [end for _, end in course(run, position, datasets_of([run]))]
    return ends[-1] if ends else position


def _training_lines(run: RunConfig, position: Position) -> Iterator[str]:
    begin = position
    # blend as (identity, path, share) of each member → tokens of each member
    read: dict[tuple[tuple[str, str, float], ...], Counter[int]] = {}
    for _, after in course(run, position, datasets_of([run])):
        total = sum(after.weights)
        members = tuple(
            (stream.dataset, stream.path, share.weight / total)
            for stream, share in zip(after.current, after.blend, strict=True)
        )
        tokens = read.setdefault(members, Counter())
        for place, share in enumerate(after.blend):
            before = position.streams[share.stream].tokens_read if share.stream < len(position.streams) else 0
            tokens[place] += after.streams[share.stream].tokens_read - before
        position = after
    purpose = "in this run's further steps" if begin.steps else "in this run's steps"
    for members, tokens in read.items():
        for place, (identity, path, weight) in enumerate(members):
            if identity == SYNTHETIC:
                yield _synthetic_line("data.train")
            else:
                yield _dataset_line("data.train", path, weight, tokens[place], purpose)


def _synthetic_line(name: str) -> str:
    return f"{name}: synthetic: random tokens instead of text, for benchmarks and tests"


def _dataset_line(name: str, path: str, share: float, tokens: float, purpose: str) -> str:
    dataset = IndexedDataset(path, scan=False)
    documents = "1 document" if dataset.document_count == 1 else f"{format_count(dataset.document_count)} documents"
    size = f"{documents}, {format_count(dataset.token_count)} tokens"
    return f"{name}: {path}: {size}, weight {share:.3g}, {tokens / dataset.token_count:.3g} epochs {purpose}"
