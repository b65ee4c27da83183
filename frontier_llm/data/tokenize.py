"""Tokenize text files into `<prefix>.bin/.idx/.meta.json`, in parallel.

A run can be resumed, and the result has the same bytes for any number of workers. The inputs are cut into shards by
their sizes alone. Each shard becomes a small dataset (a part) in `<prefix>.parts-<digest>/`. A part's `.json` file is
written last and marks the part as complete. A resumed run makes only the missing parts. Finally the parts are joined in
order.

Several nodes share the work: each makes its share of the parts (`make_share`), and one process joins all parts.

`training_text` reads a sample of the same inputs to train a tokenizer on.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from frontier_llm import log
from frontier_llm.config.urls import without_secrets
from frontier_llm.data.destination import existing_dataset, sole_maker
from frontier_llm.data.documents import Damage, read
from frontier_llm.data.indexed import IndexedDataset, optimal_dtype
from frontier_llm.data.indexed_writer import IndexedWriter
from frontier_llm.data.inputs import MAXIMUM_BYTES, InputPiece, cut, find_inputs
from frontier_llm.data.meta import DatasetMeta, write_meta
from frontier_llm.data.position import derive_key
from frontier_llm.data.remote import identity_of, located
from frontier_llm.data.tokenizer import Tokenizer, load_tokenizer
from frontier_llm.errors import DataError
from frontier_llm.files import write_atomically
from frontier_llm.topology.buckets import packed
from frontier_llm.units import format_bytes, format_count, strict_json

EXAMPLES = 100  # number of damaged inputs that a record lists by name
REPEAT = "check space and permissions, then run the same command again: finished parts are kept"
VERSION = 2  # version of the files that this module writes; parts of another version are not reused


@dataclass(frozen=True)
class TokenizeOptions:
    """Options of tokenization. Together with the inputs and the tokenizer they determine the bytes of the dataset."""

    text_key: str = "text"  # JSON field or parquet column of the text.
    documents: Literal["file", "line"] = "file"  # "file": a text file is one document; "line": each line is a document.
    skip_damaged: bool = False  # If False, the first damaged input ends the run.
    shard_bytes: int = 32 << 20  # Input bytes per shard, a few seconds of work.
    prompt_key: str | None = None  # JSON field of a prompt before the text. The prompt's tokens have no loss.
    max_bytes: int = MAXIMUM_BYTES  # Size limit of a line or an MDS shard. A larger one is damaged input.


@dataclass(frozen=True)
class ShardReport:
    """Number of documents, tokens and bytes of a finished shard."""

    documents: int
    tokens: int
    text_bytes: int
    damaged: int
    examples: tuple[str, ...]


@dataclass(frozen=True)
class ShardWork:
    """Work of one shard, small enough to send to a spawned process."""

    pieces: tuple[InputPiece, ...]
    prefix: str
    tokenizer: str
    tokenizer_digest: str
    options: TokenizeOptions

    @property
    def size_bytes(self) -> int:
        """Size of the input in bytes, for the progress bar."""
        return sum(piece.size_bytes for piece in self.pieces)


@dataclass(frozen=True)
class TokenizePlan:
    """The work of one dataset. It depends on the inputs, the tokenizer and the options, and not on workers or nodes."""

    prefix: str  # path of the dataset without .bin/.idx
    jobs: tuple[ShardWork, ...]
    directory: Path  # folder of the parts
    codec: Tokenizer
    digest: str


def tokenize(
    inputs: Iterable[str | Path],
    prefix: str | Path,
    tokenizer: str,
    options: TokenizeOptions | None = None,
    workers: int | None = None,
    overwrite: bool = False,
) -> DatasetMeta:
    """Make the dataset `prefix` from files and directories. Return its record.

    If `workers` is None, each core that this process may use gets one worker. A dataset that the same inputs, tokenizer
    and options made is returned unchanged. Raises DataError for missing, empty or (unless skipped) damaged inputs, and
    for a directory that cannot be written. Raises it too for a dataset of other inputs at `prefix` (unless
    `overwrite`), and while another process makes a dataset there.
    """
    plan = plan_dataset(inputs, prefix, tokenizer, options or TokenizeOptions())
    return make_dataset(plan, workers, overwrite)


def make_dataset(plan: TokenizePlan, workers: int | None, overwrite: bool) -> DatasetMeta:
    """Make the missing parts of a plan and join all parts, as `tokenize` describes. Return the dataset's record."""
    if (before := existing_dataset(plan.prefix, plan.digest, overwrite)) is not None:
        return before
    with sole_maker(plan.prefix, plan.digest, REPEAT):
        plan.directory.mkdir(exist_ok=True)
        try:
            parts = _run(plan.jobs, workers, plan.prefix)
            meta = _join(plan, parts) if any(part.documents for part in parts) else None
            shutil.rmtree(plan.directory)
        finally:
            with contextlib.suppress(OSError):
                plan.directory.rmdir()  # succeeds only if no part was finished
    if meta is None:
        damaged = sum(part.damaged for part in parts)
        what = "the inputs contain no documents" + (f" ({damaged} damaged inputs were skipped)" if damaged else "")
        raise DataError(what, where=plan.prefix, fix="check the input paths and --text-key")
    _report(plan.prefix, meta)
    return meta


