"""Claims B1 to B6: what activation checkpointing saves and what it costs."""

from __future__ import annotations

from remat.claims.claim import Because, Claim, Statement, gb, run, share
from remat.claims.figures import Runs, saved

SEVEN = "model=llama2_7b hardware=1xh100-80"
GIB_PER_GB = 1e9 / 1024**3
SEGMENTS = "uniform checkpointing.segment_layers={}"


def seven(policy: str, *more: str, strategy: str = "zero2_offload", batch: int = 1, seq_len: int = 2048) -> str:
    return run(SEVEN, strategy, batch, seq_len, *more, policy=policy)


B1 = Claim(
    id="B1",
    title="LLaMA-7B on an 80 GB GPU",
    said="batch 1, sequence 512: 42 to 28 GB (-33 %); batch 2, sequence 512: out of memory to 48; batch 1, sequence "
    "2048: out of memory to 56; 25 to 30 % slower",
    runs={
        "none, 1 x 512": seven("none", strategy="zero2", seq_len=512),
        "full, 1 x 512": seven("full", strategy="zero2", seq_len=512),
        "full, 2 x 512": seven("full", strategy="zero2", batch=2, seq_len=512),
        "full, 1 x 2048": seven("full", strategy="zero2"),
        "none, 1 x 512, optimizer on the host": seven("none", seq_len=512),
        "full, 1 x 512, optimizer on the host": seven("full", seq_len=512),
    },
    compared=[
        gb("peak without, 1 x 512", 42, lambda r: r["none, 1 x 512"].peak),
        gb("peak with, 1 x 512", 28, lambda r: r["full, 1 x 512"].peak),
        gb("saved, 1 x 512", 14, lambda r: _less(r, "none, 1 x 512", "full, 1 x 512")),
        gb("what a second sequence adds", 20, lambda r: _less(r, "full, 2 x 512", "full, 1 x 512")),
        gb("what 2048 tokens add to 512", 28, lambda r: _less(r, "full, 1 x 2048", "full, 1 x 512")),
        share(
            "forward and backward slower by, 1 x 512 / 1 x 2048",
            (25, 30),
            lambda r: [r["full, 1 x 512"].slower, r["full, 1 x 2048"].slower],
        ),
    ],
    why=[
        Because(
            "Full fine-tuning needs {all:.0f} GiB whatever the activations are (A1), so this was another run; "
            "the rest of the row is therefore about the activations alone.",
            lambda r: r["none, 1 x 512"].peak == r["full, 1 x 512"].peak,
            lambda r: {"all": r["none, 1 x 512"].peak},
        ),
        Because(
            "512 tokens have {act:.1f} GiB of activations, so 14 GB cannot be saved on them. With activation "
            "checkpointing another sequence adds {more:.2f} GiB, not 20 GB.",
            lambda r: (
                r["none, 1 x 512"].activations < 14 * GIB_PER_GB
                and _less(r, "full, 2 x 512", "full, 1 x 512") < 1
            ),
            lambda r: {
                "act": r["none, 1 x 512"].activations,
                "more": _less(r, "full, 2 x 512", "full, 1 x 512"),
            },
        ),
        Because(
            "With the optimizer in host memory the peak goes from {none:.1f} to {full:.1f} GiB at 1 x 512.",
            lambda r: (
                r["none, 1 x 512, optimizer on the host"].peak > r["full, 1 x 512, optimizer on the host"].peak
            ),
            lambda r: {
                "none": r["none, 1 x 512, optimizer on the host"].peak,
                "full": r["full, 1 x 512, optimizer on the host"].peak,
            },
        ),
        Because("The cost in time is right, of the time that the GPU computes."),
    ],
)


def _less(r: Runs, more: str, less: str) -> float:
    return r[more].activations - r[less].activations


