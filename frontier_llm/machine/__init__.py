"""What the hardware is: machine files with the source of every number, node affinity, and the environment that RCCL
wants.
"""
