"""Export models: write Hugging Face folders, merge adapters, read exports back, sample, upload to the hub.

Start with export.py; hf_files.py decides which weights go into which file.
"""
