"""The run directory and the identity of a rank. Ranks, supervisor, `status` and `tune` communicate only through the run
directory. This package imports only the root modules.
"""
