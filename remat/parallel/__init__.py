"""How one model or one sequence is divided over ranks beyond ZeRO.

May import `config`, `machine`, `data` and `model`. `tensor_parallel.py` splits layers, and `vocabulary.py` the output
layer and its loss. `pipeline_parallel.py` divides the layers over stages. For sequences start with
`sequence_parallel.py`: `ulysses.py` is the attention, `sequence_trial.py` finds out which models can.
"""
