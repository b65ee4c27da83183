"""Cost models of a training step: seconds and bytes, from formulas or measured tables, for one or many layouts."""
