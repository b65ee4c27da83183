"""frontier-llm checkpoint push | pull: copy checkpoints to a URL and back, in one process without GPUs."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from frontier_llm.cli.arguments import JSON, ProgressBar, amount, command, natural, option, show
from frontier_llm.errors import CheckpointError
from frontier_llm.units import GIB, format_bytes

if TYPE_CHECKING:
    from frontier_llm.checkpoint.remote import RemoteCheckpoint

URL = option("url", metavar="URL", help="folder of an object store: s3://BUCKET/RUN, gs://…, file:///FOLDER/RUN")
TAKE_OVER = option(
    "--take-over",
    action="store_true",
    help=(
        "continue in this directory a run that another run directory has uploaded; later uploads of the other "
        "directory fail"
    ),
)
_CREDENTIALS = "Credentials come from the environment of the store's client (AWS_*, FSSPEC_*), never from the URL."


@command(
    option("run", type=Path, metavar="CHECKPOINT", help="run directory, checkpoints folder or one checkpoint"),
    URL,
    option(
        "--mib-per-s",
        type=amount,
        default=0.0,
        metavar="N",
        help="send at most N MiB per second (default: no limit)",
    ),
    TAKE_OVER,
    JSON,
    line="copy the checkpoints of a run to a URL",
    about=f"Copy the complete checkpoints of a run to a URL. Files that are there already are kept. {_CREDENTIALS}",
    examples=("frontier-llm checkpoint push runs/quickstart file:///tmp/copies/quickstart",),
)
def push(args: argparse.Namespace) -> int:
    """Copy all complete checkpoints to a URL, newest first. Return 1 if a local checkpoint is damaged and was not
    copied.
    """
    from frontier_llm.checkpoint import remote, remote_writer
    from frontier_llm.checkpoint.directory import DeletedCheckpoint, checkpoints_at, unless_deleted
    from frontier_llm.checkpoint.manifest import DamagedCheckpoint
    from frontier_llm.data.remote_folder import RemoteFolder
    from frontier_llm.run.holder import living_holder
    from frontier_llm.run.uploads import after_discard, read_uploads, uploads_to, write_uploads

    checkpoints = [path for path in checkpoints_at(args.run) if path.exists()]
    if not checkpoints:
        raise CheckpointError("contains no complete checkpoint", "give a run directory", str(args.run.absolute()))
    url = args.url.rstrip("/")
    place = RemoteFolder(url)
    run_dir = _run_dir(checkpoints[0])
    record = read_uploads(run_dir)
    is_of_url = record is None or record.url == url  # the record of another URL belongs to train.remote and stays
    if record is None:
        record = uploads_to(run_dir, url)
    writer = remote_writer.this_writer(record.writer, run_dir)
    if is_of_url:
        steps = [one.step for one in remote.uploaded_checkpoints(place)]
        remote_writer.refuse_foreign(place, steps, writer, record.known_step, record.branched_at)
    remote_writer.claim(place, writer, args.take_over)
    if is_of_url and record.discard_above is not None and living_holder(run_dir) is None:
        remote.delete_above(place, record.discard_above)
        record = after_discard(record)
        write_uploads(run_dir, record)
    limit = remote.RateLimit(args.mib_per_s * 2**20)
    pushed: list[remote.Pushed] = []
    rows: list[dict[str, Any]] = []
    damages: list[str] = []
    for path in checkpoints:
        line = ProgressBar()
        try:
            with unless_deleted(path):
                result = remote.push(path, place, writer, limit, _gib(line, path.name))
        except DeletedCheckpoint:
            rows.append({"path": str(path), "deleted": True})
            text = "was deleted by its run while it was read"
        except DamagedCheckpoint as error:
            damages.append(str(error))
            rows.append({"path": str(path), "damaged": str(error)})
            text = "DAMAGED, not sent"
        else:
            pushed.append(result)
            rows.append(asdict(result))
            sent = f"{result.sent_files} files sent ({format_bytes(result.sent_bytes)})"
            text = f"{sent}, {result.kept_files} were there"
        finally:
            line.close()
        if not args.json:
            print(f"{path.name}  {text}", flush=True)
    if not is_of_url:
        remote_writer.release(place, writer)
    elif living_holder(run_dir) is None:  # if a job is running, it writes the record of uploads itself
        remote_writer.release(place, writer)
        if pushed:
            newest = max(pushed[0].step, record.uploaded_step or 0)
            record = replace(record, uploaded_step=newest, uploaded_unix_s=time.time())
        write_uploads(run_dir, replace(record, pending=(), problem=damages[0] if damages else ""))
    if args.json:
        show(args, rows, str)
    elif damages:
        print(*(f"\n{damage}" for damage in damages), sep="\n", file=sys.stderr)
    return int(bool(damages))


@command(
    URL,
    option(
        "run", type=Path, nargs="?", metavar="RUN_DIR", help="run directory (default: runs/ and the URL's last name)"
    ),
    option("--step", type=natural, metavar="N", help="step of the checkpoint (default: the newest complete one)"),
    TAKE_OVER,
    JSON,
    line="copy a checkpoint from a URL into a run directory",
    about="Copy a checkpoint from a URL into a run directory, and compare every byte with its digest. "
    f"The run then continues from it. {_CREDENTIALS}",
    examples=("frontier-llm checkpoint pull file:///tmp/copies/quickstart runs/pulled",),
)
def pull(args: argparse.Namespace) -> int:
    """Copy one checkpoint from a URL to this computer."""
    from frontier_llm import log
    from frontier_llm.checkpoint import directory as folder
    from frontier_llm.checkpoint import remote, remote_writer
    from frontier_llm.config.urls import is_url, without_secrets
    from frontier_llm.data.remote_folder import RemoteFolder
    from frontier_llm.run import complete
    from frontier_llm.run.holder import refuse_second_start
    from frontier_llm.run.uploads import uploads_to, write_uploads

    url = args.url.rstrip("/")
    place = RemoteFolder(url)
    run_dir = args.run or Path("runs") / url.rpartition("/")[2]
    if is_url(str(run_dir)):
        raise CheckpointError(
            "is not a folder of this computer", "give the URL first, then the run directory", str(run_dir)
        )
    refuse_second_start(run_dir)
    found = list(remote.uploaded_checkpoints(place))
    chosen = None if args.take_over and args.step is None and not found else _chosen(found, args.step, url)
    if args.take_over:
        record = uploads_to(run_dir, url)
        remote_writer.claim(place, remote_writer.this_writer(record.writer, run_dir), take_over=True)
        write_uploads(run_dir, replace(record, branched_at=None))
    if chosen is None:
        text = f"{run_dir} writes to {without_secrets(url)} from now on; no checkpoint is complete there"
        show(args, {"path": None, "step": None}, lambda: text)
        return 0
    directory = run_dir / "checkpoints"
    newer = [step for step, fault in complete.faults(directory) if step > chosen.step and fault is None]
    if newer:
        names = ", ".join(map(folder.step_name, newer))
        log.warn(f"{directory} has newer checkpoints, so a run continues from step {newer[0]}, unless you move {names}")
    line = ProgressBar()
    report = _gib(line, chosen.name)

    def work(on_bytes: Callable[[int], object]) -> Path:
        def received(count: int) -> None:
            on_bytes(count)
            report(count)

        return remote.pull(chosen, directory, received)

    transfer = remote.RemoteTransfer(work, url)
    while not transfer.is_over():
        pass
    path = transfer.result()
    line.close()
    if newer:
        folder.point_latest(directory, folder.step_name(newer[0]))  # the copy has moved LATEST
    result = {"path": str(path), "step": chosen.step}
    source = f"step {newer[0]}" if newer else "it"
    show(args, result, lambda: f"{path}  is intact; a run with train.run_dir={run_dir} continues from {source}")
    return 0


def _chosen(found: list[RemoteCheckpoint], step: int | None, url: str) -> RemoteCheckpoint:
    """Return the checkpoint of `step`, or the newest checkpoint. Raises CheckpointError if there is none."""
    from frontier_llm.config.urls import without_secrets

    for one in found:
        if step is None or one.step == step:
            return one
    fix = "give the URL that `checkpoint push` or train.remote has written to"
    if found:
        fix = f"complete there: {', '.join(one.name for one in found)}"
    what = "contains no complete checkpoint" + ("" if step is None else f" of step {step}")
    raise CheckpointError(what, fix, without_secrets(url))


def _run_dir(checkpoint: Path) -> Path:
    """Return the run directory of a checkpoint in RUN_DIR/checkpoints/."""
    above = checkpoint.parent
    return above.parent if above.name == "checkpoints" else above


def _gib(line: ProgressBar, name: str) -> Callable[[int], None]:
    """Return a callback that adds up bytes, from any thread, and shows their sum."""
    report = line.on(name, "GiB")
    lock = Lock()
    total_bytes = 0

    def add(count: int) -> None:
        nonlocal total_bytes
        with lock:
            total_bytes += count
            report(total_bytes // GIB)

    return add
