"""The transformer model. Its code contains no case for parallel layouts, and each pipeline stage is built on the meta
device.
"""

from frontier_llm.model.batch import Microbatch
from frontier_llm.model.initialize import initial_rows, initialize
from frontier_llm.model.stage import Stage, build_stages

__all__ = ["Microbatch", "Stage", "build_stages", "initial_rows", "initialize"]