def missing_dataset(plan: TokenizePlan, overwrite: bool) -> str | None:
    """Return the digest of the plan. None if the dataset exists. Raises DataError as `tokenize` does."""
    with log.quiet():
        before = existing_dataset(plan.prefix, plan.digest, overwrite)
    return plan.digest if before is None else None


@contextlib.contextmanager
def shares_of(prefix: str | Path, digest: str) -> Iterator[None]:
    """Hold the lock of the dataset while other processes call `make_share`. `digest` is the result of
    `missing_dataset`.
    """
    with sole_maker(prefix, digest, REPEAT):
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                _parts_directory(prefix, digest).rmdir()  # succeeds only if no part was finished


def make_share(plan: TokenizePlan, workers: int | None, overwrite: bool, index: int, count: int) -> int:
    """Make the missing parts of share `index` of `count`, and join nothing. Return the number of parts of the share.

    Share `index` has the parts `index`, `index + count`, and so on, so that neighbouring inputs are spread over all
    shares. The result is 0 if the dataset exists. Raises DataError as `tokenize` does.
    """
    if existing_dataset(plan.prefix, plan.digest, overwrite) is not None:
        return 0
    share = plan.jobs[index::count]
    try:
        plan.directory.mkdir(parents=True, exist_ok=True)
        _run(share, workers, f"{plan.prefix}, share {index + 1} of {count}")
    except OSError as error:
        what = f"cannot write: {error.strerror or error}"
        raise DataError(what, where=str(error.filename or plan.prefix), fix="check space and permissions") from error
    return len(share)


def plan_dataset(
    inputs: Iterable[str | Path], prefix: str | Path, tokenizer: str, options: TokenizeOptions
) -> TokenizePlan:
    """Cut the inputs into shards. Raises DataError for missing inputs."""
    codec = load_tokenizer(tokenizer)
    pieces = (piece for path in find_inputs(inputs) for piece in cut(path, options.documents, options.shard_bytes))
    shards = [tuple(shard) for shard in packed(pieces, lambda piece: piece.size_bytes, options.shard_bytes)]
    digest = _plan_digest(shards, codec, options)
    directory = _parts_directory(prefix, digest)
    jobs = tuple(
        ShardWork(pieces, str(directory / f"{number:06}"), tokenizer, codec.digest, options)
        for number, pieces in enumerate(shards)
    )
    return TokenizePlan(prefix=str(prefix), jobs=jobs, directory=directory, codec=codec, digest=digest)


def _parts_directory(prefix: str | Path, digest: str) -> Path:
    return Path(f"{prefix}.parts-{digest[:12]}")


def _plan_digest(shards: list[tuple[InputPiece, ...]], codec: Tokenizer, options: TokenizeOptions) -> str:
    """Return a digest of everything that determines the result.

    A file's content counts as unchanged if its size and modification time are unchanged.
    """
    paths = sorted({piece.path for shard in shards for piece in shard})
    stats = [identity_of(located(path)) for path in paths]
    deciding = {name: value for name, value in asdict(options).items() if value is not None}
    if not options.skip_damaged:
        del deciding["max_bytes"]  # A line above the limit ends the run, so that the limit has no effect on the result.
    plan = [
        VERSION,
        codec.digest,
        codec.eod,
        deciding,
        stats,
        [[asdict(piece) | {"path": without_secrets(piece.path)} for piece in shard] for shard in shards],
    ]
    return hashlib.sha256(json.dumps(plan).encode()).hexdigest()


def _run(jobs: Sequence[ShardWork], workers: int | None, name: str) -> list[ShardReport]:
    """Make the missing parts. Return the reports of all parts in order. `name` begins each message."""
    workers = workers or len(os.sched_getaffinity(0))
    parts = {number: part for number, job in enumerate(jobs) if (part := _finished(job)) is not None}
    missing = [number for number in range(len(jobs)) if number not in parts]
    if parts:
        log.info(f"{name}: {len(parts)} of {len(jobs)} parts exist already and are kept")
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("tokenizing"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
    )
    with Progress(
        *columns,
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
    ) as bar:
        task = bar.add_task("tokenizing", total=sum(job.size_bytes for job in jobs), tokens="0")
        tokens = 0
        for number, part in itertools.chain(list(parts.items()), _make_all(jobs, missing, min(workers, len(missing)))):
            parts[number] = part
            tokens += part.tokens
            bar.update(task, advance=jobs[number].size_bytes, tokens=format_count(tokens))
    return [parts[number] for number in range(len(jobs))]


