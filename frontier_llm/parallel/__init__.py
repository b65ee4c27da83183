"""Parallelism: tensor-, expert- and context-parallel layers, and the pipeline engine."""
