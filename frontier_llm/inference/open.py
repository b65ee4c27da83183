"""Open a model that a user names: a run directory, one of its checkpoints, or a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from frontier_llm import log
from frontier_llm.checkpoint.directory import checkpoints_at
from frontier_llm.checkpoint.weights import CheckpointWeights, WeightSource
from frontier_llm.config import ModelConfig, RunConfig, own_plugins
from frontier_llm.config.plugins import import_plugins, import_recorded
from frontier_llm.data.hub import HUB
from frontier_llm.data.indexed import IndexedDataset
from frontier_llm.data.inspect import recorded_tokenizer
from frontier_llm.data.meta import read_meta
from frontier_llm.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_file
from frontier_llm.errors import CheckpointError, DataError
from frontier_llm.interop.huggingface import CONFIG, HuggingFaceModel

COMPARED_TOKENS = 4096  # tokens of a dataset that are decoded to compare two tokenizers


@dataclass(frozen=True)
class OpenedModel:
    """Weights of a model, and the known facts about its run."""

    path: Path
    source: WeightSource
    run: RunConfig | None  # configuration of the run; None for a Hugging Face directory
    dtype: str  # working precision of the training; fp32 if unknown
    tokenizer_spec: str | None


def open_model(path: str | Path, verified: bool = False, plugins: Sequence[str] = ()) -> OpenedModel:
    """Open the model at `path`. For a run directory, open the newest checkpoint.

    If `verified`, every shard is read completely and compared with its digest. The plugins that a checkpoint was
    trained with are imported if `plugins` or the user's own run directory names them. Raises CheckpointError if `path`
    is not a model, ConfigError if a plugin is needed but not named.
    """
    path = Path(path)
    if (path / CONFIG).is_file():
        import_plugins(plugins)
        return OpenedModel(path, HuggingFaceModel(path), None, "fp32", tokenizer_in(path))
    if checkpoints := checkpoints_at(path):
        source = CheckpointWeights(checkpoints[0], verified)
        # If `path` is a checkpoint, a run file inside it may not name plugins.
        is_run_directory = checkpoints[0].parent == path / "checkpoints"
        own = own_plugins(path) if is_run_directory else ()
        import_recorded(
            source.manifest.known_plugins,
            given=plugins,
            own=own,
            where=str(checkpoints[0]),
        )
        return OpenedModel(
            checkpoints[0],
            source,
            source.config,
            source.config.precision.dtype,
            source.config.data.tokenizer,
        )
    what = "is not a model" if path.exists() else "does not exist"
    fix = (
        "give a run directory (with checkpoints/), a checkpoint (with manifest.json) or a Hugging Face directory "
        "(with config.json)"
    )
    raise CheckpointError(what, fix, str(path.absolute()))


def open_tokenizer(opened: OpenedModel, given: str | None, otherwise: str = "") -> Tokenizer:
    """Return the tokenizer `given`, or else the run's own tokenizer, or else the tokenizer of its training data.

    Raises DataError if there is none, if it has more ids than the model, or if it did not make the training data. The
    error's repair ends with `otherwise`.
    """
    if given is None and opened.tokenizer_spec is None and (found := _tokenizer_of_data(opened)) is not None:
        return found
    spec = given or opened.tokenizer_spec
    if spec is None:
        raise DataError(
            "no tokenizer is known for this model: neither its run nor the records of its training data name one",
            fix=f"give one with --tokenizer (a file, a directory, or `bytes`){otherwise}",
            where=str(opened.path),
        )
    if given is None and spec.startswith(HUB) and recorded_tokenizer(str(opened.path), spec) is None:
        # A checkpoint may come from an untrusted source, so the tokenizer that it names is not downloaded.
        what = f"names the tokenizer {spec[:200]}, which has not been fetched on this machine"
        raise DataError(
            what,
            where=str(opened.path),
            fix=f"if you trust that name, fetch it with --tokenizer {spec[:200]}",
        )
    tokenizer = load_tokenizer(spec)
    check_vocabulary(tokenizer, opened.source.model)
    return tokenizer


def _tokenizer_of_data(opened: OpenedModel) -> Tokenizer | None:
    """Return the tokenizer in the record of the run's first dataset, or None if this tokenizer is not available
    here.
    """
    data = None if opened.run is None else opened.run.data.train
    if data is None or isinstance(data, str):
        return None
    prefix = data[0].path
    meta = read_meta(prefix)
    spec = None if meta is None else recorded_tokenizer(prefix, meta.tokenizer)
    if spec is None:
        return None
    tokenizer = load_tokenizer(spec)
    check_vocabulary(tokenizer, opened.source.model)
    check_dataset(prefix, tokenizer)
    log.info(f"{spec}: the tokenizer that made {prefix}, because the run has no data.tokenizer")
    return tokenizer


def check_vocabulary(tokenizer: Tokenizer, model: ModelConfig) -> None:
    """Raise DataError if the tokenizer has ids for which the model has no row."""
    if tokenizer.vocab_size > model.vocab_size:
        what = f"has {tokenizer.vocab_size} ids, more than the {model.vocab_size} of the model's vocabulary"
        raise DataError(what, fix="give the tokenizer that the model was trained with", where=tokenizer.name)


def check_dataset(prefix: str, tokenizer: Tokenizer) -> None:
    """Raise DataError if another tokenizer made the dataset's tokens. A dataset without a record is accepted.

    The tokenizer file of an exported model differs from the file that made the data. The dataset is accepted if both
    tokenizers decode its first tokens to the same text.
    """
    meta = read_meta(prefix)
    dataset = IndexedDataset(prefix)
    if meta is None or meta.tokenizer_digest == tokenizer.digest:
        return
    spec = recorded_tokenizer(prefix, meta.tokenizer)
    ids = dataset.tokens[:COMPARED_TOKENS].tolist()
    if spec is None or load_tokenizer(spec).decode(ids) != tokenizer.decode(ids):
        fix = f"tokenize the text with {tokenizer.name}, or give the model's own tokenizer with --tokenizer"
        raise DataError(
            f"was made by the tokenizer {meta.tokenizer}, but the model's tokenizer is {tokenizer.name}",
            where=prefix,
            fix=fix,
        )


def tokenizer_in(directory: Path) -> str | None:
    """Return the directory as a tokenizer name, or None if it holds no tokenizer file."""
    return str(directory) if tokenizer_file(directory) else None
