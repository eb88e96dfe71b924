"""Claims B7 to B10: small models, depth, and the loss curve."""

from __future__ import annotations

import json

from remat.claims.claim import Because, Claim, Measured, Statement, Unplanned, gb, run, share
from remat.claims.figures import Runs, saved
from remat.config import compose

GRID = compose.ROOT / "docs" / "granularity.json"
BLOCKS = (
    "model=gpt2_small model.architecture.n_layer=6 model.architecture.n_positions=256 "
    "model.architecture.bos_token_id=0 model.architecture.eos_token_id=0 model.architecture.vocab_size={} "
    "hardware=1x3090"
)
VOCABULARIES = (1000, 30522)
PLAIN_FP32 = ("train.precision=fp32", "deepspeed.overrides.zero_optimization.stage=0")
SECONDS_OF_A_STEP = 4.20 / 50

B7 = Claim(
    id="B7",
    title="A 6-block encoder (width 768, 12 heads, batch 4, sequence 256, fp16)",
    said="0.94 to 0.89 GB (-5.7 %), 4.20 to 4.66 s for 50 steps (+10.8 %), mean loss 1.0429 and 1.0463",
    runs={
        f"{policy}, vocabulary {size}": run(
            BLOCKS.format(size), "zero2", 4, 256, "train.precision=fp16", policy=policy
        )
        for size in VOCABULARIES
        for policy in ("none", "full")
    },
    compared=[
        gb(
            "peak without, vocabulary 1000 / 30522",
            0.94,
            lambda r: [r[f"none, vocabulary {n}"].peak for n in VOCABULARIES],
        ),
        gb(
            "peak with, vocabulary 1000 / 30522",
            0.89,
            lambda r: [r[f"full, vocabulary {n}"].peak for n in VOCABULARIES],
        ),
        share(
            "saved of the peak, vocabulary 1000 / 30522",
            5.7,
            lambda r: [_saved_of_peak(r, n) for n in VOCABULARIES],
        ),
        Unplanned("time of 50 steps", "+10.8 %"),
        Measured(
            "losses with and without",
            "differ by 0.0034",
            lambda: not _all_equal(),
            lambda: _equality(),
            "CPU, docs/granularity.md",
        ),
    ],
    why=[
        Because(
            "Not all of the model is named in the claim: the nearest that a plan knows is GPT-2 small cut to 6 "
            "layers, with a small and with a usual vocabulary."
        ),
        Because(
            "With activation checkpointing the peak moves to the optimizer step, where there are no activations: "
            "more cannot be saved, although the activations shrink by {act:.0f} %.",
            lambda r: (
                all(r[f"full, vocabulary {n}"].peak_at_step for n in VOCABULARIES)
                and _shrink(r) > _saved_of_peak(r, 1000)
            ),
            lambda r: {"act": 100 * _shrink(r)},
        ),
        Because(
            "Of the {step:.0f} ms that a step of the source took, forward and backward need {work:.1f} ms on the "
            "planned GPU: that time was mostly not the GPU's, and no plan of the GPU decides it.",
            lambda r: r["none, vocabulary 30522"].compute_s < SECONDS_OF_A_STEP / 2,
            lambda r: {
                "step": 1000 * SECONDS_OF_A_STEP,
                "work": 1000 * r["none, vocabulary 30522"].compute_s,
            },
        ),
        Because(
            "Recomputation with the same random numbers gives the same losses, bit for bit (B10); two losses "
            "that differ are two runs with other random numbers."
        ),
    ],
)


def _saved_of_peak(r: Runs, size: int) -> float:
    return saved(r[f"none, vocabulary {size}"].peak, r[f"full, vocabulary {size}"].peak)


def _shrink(r: Runs) -> float:
    return saved(r["none, vocabulary 1000"].activations, r["full, vocabulary 1000"].activations)


SIZES = ("small", "medium")
B8 = Claim(
    id="B8",
    title="GPT-2 small and medium, batch 2, sequence 256",
    said="30 % of memory saved at GPT-2 small, 40 % at medium, the larger the better; 20 to 30 % more time",
    runs={
        f"{size}, {policy}": run(
            f"model=gpt2_{size} hardware=1xh100-80", "zero2", 2, 256, *PLAIN_FP32, policy=policy
        )
        for size in SIZES
        for policy in ("none", "full")
    },
    compared=[
        share("small: saved of the peak / of the activations", 30, lambda r: _both(r, "small")),
        share("medium: saved of the peak / of the activations", 40, lambda r: _both(r, "medium")),
        Statement(
            "the larger the better",
            "yes",
            lambda r: [m > s for s, m in zip(_both(r, "small"), _both(r, "medium"), strict=True)],
            lambda r: (
                "of the peak / of the activations: "
                + " / ".join(
                    "yes" if m > s else "no" for s, m in zip(_both(r, "small"), _both(r, "medium"), strict=True)
                )
            ),
        ),
        share("recomputed FLOPs, small / medium", (20, 30), lambda r: [r[f"{s}, full"].again for s in SIZES]),
        Unplanned("time of a step", "20 to 30 % more"),
    ],
    why=[
        Because(
            "Planned in plain fp32 with Adam. With 512 tokens the model states are most of the peak ({states:.1f} of "
            "{peak:.1f} GiB at medium) and stay; at the end of backward gradients take the place of activations.",
            lambda r: r["medium, none"].states > r["medium, none"].peak / 2,
            lambda r: {"states": r["medium, none"].states, "peak": r["medium, none"].peak},
        ),
    ],
    depends_on="what is counted, the peak or the activations",
)


