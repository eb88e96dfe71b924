"""How one model or one sequence is divided over ranks beyond ZeRO.

May import `config`, `machine`, `data` and `model`. Layers that ranks share are in `tensor_parallel.py`, their output
layer and its loss in `vocabulary.py`. For sequences start with `sequence_parallel.py`: `ulysses.py` is their
attention, `sequence_trial.py` says which models can.
"""
