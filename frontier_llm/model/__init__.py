"""The transformer, written like serial code and built one stage at a time on the meta device."""

from frontier_llm.model.batch import Microbatch
from frontier_llm.model.initialize import initial_rows, initialize
from frontier_llm.model.stage import Stage, build_stages

__all__ = ["Microbatch", "Stage", "build_stages", "initial_rows", "initialize"]
