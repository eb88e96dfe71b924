"""What is there: ranks and how they talk, GPUs, memory, cores, compiled ops, and whether they work.

May import `config`. Start with `distributed.py` (ranks) or `node.py` (what a node has).
"""
