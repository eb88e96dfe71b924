"""Find settings for a run: the fastest that fit a machine, what helps a run that does not, what goes on with less.

`choices` lists what may be changed, `screening` estimates a setting, `search` plans the best of them,
`remedies` says what well-known measures give, and `less_memory` chooses for a run that ran out. Start with `search`.
"""
