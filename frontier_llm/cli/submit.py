"""frontier-llm submit RUN --site SITE --nodes N [key=value …]: check everything, freeze the code, queue one job."""

from __future__ import annotations

import argparse
import json
import math
from typing import TYPE_CHECKING

from frontier_llm.cli.arguments import add_job, add_json, add_resume, add_run, count_of, examples, natural, positive, resume_flags

if TYPE_CHECKING:
    from frontier_llm.cluster.submit import Request
    from frontier_llm.config import RunConfig


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "submit",
        help="queue a run on a Slurm site",
        description="Queue a run. The job saves before its walltime and continues by itself until its last step, a file STOP in the run "
        "directory, or three attempts without progress; a file SAVE there makes a checkpoint in between. Hosts that failed before are excluded.",
        epilog=examples(
            "frontier-llm submit train_small --site lumi --nodes 1 -A project_465 --dry-run",
            "frontier-llm submit train_1t --site frontier --nodes 384 --spares 4 -A ABC123",
        ),
    )
    add_run(parser)
    parser.add_argument("--site", required=True, help="frontier, lumi, generic, local, or the path of a site file")
    parser.add_argument("--nodes", type=positive, required=True, metavar="N", help="nodes that compute")
    parser.add_argument("--spares", type=natural, default=0, metavar="N", help="further nodes, to replace dead ones (default: 0)")
    parser.add_argument("--until-tokens", type=count_of, metavar="COUNT", help="train on so many tokens, e.g. 300B (sets train.steps)")
    add_job(parser)
    parser.add_argument("--qos", metavar="NAME", help="e.g. debug")
    parser.add_argument("--time", metavar="H:MM:SS", help="walltime of one slice (default: the longest of the site's bin)")
    parser.add_argument(
        "--continue-with",
        choices=("requeue", "successor", "never"),
        default="requeue",
        help="after an unfinished slice: the same job again, a new one, or nothing (default: requeue)",
    )
    parser.add_argument("--dependency", metavar="TYPE:JOB", help="as sbatch's")
    parser.add_argument("--exclude", metavar="HOSTS", help="hosts to avoid, e.g. n[3,7-8]")
    add_resume(parser)
    parser.add_argument("--dry-run", action="store_true", help="show the script and the command, write and queue nothing")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Exit code 0 when the job is queued (or the dry run is legal)."""
    from frontier_llm import log
    from frontier_llm.cluster import submit as submission
    from frontier_llm.cluster.sites import load_site, parse_walltime
    from frontier_llm.config import load_run

    site = load_site(args.site)
    config = load_run(args.run, [f"machine={site.machine}", *args.overrides])
    request = submission.Request(
        config=config if args.until_tokens is None else with_token_target(config, args.until_tokens, args.overrides),
        site=site,
        nodes=args.nodes,
        spares=args.spares,
        account=args.account or submission.default_account(),
        partition=args.partition,
        qos=args.qos,
        minutes=parse_walltime(args.time) if args.time else None,
        continue_with=args.continue_with,
        dependency=args.dependency,
        exclude=submission.parse_hosts(args.exclude),
        flags=resume_flags(args),
    )
    request = _with_prediction(request)
    made = submission.prepare(request) if args.dry_run else submission.submit(request)
    log.info(submission.describe(request, made))
    for note in filter(None, _notes(request)):
        log.warn(note)
    if args.json:
        print(json.dumps(made.as_dict(), indent=1))
    else:
        print(made.script if args.dry_run else made.job_id)
    return 0


def _notes(request: Request) -> list[str]:
    """What the user should know and may want."""
    from frontier_llm.blueprint import total_parameters
    from frontier_llm.cluster.notes import quota_note, scratch_note, start_note
    from frontier_llm.machine import fp16_note, load_machine
    from frontier_llm.planner.operations import CHECKPOINT_BYTES_PER_PARAMETER

    checkpoint_bytes = CHECKPOINT_BYTES_PER_PARAMETER * total_parameters(request.config.model)
    device = load_machine(request.site.machine).device
    precision = fp16_note(request.config.precision, device.flushes_fp16)
    return [scratch_note(request), quota_note(request, checkpoint_bytes), start_note(request), precision]


def with_token_target(config: RunConfig, tokens: float, overrides: list[str]) -> RunConfig:
    """The run with as many steps as `tokens` need. Raises ConfigError when train.steps is given too."""
    from frontier_llm.errors import ConfigError

    if any(word.startswith("train.steps=") for word in overrides):
        raise ConfigError("the run's end is given twice", "leave train.steps= or --until-tokens out", "--until-tokens")
    steps = math.ceil(tokens / (config.batch.global_batch * config.model.sequence_length))
    return config.model_copy(update={"train": config.train.model_copy(update={"steps": steps})})


def _with_prediction(request: Request) -> Request:
    """The request with the planner's step time. Raises ConfigError with everything that would fail, memory and data included."""
    from dataclasses import replace

    from frontier_llm.cluster import submit as submission
    from frontier_llm.data.loader import data_problems
    from frontier_llm.errors import ConfigError
    from frontier_llm.scaling.predict import predict
    from frontier_llm.topology import plan_problems

    devices, memory = request.nodes * request.site.tasks_per_node, []
    if not plan_problems(request.config, devices):
        predicted = predict(request.config, devices, request.site.machine)
        memory = predicted.memory_problems()
        request = replace(request, expected_step_s=predicted.step_time_s)
    if found := [*submission.problems(request), *memory, *data_problems(request.config)]:
        raise ConfigError(found)
    return request
