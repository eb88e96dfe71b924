"""What a run needs, known before it starts."""
