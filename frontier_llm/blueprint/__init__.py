"""Description of a model without torch: parameters, work of a step, layouts and optimizer states."""
