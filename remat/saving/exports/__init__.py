"""Models for others: written as Hugging Face folders, adapters merged, read back, sampled, uploaded to the hub.

Start with export.py; hf_files.py says which weights stand in which file.
"""
