"""`remat compare`: the same run under several choices, each a launch of its own, measured side by side.

May import every room but `cli`. Start with `command.py`, then `experiment.py`.
"""
