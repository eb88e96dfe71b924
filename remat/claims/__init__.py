"""Figures that people are told about training memory, each set beside a plan."""
