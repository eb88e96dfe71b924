"""Decide what each layer keeps, recomputes or moves: policies, applied at one hook point, proven to be in effect.

May import `config`, `machine` and `model`. Start with `policy.py` (one row per policy: which layers, which mechanism),
then `apply.py`; `mechanisms/` has one file for each mechanism. `validation.py` and `dry_run.py` refuse what cannot
work, `replay.py` and `verification.py` prove the rest in the first micro-batch.
"""
