"""Training states (training checkpoints) and Hugging Face exports on disk: written, verified, found, resharded, loaded.

May import `config`, `machine` and `model`. Start with `save.py`, then `load.py`; `manifest.py` says what is complete.
"""
