from frontier_llm.api.checkpoint import Model as Model
from frontier_llm.api.checkpoint import evaluate as evaluate
from frontier_llm.api.checkpoint import open_checkpoint as open_checkpoint
from frontier_llm.api.checkpoint import score as score
from frontier_llm.api.plan import Plan as Plan
from frontier_llm.api.plan import plan as plan
from frontier_llm.api.run import Run as Run
from frontier_llm.api.run import list_runs as list_runs
from frontier_llm.api.run import load_run as load_run
from frontier_llm.api.run import read_metrics as read_metrics
from frontier_llm.api.train import Result as Result
from frontier_llm.api.train import train as train
from frontier_llm.api.trainer import Trainer as Trainer
from frontier_llm.errors import FrontierError as FrontierError
from frontier_llm.errors import RankFailure as RankFailure

__version__: str
__all__: list[str]
