"""4-bit weights that ZeRO-3 shards: the bytes of a matrix, its product, and how they are read from files.

Start with `sharded_4bit.py`. bitsandbytes is optional: only `layout_4bit.py` is imported without being asked for.
"""
