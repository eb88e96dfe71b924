"""From text, rows or chats to fixed blocks of tokens, and from blocks to the batches of a step.

May import `config` and `machine`. Start with `build.py`, then `batches.py`.
"""
