"""Data: text, rows or chats become fixed blocks of tokens, and blocks become the batches of a step.

May import `config` and `machine`. Start with `build.py`, then `batches.py`.
"""
