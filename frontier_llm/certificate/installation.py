"""Section "installation": checks that the interpreter of the ranks has the packages, libraries and kernels that the run
needs.
"""

from __future__ import annotations

from pathlib import Path

from frontier_llm.certificate.section import CertificateSection, judged, not_checkable
from frontier_llm.certificate.subject import Subject
from frontier_llm.cluster.readiness import CHECKED, before_the_queue, problems_of
from frontier_llm.cluster.sites import load_site
from frontier_llm.cluster.submit import JobRequest, job_variables, start_problems
from frontier_llm.machine.env import GPU_FILES
from frontier_llm.run.installation import of_this_interpreter
from frontier_llm.run.rank_env import environment

NAME = "installation"


def check_installation(subject: Subject) -> CertificateSection:
    """Refuse an interpreter without a package, library or kernel that the run needs.

    At a site this is the interpreter that jobs use, otherwise the active interpreter.
    """
    if subject.elsewhere:
        return not_checkable(NAME, f"{subject.elsewhere}. `submit` on the site checks {CHECKED}")
    if subject.request is not None:
        return _at_the_site(subject.request)
    return _on_this_computer(subject)


def _at_the_site(request: JobRequest) -> CertificateSection:
    readiness = before_the_queue(request.config, request.site, request.job.directory, job_variables(request))
    if not readiness.is_checkable:
        return not_checkable(NAME, readiness.open_points[0].removeprefix("not checkable here: "))
    checked = f"{CHECKED}: checked in the interpreter of the ranks, as launch/job.sh starts it on {request.site.name}"
    return judged(NAME, (checked, *readiness.open_points), (*readiness.problems, *start_problems(request)))


def _on_this_computer(subject: Subject) -> CertificateSection:
    device = subject.machine.device
    on_gpus = device.vendor != "none" and subject.config.train.device != "cpu"
    if on_gpus and not Path(GPU_FILES[device.vendor]).exists():
        why = f"machine={subject.config.machine} has {device.vendor} GPUs, and this computer has none; add --site NAME"
        return not_checkable(NAME, why)
    facts = of_this_interpreter(device.architecture if on_gpus else None, environment())
    here = load_site("generic").model_copy(update={"machine": subject.config.machine, "name": "this computer"})
    evidence = (
        f"{facts.executable}: Python {facts.python}, {facts.torch.describe()}",
        f"frontier_llm of {facts.package}, its C++ libraries and op back-ends",
    )
    return judged(NAME, evidence, problems_of(facts, here, subject.config))
