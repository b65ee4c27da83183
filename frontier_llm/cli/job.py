"""The module that launch/job.sh runs in the batch shell of a training job.

It runs the checks of `frontier-llm submit` and then the supervisor (`cluster.supervisor`).
"""

from __future__ import annotations

import sys

from frontier_llm.cluster import supervisor
from frontier_llm.cluster.admission import admit_start

if __name__ == "__main__":
    sys.exit(supervisor.main(sys.argv[1:], admit=admit_start))
