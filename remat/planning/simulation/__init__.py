"""Simulate one micro-batch of the real model on tensors without storage: live bytes, FLOPs, and what ZeRO adds.

May import `model` and `config`; knows no run and no policy. Start with `simulate.py`.
"""
