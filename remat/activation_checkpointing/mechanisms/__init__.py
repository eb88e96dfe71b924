"""How a layer is recomputed or offloaded: one file for each mechanism.

May import `config`, `machine` and `model`. Start with `recompute.py`.
"""
