"""Saved states (training checkpoints) and Hugging Face exports: write, verify, find, load, and reshard for other ranks.

May import `config`, `machine`, `data` and `model`. Start with `save.py`, then `load.py`; `manifest.py` says what is
complete. Models for others are in `exports/`.
"""
