"""rank ↔ (pp, dp, cp, tp), groups as tuples of ranks, layers → stages, and what each rank owns."""
