"""frontier-llm <command>."""
