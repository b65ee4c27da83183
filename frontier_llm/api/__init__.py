"""The public interface for Python: its names are imported from `frontier_llm` itself (docs/library.md)."""
