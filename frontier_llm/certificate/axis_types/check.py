"""The section "types of values on axes" of a certificate."""

from __future__ import annotations

import traceback
from dataclasses import replace

import torch

from frontier_llm import log
from frontier_llm.certificate.axis_types.judge import judge, parameter_labels
from frontier_llm.certificate.axis_types.labels import AXES
from frontier_llm.certificate.axis_types.simulated import Deadlock
from frontier_llm.certificate.axis_types.small import differences, reasons_not_checkable, serial_copy, small_copy
from frontier_llm.certificate.axis_types.step import run_step
from frontier_llm.certificate.axis_types.trace import is_own, text_of
from frontier_llm.certificate.device_step.count import count_device_step
from frontier_llm.certificate.section import CertificateSection, judged, not_checkable
from frontier_llm.config import RunConfig
from frontier_llm.errors import Problem

NAME = "types"


def check_axis_types(config: RunConfig, world_size: int) -> CertificateSection:
    """Check that one step of this run computes the gradients, norm and weights of the serial step, on every mesh axis.

    Runs the step of a small copy of the run in this process, once on one rank and once on simulated ranks. Then runs
    the step of a rank with the run's sizes and ops on tensors without memory, which counts launches, waits and copies.
    """
    reasons = reasons_not_checkable(config, world_size)
    if reasons:
        return not_checkable(NAME, "; ".join(reasons))
    small = small_copy(config, world_size)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are tiny
    try:
        with log.quiet():
            try:
                serial = run_step(serial_copy(small))[0]
            except Exception as error:  # for example a plugin that needs a GPU
                problem = _failed(error, "one rank")
                return not_checkable(NAME, f"{problem.where}: {problem.what}")
            try:
                ranks = run_step(small)
            except Deadlock as error:
                return judged(NAME, (), (Problem("the step on several ranks", str(error)),))
            except Exception as error:  # the same step does not fail on one rank, so the layout is the cause
                return judged(NAME, (), (_failed(error, "several ranks"),))
            counts = count_device_step(config, world_size)
    finally:
        torch.set_num_threads(threads)
    labels, problems = judge(serial, ranks)
    counted = labels.counted()
    evidence = [
        f"{len(ranks)} simulated ranks, "
        + " x ".join(f"{axis} {_size(ranks, axis)}" for axis in ("tp", "cp", "pp", "dp")),
        *(
            f"values on {axis}: " + ", ".join(f"{count} {letter}" for letter, count in sorted(counted[axis].items()))
            for axis in AXES
            if _size(ranks, axis) > 1
        ),
        "parameters on tp: "
        + ", ".join(f"{count} {pair}" for pair, count in sorted(parameter_labels(serial, ranks).items())),
        "not the options of the run: " + "; ".join(differences(config)),
        *counts.evidence,
    ]
    return replace(judged(NAME, evidence, [*problems, *counts.problems]), by_line=counts.by_line)


def _size(ranks: list, axis: str) -> int:
    return len({record.place[axis] for record in ranks})


def _failed(error: Exception, ranks: str) -> Problem:
    """Return the problem of a step that raises an error on `ranks`."""
    lines = [(frame.f_code, number) for frame, number in traceback.walk_tb(error.__traceback__)]
    own = [line for line in lines if is_own(line)]
    where = text_of(own[-1]) if own else "the training step"
    return Problem(where, f"the step on {ranks} fails: {type(error).__name__}: {error}")
