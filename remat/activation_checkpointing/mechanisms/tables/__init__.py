"""Record a layer's forward as values and operations, and choose which of its values a table keeps.

Start with `graph.py` (what one call of a layer computes and saves), then `table.py` (what is kept, and what is
recomputed from it) and `frontier.py` (the fastest choice for a number of bytes). `mechanisms/budget.py` applies tables.
"""
