"""`remat compare`: launch the same run under several choices, one launch each, and compare what was measured.

May import every room. Start with `command.py`, then `experiment.py`.
"""
