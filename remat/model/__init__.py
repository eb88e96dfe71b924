"""Build what is trained: the Hugging Face model, its layers, adapters, loss, optimizer, packing and FLOPs.

May import `config` and `machine`. Start with `hf_model.py`.
"""