B2 = Claim(
    id="B2",
    title="32 layers: where the checkpoints are",
    said="of the activation memory remain about 40 % with a checkpoint every 4 layers, 30 % every 8, 35 % with sqrt(L) "
    "(6 segments); 30 to 33 % more compute",
    runs={
        "none": seven("none"),
        "every layer": seven("full"),
        "every 4": seven(SEGMENTS.format(4)),
        "every 8": seven(SEGMENTS.format(8)),
        "sqrt": seven("sqrt"),
        "one layer in 4": seven("interval checkpointing.interval=4"),
        "one layer in 8": seven("interval checkpointing.interval=8"),
    },
    compared=[
        share("remains, every 4 layers", 40, lambda r: _left(r, "every 4")),
        share("remains, every 8 layers", 30, lambda r: _left(r, "every 8")),
        share("remains, sqrt(L) segments", 35, lambda r: _left(r, "sqrt")),
        share(
            "recomputed FLOPs, every 4 / 8 / sqrt(L)",
            (30, 33),
            lambda r: [r[n].again for n in ("every 4", "every 8", "sqrt")],
        ),
    ],
    why=[
        Because(
            "In segments of k layers an input is kept per segment and k layers are rebuilt at a time: longer "
            "segments leave more, so even the order of the claim is wrong.",
            lambda r: _left(r, "every 4") < _left(r, "sqrt") < _left(r, "every 8"),
        ),
        Because(
            "A checkpoint at every layer leaves {full:.0f} %, less than any of these, as a layer's input is "
            "small beside what it keeps.",
            lambda r: _left(r, "every layer") < _left(r, "every 4"),
            lambda r: {"full": 100 * _left(r, "every layer")},
        ),
        Because(
            "If the claim meant that only one layer in 4 (8) is recomputed, {four:.0f} % ({eight:.0f} %) remain.",
            lambda r: _left(r, "one layer in 4") > 0.43,
            lambda r: {
                "four": 100 * _left(r, "one layer in 4"),
                "eight": 100 * _left(r, "one layer in 8"),
            },
        ),
    ],
)


def _left(r: Runs, name: str) -> float:
    """Of the most that the layers have without recomputation."""
    return r[name].layers / r["none"].layers


DEEP = "model.architecture.num_hidden_layers=100"
B3 = Claim(
    id="B3",
    title="The optimum stores sqrt(L) segments",
    said="the optimum is sqrt(L) segments, which saves 1 - 1/sqrt(L): 90 % at 100 layers",
    runs={
        "none": seven("none", DEEP, seq_len=512),
        "sqrt": seven("sqrt", DEEP, seq_len=512),
        "2 layers a segment": seven(SEGMENTS.format(2), DEEP, seq_len=512),
        "every layer": seven("full", DEEP, seq_len=512),
    },
    compared=[
        share("saved by sqrt(L) segments, 100 layers", 90, lambda r: 1 - _left(r, "sqrt")),
        Statement(
            "nothing saves more",
            "sqrt(L) segments",
            lambda r: all(_left(r, "sqrt") <= _left(r, name) for name in r),
            lambda r: (
                f"{min(r, key=lambda name: _left(r, name))}: {100 - 100 * min(_left(r, n) for n in r):.0f} %"
            ),
        ),
    ],
    why=[
        Because(
            "The formula is right about what it counts. Its optimum takes a layer's input to be as large as all "
            "that the layer keeps; in a transformer it is {part:.1f} % of that, so shorter segments save more: 2 "
            "layers each leave {best:.2f} GiB, sqrt(L) segments {sqrt:.2f}.",
            lambda r: _input_share(r) < 0.1 and _left(r, "2 layers a segment") < _left(r, "sqrt"),
            lambda r: {
                "part": 100 * _input_share(r),
                "best": r["2 layers a segment"].layers,
                "sqrt": r["sqrt"].layers,
            },
        ),
        Because("Planned on the layers of Llama 2 7B, 100 of them."),
    ],
)


def _input_share(r: Runs) -> float:
    """A layer's input [512, 4096] in bf16, of what 100 layers keep without recomputation."""
    return 100 * 512 * 4096 * 2 / 1024**3 / r["none"].layers


MEDIUM = "model=gpt2_medium hardware=1xh100-80"
B4 = Claim(
    id="B4",
    title="24 layers, a checkpoint every 4th",
    said="75 % of the intermediate results are saved, 60 to 75 % of memory in all, for 20 to 30 % of time",
    runs={
        "none": run(MEDIUM, "zero2", 4, 1024),
        "segments of 4": run(MEDIUM, "zero2", 4, 1024, policy=SEGMENTS.format(4)),
        "one layer in 4": run(MEDIUM, "zero2", 4, 1024, policy="interval checkpointing.interval=4"),
    },
    compared=[
        share(
            "saved inside the layers, segments of 4 / one layer in 4",
            75,
            lambda r: [1 - _left(r, n) for n in ("segments of 4", "one layer in 4")],
        ),
        share(
            "saved by segments of 4, of activations and loss / of the peak with model states",
            (60, 75),
            lambda r: [
                saved(r["none"].activations, r["segments of 4"].activations),
                saved(r["none"].peak, r["segments of 4"].peak),
            ],
        ),
        share("forward and backward slower by, segments of 4", (20, 30), lambda r: r["segments of 4"].slower),
    ],
    why=[
        Because(
            "75 % counts three layers of four as free. Segments of 4 leave one input each and 4 of 24 layers at "
            "a time, so they save more inside the layers; recomputing one layer in 4 saves less than a quarter.",
            lambda r: 1 - _left(r, "segments of 4") > 0.75 and 1 - _left(r, "one layer in 4") <= 0.25,
        ),
        Because(
            "Of everything they save less, as logits and loss ({loss:.1f} GiB) and model states ({states:.1f} "
            "GiB) stay.",
            lambda r: (
                saved(r["none"].peak, r["segments of 4"].peak)
                < saved(r["none"].activations, r["segments of 4"].activations)
                < 1 - _left(r, "segments of 4")
            ),
            lambda r: {"loss": r["segments of 4"].loss, "states": r["none"].states},
        ),
        Because("Planned on GPT-2 medium, 4 x 1024 tokens, bf16."),
    ],
    depends_on="what a checkpoint every 4th layer means, and on what is counted",
)

