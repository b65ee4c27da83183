"""Description of the hardware: machine files with the source of every number, node affinity, and the environment
variables that RCCL needs.
"""
