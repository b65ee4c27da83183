"""The GPU kernels are compiled ahead of time: this needs Triton, msgpack and pyelftools, and no GPU; launching needs
none of them.
"""
