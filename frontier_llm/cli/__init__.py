"""`frontier-llm <command>`: one module per command, torch imported only where a command needs it."""
