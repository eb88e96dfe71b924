"""Training recipes for large language models on the GPUs you have, with the truth about memory."""

__version__ = "0.1.0"
