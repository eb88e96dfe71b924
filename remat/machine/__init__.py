"""This machine: ranks and their collectives, GPUs, memory, cores, compiled ops, and checks that all of it works.

May import `config`. Start with `distributed.py` (ranks) or `node.py` (what a node has).
"""
