"""The GPU ops: Triton sources, compiled ahead of time by `python setup.py build_ops`; nothing here is imported while
training.
"""
