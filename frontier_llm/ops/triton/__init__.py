"""Triton sources of the GPU ops. `python setup.py build_ops` compiles them ahead of time.

Training does not import these modules.
"""
