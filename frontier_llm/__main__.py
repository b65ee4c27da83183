"""`python -m frontier_llm` is the same as `frontier-llm`, for an environment without that script on its PATH."""

from frontier_llm.cli.main import entry

entry()