def _both(r: Runs, size: str) -> list[float]:
    none, full = r[f"{size}, none"], r[f"{size}, full"]
    return [saved(none.peak, full.peak), saved(none.activations, full.activations)]


DEPTHS = {12: (71, (30, 35)), 24: (80, (40, 45)), 48: (86, (45, 50)), 96: (90, (50, 55))}
BATCHES = (2, 16)
B9 = Claim(
    id="B9",
    title="Theory against practice, by depth",
    said="sqrt(L) segments save in theory (in practice) at 12 layers 71 % (30 to 35 %), 24: 80 (40 to 45), "
    "48: 86 (45 to 50), 96: 90 (50 to 55)",
    runs={
        f"{depth} layers, batch {batch}, {policy}": run(
            f"model=gpt2_small model.architecture.n_layer={depth} hardware=1xh200",
            "zero2",
            batch,
            256,
            *PLAIN_FP32,
            policy=policy,
        )
        for depth in DEPTHS
        for batch in BATCHES
        for policy in ("none", "sqrt")
    },
    compared=[
        figure
        for depth, (theory, practice) in DEPTHS.items()
        for figure in (
            share(f"{depth} layers: saved inside the layers", theory, lambda r, d=depth: _in_layers(r, d)),  # type: ignore[misc]
            share(
                f"{depth} layers: saved of the peak, batch 2 / 16",
                practice,
                lambda r, d=depth: [_of_peak(r, d, batch) for batch in BATCHES],  # type: ignore[misc]
            ),
        )
    ],
    why=[
        Because(
            "1 - 1/sqrt(L) is nearly what the layers save. At 12 layers it is less, as sqrt(12) is no whole "
            "number and a segment of 4 layers is a third of the model.",
            lambda r: _in_layers(r, 12) < 0.70 < _in_layers(r, 24),
        ),
        Because(
            "Practice is whatever the states of the model leave: at 24 layers {little:.0f} % of the peak with a "
            "batch of 2 x 256 tokens, {much:.0f} % with 16 x 256.",
            lambda r: all(_of_peak(r, depth, 2) < _of_peak(r, depth, 16) for depth in DEPTHS),
            lambda r: {"little": 100 * _of_peak(r, 24, 2), "much": 100 * _of_peak(r, 24, 16)},
        ),
        Because("Planned on GPT-2 small's layers in plain fp32 with Adam."),
    ],
    depends_on="the tokens of a micro-batch, beside the model states that stay",
)


def _in_layers(r: Runs, depth: int) -> float:
    return saved(r[f"{depth} layers, batch 2, none"].layers, r[f"{depth} layers, batch 2, sqrt"].layers)


def _of_peak(r: Runs, depth: int, batch: int) -> float:
    name = f"{depth} layers, batch {batch}"
    return saved(r[f"{name}, none"].peak, r[f"{name}, sqrt"].peak)


B10 = Claim(
    id="B10",
    title="Loss curves",
    said="the curves with and without activation checkpointing coincide",
    runs={},
    compared=[
        Measured(
            "losses and gradient norms of three steps on two ranks",
            "coincide",
            lambda: _all_equal(),
            lambda: _equality(),
            "CPU, docs/granularity.md",
        ),
    ],
    why=[
        Because(
            "Every policy under ZeRO-2 and 3, with and without offload, full and LoRA, in fp32 with dropout; "
            "what is not equal there is refused before it trains, but for `checkpointing.offload.dtype=fp8` and "
            "`int8`, which are approximate by choice. On a GPU, where a kernel may add in another order each "
            "time, it is not yet measured."
        ),
    ],
)


def _cells() -> list[str]:
    """Of all policies but those that store activations in 8 bits, which are approximate by choice."""
    rows: dict[str, dict[str, str]] = json.loads(GRID.read_text())
    return [c for name, row in rows.items() if "dtype=" not in name for c in row.values() if c != "reference"]


def _all_equal() -> bool:
    return all(cell == "bit-equal" or cell.startswith("refused: ") for cell in _cells())


def _equality() -> str:
    ran = [cell for cell in _cells() if not cell.startswith("refused: ")]
    return f"bit-equal in {ran.count('bit-equal')} of {len(ran)} runs"


CLAIMS = [B7, B8, B9, B10]
