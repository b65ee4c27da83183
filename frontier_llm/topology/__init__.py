"""Layout of a run: ranks ↔ mesh coordinates, groups of ranks, layers → stages, and the shards of each rank."""
