"""What is asked of a run: typed options, the rules between them, Hydra's composition, and DeepSpeed's JSON.

Imports no other room. Every module but `compose.py` does with the standard library and YAML. Start with `options.py`,
then `compose.py`.
"""
