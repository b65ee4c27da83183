"""`python -m frontier_llm` is `frontier-llm`, where no script of that name is on the PATH."""

from frontier_llm.cli.main import entry

entry()
