"""Find settings for a run: the fastest that fit a machine, and changes that help a run that does not fit.

`choices` lists the changes, `screening` estimates a setting, `search` plans the best of them. `remedies` says what
well-known remedies do, `ladder` finds the longest sequence, `sharding` compares ways to shard on several nodes, and
`less_memory` chooses for a run that ran out of memory. Start with `search`.
"""
