"""What a person sees of a run or a plan: console, run directory, W&B, tables, charts and pages.

May import `planning` and below; never `training`. Start with `run_dir.py` (the files), then `run_report.py`.
"""
