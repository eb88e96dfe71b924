"""Plan a run before it starts: the memory it needs, whether it fits, where every byte is, and how long a step takes.

May import `activation_checkpointing`, `parallel`, `model`, `saving`, `machine` and `config`. Start with
`strategy.py` (options resolved against a model), then `plan.py` (the bytes and the peak). `simulation/` has the memory
of one micro-batch over time, `settings/` the search for settings that fit. `preflight.py` and `launch_plan.py` compare
a plan with a machine.
"""
