"""Enumerate, prune, simulate the finalists, explain; validate against published measurements."""
