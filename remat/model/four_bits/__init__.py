"""4-bit weights that ZeRO-3 shards: the bytes of a matrix, its product, and how files are read into them.

Start with `sharded_4bit.py`. bitsandbytes is optional, so runs without QLoRA import only `layout_4bit.py`.
"""
