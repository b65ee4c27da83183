"""Description of a model and its training step without torch: parameters, operations, layouts, optimizer states."""
