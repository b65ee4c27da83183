"""The measured search for a layout: trials on the machine itself, begun with the planner's choice and led by what
each trial has taught.
"""
