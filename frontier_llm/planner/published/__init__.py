"""Published measurements of other people's runs, and how far the planner is from them. Only `plan --validate` and
scripts/ import this.
"""
