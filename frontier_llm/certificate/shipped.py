"""Writes docs/generated/certificates.md: the certificates of the shipped pretraining runs, without seconds.

python -m frontier_llm.certificate.shipped [--check]      --check: exit 1 if the page is not current
"""

from __future__ import annotations

import sys

from frontier_llm.certificate.certificate import NAMES, Certificate, certify
from frontier_llm.certificate.page import as_markdown
from frontier_llm.certificate.subject import Subject
from frontier_llm.cluster.admission import with_prediction
from frontier_llm.cluster.batch import default_continuation
from frontier_llm.cluster.sbatch import JOBS
from frontier_llm.cluster.sites import load_site, root_dir
from frontier_llm.cluster.submit import JobRequest, wanted_job
from frontier_llm.config import load_run
from frontier_llm.config.phases import PRODUCTION
from frontier_llm.files import write_atomically

PAGE = root_dir() / "docs" / "generated" / "certificates.md"
ELSEWHERE = "this page was written on another computer than the site"
SYNTHETIC = ("data.train=synthetic", "data.allow_synthetic=true")
RUN_DIR = "/scratch/runs/NAME"
HEAD = """<!-- Written by python -m frontier_llm.certificate.shipped. -->
# Certificates of the shipped runs

`frontier-llm check` makes these certificates, here without seconds and line numbers
([check a run before it is queued](../check.md)).
The runs have synthetic data and the account ABC123.
All times, memory and costs are predicted for Frontier's machine file, and no run of this page ran on an MI250X.
"""


def certificate_of(name: str) -> Certificate:
    """Return the certificate of a shipped run on the nodes of its batch script."""
    job = next(job for job in JOBS if job.name == name)
    site = load_site(job.site)
    settings = [f"machine={site.machine}", f"train.run_dir={RUN_DIR}", *SYNTHETIC]
    config = load_run(name, settings)
    wanted = wanted_job(config, site, job.nodes, continuation=default_continuation(config))
    request = with_prediction(JobRequest(job=wanted, config=config, site=site, account="ABC123"))
    ranks = job.nodes * site.tasks_per_node
    return certify(Subject(config=config, world_size=ranks, request=request, elsewhere=ELSEWHERE), NAMES)


def section_of(name: str) -> str:
    """Return the page's section of one run."""
    certificate = certificate_of(name)
    return f"\n## {name}: {certificate.title}\n\n{as_markdown(certificate)}\n"


def page() -> str:
    """Return the complete page."""
    return HEAD + "".join(section_of(name) for name in PRODUCTION.values())


def main() -> int:
    """Write the page. With --check, only compare the text with the file."""
    text = page()
    if "--check" not in sys.argv[1:]:
        write_atomically(PAGE, text)
        return 0
    if PAGE.read_text(encoding="utf-8") == text:
        return 0
    print(f"{PAGE} is not current: run python -m frontier_llm.certificate.shipped", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
