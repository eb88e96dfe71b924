"""Activation checkpointing: a policy per layer, applied at one hook point, proven to be in effect."""
