"""How a layer is recomputed or offloaded: one file for each mechanism, which ends with its `MECHANISM`.

May import `config`, `machine` and `model`. Start with `mechanism.py` (what a mechanism says of itself), then
`recompute.py`. What several of them use: `arguments`, `counters`, `operators`, `lazy_matmul`, `saved_tensors`.
"""
