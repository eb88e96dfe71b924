"""Claims D: gradient accumulation, flash attention, effects side by side, and the decision tree."""

from __future__ import annotations

from remat.claims.claim import Because, Claim, Statement, Unplanned, gb, run, share
from remat.claims.figures import Runs, saved

SEVEN = "model=llama2_7b hardware=1xh100-80"
EIGHT_GPUS = "model=llama2_7b hardware=8xh100-80"
EAGER = "model.attention=eager"

MICRO_BATCHES, LENGTHS = (1, 2, 4, 16), (1024, 2048)
D2 = Claim(
    id="D2",
    title="Gradient accumulation, 7B, 16 sequences a step",
    said="micro-batch 16 runs out of memory, 4 takes 48 GB, 2 takes 32 GB, 1 takes 24 GB; the result is the same",
    runs={
        f"{batch} x {length}": run(SEVEN, "zero2", batch, length, "peft=lora", accumulation=16 // batch)
        for batch in MICRO_BATCHES
        for length in LENGTHS
    },
    compared=[
        Statement(
            "micro-batch 16 on 80 GB, at 1024 / 2048 tokens",
            "does not fit",
            lambda r: [not r[f"16 x {n}"].fits for n in LENGTHS],
            lambda r: "needs " + " / ".join(f"{r[f'16 x {n}'].gpu:.0f}" for n in LENGTHS) + " GiB",
        ),
        gb("peak with micro-batch 4, at 1024 / 2048 tokens", 48, lambda r: _peaks(r, 4)),
        gb("peak with 2", 32, lambda r: _peaks(r, 2)),
        gb("peak with 1", 24, lambda r: _peaks(r, 1)),
    ],
    why=[
        Because(
            "As full fine-tuning no micro-batch fits 80 GB (A1). With LoRA and without activation checkpointing "
            "the claim lies between 1024 and 2048 tokens: {weights:.1f} GiB of frozen weights, and {each:.1f} to "
            "{more:.1f} GiB of activations per sequence.",
            lambda r: all(
                _peaks(r, n)[0] < claim * 1e9 / 2**30 < 1.1 * _peaks(r, n)[1]
                for n, claim in ((4, 48), (2, 32), (1, 24))
            ),
            lambda r: {
                "weights": r["1 x 1024"].weights,
                "each": r["1 x 1024"].activations,
                "more": r["1 x 2048"].activations,
            },
        ),
        Because(
            "That the result is the same is held by `tests/launch/test_trajectories.py`: losses with and without "
            "accumulation against a plain PyTorch loop."
        ),
    ],
    depends_on="the sequence length",
)


def _peaks(r: Runs, batch: int) -> list[float]:
    return [r[f"{batch} x {length}"].peak for length in LENGTHS]


D3 = Claim(
    id="D3",
    title="Flash attention, 7B",
    said="sequence 512: 28 to 24 GB, 1.1 times as fast; 2048: out of memory to 42 GB; 4096: out of memory to 68 GB; "
    "memory linear in the sequence length",
    runs={
        f"{kind}, {batch} x {length}": run(SEVEN, "zero2_offload", batch, length, *more)
        for kind, more in (("flash", ()), ("eager", (EAGER,)))
        for batch in (1, 2)
        for length in (512, 2048, 4096)
    },
    compared=[
        gb("512, eager, batch 1 / 2", 28, lambda r: _both(r, "eager", 512)),
        gb("512, flash, batch 1 / 2", 24, lambda r: _both(r, "flash", 512)),
        Statement(
            "2048, eager, on 80 GB, batch 1 / 2",
            "does not fit",
            lambda r: [not r[f"eager, {n} x 2048"].fits for n in (1, 2)],
            lambda r: "needs " + " / ".join(f"{r[f'eager, {n} x 2048'].gpu:.0f}" for n in (1, 2)) + " GiB",
        ),
        gb("2048, flash, batch 1 / 2", 42, lambda r: _both(r, "flash", 2048)),
        gb("4096, flash, batch 1 / 2", 68, lambda r: _both(r, "flash", 4096)),
        share("faster at 512, batch 1 / 2", 10, lambda r: [_faster(r, n, 512) for n in (1, 2)]),
        Statement(
            "activations at 4096 tokens over those at 2048",
            "2 (linear)",
            lambda r: abs(_growth(r, "flash") - 2) < 0.1,
            lambda r: f"flash {_growth(r, 'flash'):.2f}, eager {_growth(r, 'eager'):.2f}",
        ),
    ],
    why=[
        Because(
            "Planned without activation checkpointing and with the optimizer in host memory, as full fine-tuning "
            "needs more than 80 GB otherwise (A1). At micro-batch 2 the figures for 2048 and 4096 tokens are right.",
            lambda r: (
                abs(r["flash, 2 x 2048"].peak / (42e9 / 2**30) - 1) < 0.1
                and abs(r["flash, 2 x 4096"].peak / (68e9 / 2**30) - 1) < 0.1
            ),
        ),
        Because(
            "The kernel does not keep the scores, seq x seq per head; eager attention at 4096 tokens has "
            "{eager:.0f} GiB of activations for one sequence, flash {flash:.0f}.",
            lambda r: r["eager, 1 x 4096"].activations > 3 * r["flash, 1 x 4096"].activations,
            lambda r: {
                "eager": r["eager, 1 x 4096"].activations,
                "flash": r["flash, 1 x 4096"].activations,
            },
        ),
        Because("The flash kernel is torch's, which is what `model.attention=sdpa` runs on such a GPU."),
    ],
    depends_on="the micro-batch",
)


def _both(r: Runs, kind: str, length: int) -> list[float]:
    return [r[f"{kind}, {batch} x {length}"].peak for batch in (1, 2)]


def _faster(r: Runs, batch: int, length: int) -> float:
    return r[f"eager, {batch} x {length}"].compute_s / r[f"flash, {batch} x {length}"].compute_s - 1


def _growth(r: Runs, kind: str) -> float:
    return r[f"{kind}, 1 x 4096"].activations / r[f"{kind}, 1 x 2048"].activations


D4 = Claim(
    id="D4",
    title="Effects side by side",
    said="activation checkpointing 30 to 40 % of memory for 25 % of speed; flash attention 10 to 20 %, 10 % faster; "
    "accumulation 50 % and more for 5 %; QLoRA 75 % for 10 %; ZeRO-3 90 % and more for 60 %",
    runs={
        "one GPU": run(SEVEN, "zero2", 1, 2048),
        "one GPU, QLoRA": run(SEVEN, "zero2", 1, 2048, "peft=qlora"),
        "eight": run(EIGHT_GPUS, "zero2", 1, 2048, ranks=8),
        "eight, checkpointing": run(EIGHT_GPUS, "zero2", 1, 2048, policy="full", ranks=8),
        "eight, ZeRO-3": run(EIGHT_GPUS, "zero3", 1, 2048, ranks=8),
        "eight, ZeRO-3 offload": run(EIGHT_GPUS, "zero3_offload", 1, 2048, ranks=8),
        "host": run(SEVEN, "zero2_offload", 1, 2048),
        "host, checkpointing": run(SEVEN, "zero2_offload", 1, 2048, policy="full"),
        "host, reentrant": run(SEVEN, "zero2_offload", 1, 2048, policy="full_reentrant"),
        "host, eager": run(SEVEN, "zero2_offload", 1, 2048, EAGER),
        "host, 512": run(SEVEN, "zero2_offload", 1, 512),
        "host, 512, eager": run(SEVEN, "zero2_offload", 1, 512, EAGER),
        "LoRA, 16 at once": run(SEVEN, "zero2", 16, 1024, "peft=lora"),
        "LoRA, 4 at once": run(SEVEN, "zero2", 4, 1024, "peft=lora", accumulation=4),
        "LoRA, 1 at once": run(SEVEN, "zero2", 1, 1024, "peft=lora", accumulation=16),
    },
    compared=[
        share(
            "checkpointing: saved, ZeRO-2 on 8 GPUs / on 1 with the optimizer on the host",
            (30, 40),
            lambda r: [_saved(r, n, f"{n}, checkpointing") for n in ("eight", "host")],
        ),
        share(
            "checkpointing: slower, forward and backward if reentrant / whole steps of both",
            25,
            lambda r: [
                1 - 1 / (1 + r["host, reentrant"].slower),
                *(_slower(r, n, f"{n}, checkpointing") for n in ("eight", "host")),
            ],
        ),
        share(
            "flash attention: saved at 512 / 2048 tokens",
            (10, 20),
            lambda r: [_saved(r, "host, 512, eager", "host, 512"), _saved(r, "host, eager", "host")],
        ),
        share(
            "flash attention: forward and backward faster at 512 / 2048",
            10,
            lambda r: [
                r["host, 512, eager"].compute_s / r["host, 512"].compute_s - 1,
                r["host, eager"].compute_s / r["host"].compute_s - 1,
            ],
        ),
        share(
            "accumulation: saved by micro-batch 1 instead of 4 / 16",
            (50, 100),
            lambda r: [_saved(r, f"LoRA, {n} at once", "LoRA, 1 at once") for n in (4, 16)],
        ),
        share(
            "accumulation: slower by 1 instead of 4 / 16",
            5,
            lambda r: [_slower(r, f"LoRA, {n} at once", "LoRA, 1 at once") for n in (4, 16)],
        ),
        share(
            "QLoRA: saved of the peak of full fine-tuning / of the weights",
            75,
            lambda r: [
                _saved(r, "one GPU", "one GPU, QLoRA"),
                saved(r["one GPU"].weights, r["one GPU, QLoRA"].weights),
            ],
        ),
        Unplanned("QLoRA: slower by", "10 %"),
        share(
            "ZeRO-3: saved on 8 GPUs without / with offload",
            (90, 100),
            lambda r: [_saved(r, "one GPU", n) for n in ("eight, ZeRO-3", "eight, ZeRO-3 offload")],
        ),
        share(
            "ZeRO-3 with offload: slower than ZeRO-2",
            60,
            lambda r: _slower(r, "eight", "eight, ZeRO-3 offload"),
        ),
    ],
    why=[
        Because("A share needs a whole: each of these is another figure for another run."),
        Because(
            "ZeRO-3 alone shares the states out over the GPUs, {share:.1f} % less on 8 of them. Its time without "
            "offload is open until it is measured: the plan takes all of its gathers to run beside the compute.",
            lambda r: abs(saved(r["one GPU"].states, r["eight, ZeRO-3"].states) - 7 / 8) < 0.001,
            lambda r: {"share": 100 * saved(r["one GPU"].states, r["eight, ZeRO-3"].states)},
        ),
        Because(
            "QLoRA saves what is trained no more, with nothing else changed: {before:.0f} to {after:.1f} GiB.",
            lambda r: r["one GPU, QLoRA"].states < 0.1 * r["one GPU"].states,
            lambda r: {"before": r["one GPU"].peak, "after": r["one GPU, QLoRA"].peak},
        ),
    ],
    depends_on="the model states beside it, the sequence length, and the micro-batch",
)


def _saved(r: Runs, before: str, after: str) -> float:
    return saved(r[before].peak, r[after].peak)


def _slower(r: Runs, before: str, after: str) -> float:
    """The speed that is lost: of a whole step."""
    return 1 - r[before].step_s / r[after].step_s


MACHINES = ("1x4090", "8xh100-80")
D6 = Claim(
    id="D6",
    title="A decision tree by model size",
    said="fits: nothing; below 7B: checkpointing and bf16; 7 to 13B: and flash attention; 13 to 30B: and QLoRA; above: "
    "and ZeRO-3 offload",
    runs={
        f"{size}, {policy}, {machine}": run(
            f"model=llama2_{size} hardware={machine}",
            "zero3",
            1,
            2048,
            policy=policy,
            ranks=8 if machine.startswith("8x") else 1,
        )
        for size in ("7b", "13b")
        for machine in MACHINES
        for policy in ("none", "full")
    },
    compared=[
        Statement(
            f"{size.upper()} fits with bf16, checkpointing and flash attention, on {MACHINES[0]} / {MACHINES[1]}",
            "yes",
            lambda r, s=size: [r[f"{s}, full, {machine}"].fits for machine in MACHINES],  # type: ignore[misc]
            lambda r, s=size: " / ".join(  # type: ignore[misc]
                f"{r[f'{s}, full, {machine}'].gpu:.1f} of {r[f'{s}, full, {machine}'].gpu_found:.1f} GiB"
                for machine in MACHINES
            ),
        )
        for size in ("7b", "13b")
    ],
    why=[
        Because(
            "The size of the model alone decides nothing: on 8xh100-80 even 13B fits without activation "
            "checkpointing ({gpu:.1f} GiB), on 1x4090 7B does not with all that the tree says.",
            lambda r: r["13b, none, 8xh100-80"].fits and not r["7b, full, 1x4090"].fits,
            lambda r: {"gpu": r["13b, none, 8xh100-80"].gpu},
        ),
        Because(
            "`remat plan` takes the place of a tree: it plans the run on the machine named and advises the "
            "changes that make it fit."
        ),
    ],
    depends_on="the machine, the strategy and the tokens",
)

CLAIMS = [D2, D3, D4, D6]
