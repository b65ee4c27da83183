"""Ahead-of-time compilation of the GPU kernels.

Compiling needs Triton, msgpack and pyelftools, but no GPU. Launching needs none of these packages.
"""
