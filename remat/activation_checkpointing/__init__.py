"""What each layer keeps, recomputes or moves: policies, applied at one hook point, proven to be in effect.

May import `config`, `machine` and `model`. Start with `policy.py` (which layer does what), then `apply.py`; how it is
done is in `mechanisms/`, one file each. `replay.py` and `verification.py` prove it in the first micro-batch.
"""
