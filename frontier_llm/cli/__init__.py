"""The commands of `frontier-llm`."""
