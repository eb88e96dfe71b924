"""Train a run: build it, step it, prove it, save it, guard it, end it.

May import every room but `lab`. Start with `build.py`, then `loop.py`; `run.py` is what a run consists of.
"""