def _make_all(jobs: Sequence[ShardWork], missing: list[int], workers: int) -> Iterator[tuple[int, ShardReport]]:
    if workers <= 1:
        yield from ((number, make_part(jobs[number])) for number in missing)
        return
    # spawn, not fork: a forked child would inherit the state of the parent's threads (progress bar, BLAS)
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))
    try:
        futures = {pool.submit(make_part, jobs[number]): number for number in missing}
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BrokenProcessPool as error:
        fix = "run the same command again with fewer --workers: finished parts are kept"
        raise DataError("a tokenization worker was killed (out of memory?)", fix=fix) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _finished(job: ShardWork) -> ShardReport | None:
    """Return the report of a part that an earlier run finished."""
    from pydantic import TypeAdapter  # imported here, so that workers start without it

    path = Path(job.prefix + ".json")
    if path.exists():
        return TypeAdapter(ShardReport).validate_json(path.read_bytes())
    return None


@functools.lru_cache(maxsize=2)
def _codec(spec: str, digest: str) -> Tokenizer:
    """Return a worker's tokenizer, which is loaded once.

    Raises DataError if the tokenizer's file has changed since the run began.
    """
    codec = load_tokenizer(spec)
    if codec.digest != digest:
        raise DataError("was changed while it was used to tokenize", where=spec, fix="run the command again")
    return codec


def make_part(job: ShardWork) -> ShardReport:
    """Tokenize one shard into its part, in a worker process. The report file is written last.

    Raises DataError for damaged input, unless it is to be skipped.
    """
    codec = _codec(job.tokenizer, job.tokenizer_digest)
    options = job.options
    text_bytes = damaged = 0
    examples: list[str] = []
    with IndexedWriter(job.prefix, optimal_dtype(codec.vocab_size)) as writer:
        items = (read(piece, options.text_key, options.max_bytes, options.prompt_key) for piece in job.pieces)
        for item in itertools.chain.from_iterable(items):
            if isinstance(item, Damage):
                if not options.skip_damaged:
                    raise DataError(item.why, where=item.where, fix=item.repair)
                damaged += 1
                if len(examples) < EXAMPLES:
                    examples.append(f"{item.where}: {item.why}")
                continue
            text_bytes += len(item.text.encode())
            writer.add_sequence(codec.encode(item.text) + [codec.eod] * item.ends_document, item.learnt)
            if item.ends_document:
                writer.end_document()
    part = ShardReport(writer.document_count, writer.token_count, text_bytes, damaged, tuple(examples))
    write_atomically(Path(job.prefix + ".json"), strict_json(asdict(part), indent=None))
    return part


def _join(plan: TokenizePlan, parts: list[ShardReport]) -> DatasetMeta:
    """Join the parts in order into one dataset and write its record."""
    codec = plan.codec
    with IndexedWriter(plan.prefix, optimal_dtype(codec.vocab_size)) as writer:
        for job in plan.jobs:
            writer.append(IndexedDataset(job.prefix))
    meta = DatasetMeta(
        tokenizer=codec.name,
        tokenizer_digest=codec.digest,
        vocab_size=codec.vocab_size,
        eod=codec.eod,
        documents=writer.document_count,
        tokens=writer.token_count,
        text_bytes=sum(part.text_bytes for part in parts),
        damaged=sum(part.damaged for part in parts),
        damaged_examples=tuple(example for part in parts for example in part.examples)[:EXAMPLES],
        inputs_digest=plan.digest,
        largest_id=writer.largest_id,
    )
    write_meta(plan.prefix, meta)
    return meta


def _report(prefix: str, meta: DatasetMeta) -> None:
    for example in meta.damaged_examples[:20]:
        log.warn(f"skipped {example}")
    if meta.damaged > 20:
        log.warn(f"skipped {meta.damaged} damaged inputs in all; the first {EXAMPLES} are listed in {prefix}.meta.json")
    result = (
        f"{format_count(meta.documents)} documents, {format_count(meta.tokens)} tokens from "
        f"{format_bytes(meta.text_bytes)} of text"
    )
    log.info(f"{prefix}: {result} ({meta.bytes_per_token:.2f} bytes per token)")


PIECE_BYTES = 1 << 20


def training_text(inputs: Iterable[str | Path], options: TokenizeOptions, limit_bytes: int) -> Iterator[str]:
    """Yield documents of the inputs. With more than `limit_bytes` of input, pieces come in a fixed pseudo-random order.

    Raises DataError for missing inputs and, unless they are to be skipped, at the first damaged input.
    """
    pieces = [piece for path in find_inputs(inputs) for piece in cut(path, options.documents, PIECE_BYTES)]
    if sum(piece.size_bytes for piece in pieces) > limit_bytes:
        pieces.sort(key=lambda piece: derive_key("training text", located(piece.path).name, piece.start))
    items = (read(piece, options.text_key, options.max_bytes) for piece in pieces)
    for item in itertools.chain.from_iterable(items):
        if not isinstance(item, Damage):
            yield item.text
        elif options.skip_damaged:
            log.warn(f"skipped {item.where}: {item.why}")
        else:
            raise DataError(item.why, where=item.where, fix=item.repair)
