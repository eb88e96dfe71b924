"""How one model is divided over ranks beyond ZeRO: tensor parallelism.

May import `config` and `machine`. There is one file, `tensor_parallel.py`.
"""
