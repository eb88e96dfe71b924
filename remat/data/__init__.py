"""Turn text, rows or chats into fixed blocks of tokens, and blocks into the batches of a step.

May import `config` and `machine`. Start with `build.py`, then `batches.py`.
"""
