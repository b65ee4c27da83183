"""Starts a rank: selects its device, connects it to the other ranks, and builds its mesh, data and model."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed import Store

from frontier_llm import log
from frontier_llm.comm import Meeting, Mesh, barrier, build_mesh, connect, disconnect, dump_flight_record, serial_mesh
from frontier_llm.comm.rendezvous import start_store
from frontier_llm.comm.transport import check_transport, read_transport
from frontier_llm.config import RunConfig, phases_of
from frontier_llm.data.loader import open_batches
from frontier_llm.errors import FrontierError
from frontier_llm.machine.cores import THREADS, choose_threads
from frontier_llm.machine.env import ONE_QUEUE, RCCL_LOG
from frontier_llm.machine.load import load_machine, rates
from frontier_llm.machine.processor import limit_instruction_set
from frontier_llm.ops.native import describe_instruction_sets
from frontier_llm.run import hostlist
from frontier_llm.run.failure import Failure, write_failure
from frontier_llm.run.job_secret import JobSecret, folder_of, private_folder
from frontier_llm.run.launchers import RankEnv
from frontier_llm.run.rank_env import environ, node_name
from frontier_llm.run.run_dir import distrust
from frontier_llm.topology.engine_rules import in_flight
from frontier_llm.topology.expert_nodes import run_layout
from frontier_llm.topology.plan import ParallelPlan, make_plan
from frontier_llm.topology.rank_variables import (
    environment_name,
    needs_network_plugin,
    node_count,
    set_rank_variables,
    shards_weights,
)
from frontier_llm.training.agreement import RankReport, agree, judge
from frontier_llm.training.build import TrainState, build_state
from frontier_llm.training.device import Found, find_device, keep_freed_memory
from frontier_llm.training.start_rates import check_rates
from frontier_llm.units import plural


@contextmanager
def joined(
    config: RunConfig, place: RankEnv | None, recorded: bool = True
) -> Iterator[tuple[ParallelPlan, Mesh, torch.device]]:
    """Connect this rank to the other ranks of the job, and yield plan, mesh and device.

    At the end of the `with` block the process groups are destroyed, also after an error. With `recorded`, a failed
    start is written to the run directory. Raises FrontierError if a device cannot be used or if ranks differ in device
    or software.
    """
    world_size = place.world_size if place else 1
    log.set_rank(place.rank if place else 0, world_size)
    limit_instruction_set()  # the command line has called this function already, other callers have not
    with _known(config, place) as job:
        sockets_forbidden = _set_environment(config, job)
        _start_store(config, job)
        found = find_device(config, place, job.folder if job else None)
        device = found.device
        if device is not None and device.type == "cpu":
            keep_freed_memory()
            log.info(describe_instruction_sets())
        plan = make_plan(config, world_size)
        mesh = _join(config, plan, job, found, recorded)
        assert device is not None  # otherwise `_join` has raised an error
        try:
            if sockets_forbidden and device.type == "cuda" and job is not None:
                _check_network(mesh, job)
            yield plan, mesh, device
        except (FrontierError, RuntimeError) as error:
            if mesh.world.size > 1:
                path = dump_flight_record(mesh, Path(config.train.run_dir) / "logs", str(error))
                log.warn(f"this rank's last collectives and messages are in {path}")
            raise


@contextmanager
def joined_state(config: RunConfig, place: RankEnv | None, draws: bool = True) -> Iterator[TrainState]:
    """Connect this rank to the other ranks of the job, build its training state, and yield the state.

    With `draws` False, the initial weights are not drawn, because a checkpoint will replace them.
    """
    with joined(config, place) as (plan, mesh, device):
        run_dir = Path(config.train.run_dir)
        check_rates(config.guard, place, mesh, device, lambda failure: _record_failed_start(run_dir, failure))
        batches = open_batches(phases_of(config)[0].config, mesh.dp.rank, mesh.dp.size)
        state = build_state(config, plan, mesh, device, batches, draws)
        yield state
        state.optimizer.wait_for_gather()  # if this rank exited during an all-gather, the other ranks would fail


class _Job:
    """Identity, secret and node-local folder of the job that started this rank."""

    def __init__(self, config: RunConfig, place: RankEnv) -> None:
        self.place = place
        self.secret = JobSecret(place, Path(config.train.run_dir))
        self.folder = private_folder(self.secret.wait(config.train.timeout_s))


@contextmanager
def _known(config: RunConfig, place: RankEnv | None) -> Iterator[_Job | None]:
    """Yield the job of a process that a launcher has started, or None.

    At the end, destroy the process groups and remove the files that this rank has made outside of the run directory.
    """
    job = _Job(config, place) if place else None
    try:
        yield job
    finally:
        disconnect()
        if job is not None:
            job.secret.forget()
            if job.place.local_rank == 0:
                shutil.rmtree(job.folder, ignore_errors=True)


def _set_environment(config: RunConfig, job: _Job | None) -> bool:
    """Set the variables that RCCL, libfabric and MIOpen need on this machine, and log each with its origin.

    Variables that the command has already set are kept. Raises ConfigError if the machine's environment is unknown.
    Returns True if collectives must not use sockets.
    """
    if job is None:
        if environ(THREADS) is None:  # the commands set this variable; another program that uses this package may not
            torch.set_num_threads(choose_threads(1).threads)
        return False
    had_threads = environ("OMP_NUM_THREADS") is not None
    settings = set_rank_variables(config, job.place, job.folder)
    if not had_threads:  # torch reads OMP_NUM_THREADS only at its import, which was earlier
        torch.set_num_threads(int(environ("OMP_NUM_THREADS") or 1))
    nodes = node_count(job.place)
    log.info(f"variables of the ranks for {environment_name(config.machine)} on {plural(nodes, 'node')}:")
    for setting in settings:
        log.info(f"  {setting.describe()}")
    if shards_weights(config) and environ(ONE_QUEUE) == "1":
        log.warn(f"{ONE_QUEUE}=1 is exported, so FSDP's all-gathers cannot overlap with compute: unset it")
    return needs_network_plugin(config, nodes)


def _check_network(mesh: Mesh, job: _Job) -> None:
    """Raise BackendError if this node's collectives use sockets, according to RCCL's log."""
    barrier(mesh.world)  # the first collective creates a communicator, and RCCL then logs its transport
    if job.place.local_rank != 0:
        return
    path = Path(environ(RCCL_LOG) or "")
    if path.parent != job.folder:
        log.info(f"the network is not checked, because the exported {RCCL_LOG} sends RCCL's log to {path}")
        return
    in_use = read_transport(path.read_text(encoding="utf-8", errors="replace") if path.is_file() else "")
    check_transport(in_use, job.place.hostname)
    log.info(f"network of the collectives between nodes: {in_use}")
    path.unlink()


def _by_node(config: RunConfig, place: RankEnv) -> bool:
    """Return True if tokens are sent to their experts in two stages: between nodes, and inside each node."""
    if config.model.moe is None:
        return False
    numbers = replace(rates(load_machine(config.machine)), node_devices=place.local_world_size)
    return run_layout(config, place.world_size, numbers).expert_nodes > 1


def _meeting(config: RunConfig, job: _Job) -> Meeting:
    place = job.place
    assert place.master_port is not None
    return Meeting(
        place.master_addr,
        place.master_port,
        first=place.rank - place.local_rank,
        per_node=place.local_world_size,
        secret=job.secret,
        store="authenticated" if config.comm.store == "authenticated" else "torch",
        folder=lambda: folder_of(job.secret()),
    )


def _start_store(config: RunConfig, job: _Job | None) -> None:
    """On rank 0, start the process that serves the store. It starts while rank 0 prepares its device."""
    if config.comm.store in ("direct", "node"):
        log.info(
            f"comm.store={config.comm.store} is an old value that now means auto, which is torch's TCPStore. For the "
            "store that it selected before, set comm.store=authenticated"
        )
    if job is not None and job.place.world_size > 1 and config.comm.backend != "mpi":
        start_store(job.place.rank, job.place.world_size, _meeting(config, job), config.train.timeout_s)


def _record_failed_start(run_dir: Path, failure: Failure) -> None:
    """Write the failure of a start to the run directory, and exclude faulty nodes from later jobs."""
    write_failure(run_dir, failure, complete=True)
    if failure.excluded_hosts:
        try:
            distrust(run_dir, list(failure.excluded_hosts))
        except OSError as error:
            log.warn(
                f"cannot record that {hostlist.compress(failure.excluded_hosts)} must no longer be used: "
                f"{error.strerror}"
            )


def _join(config: RunConfig, plan: ParallelPlan, job: _Job | None, found: Found, recorded: bool) -> Mesh:
    """Return the mesh after all ranks have reported equal facts. Raises FrontierError if the facts differ."""
    alone = job is None or job.place.world_size == 1
    report = RankReport.of(node_name(), found.facts, found.error)
    run_dir = Path(config.train.run_dir)

    def record(failure: Failure) -> None:
        if recorded:
            _record_failed_start(run_dir, failure)

    if found.error is not None and (alone or config.comm.backend == "mpi"):  # there is no store to report to
        if job is not None and (failure := judge([report])):
            record(failure)
        raise found.error
    if job is None or alone:
        return serial_mesh()
    place = job.place
    default = "nccl" if found.device is not None and found.device.type == "cuda" else "gloo"
    backend = default if config.comm.backend == "auto" else config.comm.backend

    def agree_before_collectives(store: Store) -> None:
        agree(store, place.rank, place.world_size, report, record, timeout_s)

    timeout_s = config.train.timeout_s
    connect(place.rank, place.world_size, _meeting(config, job), backend, timeout_s, agree_before_collectives)
    return build_mesh(
        plan.grid,
        place.rank,
        plan.placement,
        tied_embeddings=config.model.tied_embeddings,
        timeout_s=timeout_s,
        comm=config.comm.model_copy(update={"in_flight": in_flight(config, found.architecture)}),
        ranks_per_node=place.local_world_size,
        experts=config.model.moe is not None,
        by_node=_by_node(config, place),
    )
