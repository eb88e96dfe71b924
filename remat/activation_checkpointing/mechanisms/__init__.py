"""Recompute or offload a layer: one file for each mechanism, which ends with its `MECHANISM`.

May import `config`, `machine` and `model`. Start with `mechanism.py` (what defines a mechanism), then `recompute.py`.
Several mechanisms use `arguments`, `counters`, `operators`, `lazy_matmul` and `saved_tensors`.
"""
