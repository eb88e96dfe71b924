"""`remat launch`: a supervisor in front of DeepSpeed's launchers, and one keeper for each rank.

May import `config` and `machine`, and nothing heavy: no torch. Start with `supervisor.py`; `nodes.py` starts a
supervisor on each node, and `exit_codes.py` has what a launch may end with.
"""
