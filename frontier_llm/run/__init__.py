"""The run directory and a rank's identity: the only channel between ranks, supervisor, `status` and `tune`. Imports
the root modules alone.
"""