VARIANTS = ("ZeRO-2", "ZeRO-3")
B5 = Claim(
    id="B5",
    title="Reentrant against non-reentrant",
    said="non-reentrant is about 5 % slower",
    runs={
        f"{name}, {variant}": seven(
            "full", f"checkpointing.reentrant={variant == 'reentrant'}".lower(), strategy=strategy
        )
        for name, strategy in zip(VARIANTS, ("zero2_offload", "zero3_offload"), strict=True)
        for variant in ("reentrant", "non-reentrant")
    },
    compared=[
        share(
            "non-reentrant slower on the GPU, ZeRO-2 / ZeRO-3",
            5,
            lambda r: [_variant(r, name) for name in VARIANTS],
        ),
    ],
    why=[
        Because(
            "torch's non-reentrant variant stops a recomputation at the last tensor that backward needs, so each "
            "layer's last matrix product is spared: {new:.1f} % more FLOPs instead of {old:.1f} %.",
            lambda r: all(
                r[f"{name}, non-reentrant"].again < r[f"{name}, reentrant"].again for name in VARIANTS
            ),
            lambda r: {
                "new": 100 * r["ZeRO-2, non-reentrant"].again,
                "old": 100 * r["ZeRO-2, reentrant"].again,
            },
        ),
        Because(
            "It costs the host more Python per layer, which counts where the GPU waits for the host, as with small "
            "models: that side is not planned."
        ),
    ],
    within="as far as the GPU's work goes",
)


def _variant(r: Runs, name: str) -> float:
    new, old = r[f"{name}, non-reentrant"], r[f"{name}, reentrant"]
    return (new.compute_s + new.again_s) / (old.compute_s + old.again_s) - 1


B6 = Claim(
    id="B6",
    title="One checkpoint per layer",
    said="70 % of the activations saved for 15 % of time; 10 to 20 % in general",
    runs={
        "7B, none": seven("none"),
        "7B, full": seven("full"),
        "GPT-2 medium, none": run(MEDIUM, "zero2", 2, 256),
        "GPT-2 medium, full": run(MEDIUM, "zero2", 2, 256, policy="full"),
    },
    compared=[
        share(
            "activations saved, 7B at 1 x 2048 / GPT-2 medium at 2 x 256",
            70,
            lambda r: [
                saved(r[f"{n}, none"].activations, r[f"{n}, full"].activations) for n in ("7B", "GPT-2 medium")
            ],
        ),
        share(
            "slower by: forward and backward of both / step of 7B with the optimizer on the host",
            (10, 20),
            lambda r: [
                r["7B, full"].slower,
                r["GPT-2 medium, full"].slower,
                r["7B, full"].step_s / r["7B, none"].step_s - 1,
            ],
        ),
    ],
    why=[
        Because(
            "The logits and the loss stay: {medium:.0f} % of what GPT-2 medium has left, with its large "
            "vocabulary and small width, {seven:.0f} % at 7B.",
            lambda r: _loss_share(r, "GPT-2 medium") > _loss_share(r, "7B"),
            lambda r: {
                "medium": 100 * _loss_share(r, "GPT-2 medium"),
                "seven": 100 * _loss_share(r, "7B"),
            },
        ),
        Because(
            "A step that waits for a CPU update hides the recomputation; a GPU that computes all the time pays "
            "{most:.0f} %.",
            lambda r: r["7B, full"].step_s / r["7B, none"].step_s - 1 < 0.05 < 0.2 < r["7B, full"].slower,
            lambda r: {"most": 100 * r["7B, full"].slower},
        ),
    ],
    depends_on="the share of the logits in memory, and on what the step waits for",
)


def _loss_share(r: Runs, name: str) -> float:
    return r[f"{name}, full"].loss / r[f"{name}, full"].activations


CLAIMS = [B1, B2, B3, B4, B5, B6]
