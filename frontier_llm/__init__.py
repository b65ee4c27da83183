"""Pretraining with tensor, pipeline and ZeRO-1 data parallelism on MI250X supercomputers. Also runs on a laptop.

The names below are the public interface. Each name is imported at its first use, so that planning imports no torch.
`__init__.pyi` declares the names for type checkers.
"""

from importlib import import_module
from typing import Any

__version__ = "0.3.0"

__all__ = [
    "FrontierError",
    "Model",
    "Plan",
    "RankFailure",
    "Result",
    "Run",
    "Trainer",
    "evaluate",
    "list_runs",
    "load_run",
    "open_checkpoint",
    "plan",
    "read_metrics",
    "score",
    "train",
]

_MODULES = {
    "FrontierError": "errors",
    "Model": "api.checkpoint",
    "Plan": "api.plan",
    "RankFailure": "errors",
    "Result": "api.train",
    "Run": "api.run",
    "Trainer": "api.trainer",
    "evaluate": "api.checkpoint",
    "list_runs": "api.run",
    "load_run": "api.run",
    "open_checkpoint": "api.checkpoint",
    "plan": "api.plan",
    "read_metrics": "api.run",
    "score": "api.checkpoint",
    "train": "api.train",
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use."""
    if name not in _MODULES:
        raise AttributeError(f"module 'frontier_llm' has no attribute {name!r}; public names: {', '.join(__all__)}")
    value = getattr(import_module(f"frontier_llm.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
