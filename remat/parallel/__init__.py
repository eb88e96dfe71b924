"""How one model or one sequence is divided over ranks beyond ZeRO.

May import `config`, `machine`, `data` and `model`. Start with `tensor_parallel.py` for layers that ranks share, and with
`sequence_parallel.py` for sequences: `ulysses.py` is their attention, `sequence_trial.py` says which models can.
"""
