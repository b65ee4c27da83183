"""Search for a layout with trials on the machine. It starts with the planner's choice and learns from each trial."""
