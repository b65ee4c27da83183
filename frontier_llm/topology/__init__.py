"""Parallel layout of a run: mesh coordinates and groups of ranks, layers of each stage, and shards of each rank."""
