"""Claims A: model states, and the memory of whole runs."""

from __future__ import annotations

from remat.claims.claim import Because, Claim, Statement, gb, run, share
from remat.claims.figures import GIB, Runs

GB = 1e9
SEVEN = "model=llama2_7b hardware=1xh200"
ONE_BILLION = (
    "model=tiny_llama model.architecture.vocab_size=32000 model.architecture.hidden_size=2048 "
    "model.architecture.intermediate_size=5632 model.architecture.num_hidden_layers=20 "
    "model.architecture.num_attention_heads=32 model.architecture.num_key_value_heads=4"
)
PLAIN_FP32 = ("train.precision=fp32", "deepspeed.overrides.zero_optimization.stage=0")
SEVENTY = "model=llama2_70b hardware=1x4090 hardware.host_memory_gib=2048"

LENGTHS = {
    "1 x 512": run(SEVEN, "zero2", 1, 512),
    "1 x 2048": run(SEVEN, "zero2", 1, 2048),
    "4 x 2048": run(SEVEN, "zero2", 4, 2048),
}


def bytes_per_param(gib: float, runs: Runs, name: str) -> float:
    return gib * GIB / runs[name].num_params


ADAM_IN_FP32 = Because(
    "Mixed-precision Adam keeps a fp32 master copy and two fp32 moments: {each:.0f} bytes per parameter, "
    "{all:.1f} GiB. The claimed figure is {claimed:.1f} bytes per parameter: two moments in 16 bits and no "
    "master copy, which is what plain AdamW holds on pure 16-bit weights, where small updates are rounded away.",
    lambda r: (
        abs(bytes_per_param(r["1 x 512"].optimizer, r, "1 x 512") - 12) < 0.1
        and abs(28 * GB / r["1 x 512"].num_params - 4) < 0.3
    ),
    lambda r: {
        "each": bytes_per_param(r["1 x 512"].optimizer, r, "1 x 512"),
        "all": r["1 x 512"].optimizer,
        "claimed": 28 * GB / r["1 x 512"].num_params,
    },
)
PEAK_AT_STEP = Because(
    "With few tokens the peak is the optimizer step: the gradients are made flat and then fp32, and both copies "
    "({copy:.1f} GiB) lie beside the states; at 1 x 512 and 1 x 2048 the activations are smaller than that, and the "
    "total is the same.",
    lambda r: (
        r["1 x 512"].peak_at_step
        and r["1 x 2048"].peak == r["1 x 512"].peak
        and r["1 x 2048"].activations < 6 * r["1 x 512"].num_params / GIB
    ),
    lambda r: {"copy": 6 * r["1 x 512"].num_params / GIB},
)

A1 = Claim(
    id="A1",
    title="LLaMA-7B, full fine-tuning in 16 bits",
    said="weights 14 GB, gradients 14 GB, AdamW states 28 GB, activations 10 to 50 GB: 66 to 106 GB in all",
    runs=LENGTHS,
    compared=[
        gb("weights", 14, lambda r: r["1 x 512"].weights),
        gb("gradients", 14, lambda r: r["1 x 512"].gradients),
        gb("AdamW states", 28, lambda r: r["1 x 512"].optimizer),
        gb(
            "activations at 1 x 512 / 1 x 2048 / 4 x 2048",
            (10, 50),
            lambda r: [r[n].activations for n in r],
        ),
        gb("peak at 1 x 512 / 1 x 2048 / 4 x 2048", (66, 106), lambda r: [r[n].peak for n in r]),
    ],
    why=[
        ADAM_IN_FP32,
        PEAK_AT_STEP,
        Because(
            "Activations follow the tokens of a micro-batch, {each:.1f} GiB for every 1000 of them without "
            "activation checkpointing: 10 to 50 GB are {least:,.0f} to {most:,.0f} tokens.",
            lambda r: abs(r["4 x 2048"].activations / r["1 x 2048"].activations - 4) < 0.05,
            lambda r: {
                "each": r["4 x 2048"].activations / 8.192,
                "least": 10 * GB / GIB / r["4 x 2048"].activations * 8192,
                "most": 50 * GB / GIB / r["4 x 2048"].activations * 8192,
            },
        ),
    ],
)

A2 = Claim(
    id="A2",
    title="Training a 7B model",
    said="76 GB in all: 14 weights + 14 gradients + 28 optimizer + 20 activations",
    runs=LENGTHS,
    compared=[
        gb("weights", 14, lambda r: r["1 x 512"].weights),
        gb("gradients", 14, lambda r: r["1 x 512"].gradients),
        gb("optimizer", 28, lambda r: r["1 x 512"].optimizer),
        gb("activations at 1 x 512 / 1 x 2048 / 4 x 2048", 20, lambda r: [r[n].activations for n in r]),
        gb("peak at 1 x 512 / 1 x 2048 / 4 x 2048", 76, lambda r: [r[n].peak for n in r]),
    ],
    why=[
        Because(
            "As A1: the optimizer's share is counted without the master copy and in 16 bits. The states alone, "
            "{states:.1f} GiB, are more than the claimed total.",
            lambda r: r["1 x 512"].states > 76 * GB / GIB,
            lambda r: {"states": r["1 x 512"].states},
        ),
    ],
)

A3 = Claim(
    id="A3",
    title="A model of 1B parameters in fp32, batch 4, sequence 2048",
    said="weights 4 GB, gradients 4 GB, Adam 8 GB, activations 32 GB: 48 GB in all",
    runs={
        "fused attention": run(f"{ONE_BILLION} hardware=1xh200", "zero2", 4, 2048, *PLAIN_FP32),
        "eager attention": run(
            f"{ONE_BILLION} hardware=1xh200", "zero2", 4, 2048, *PLAIN_FP32, "model.attention=eager"
        ),
        "checkpointed": run(f"{ONE_BILLION} hardware=1xh200", "zero2", 4, 2048, *PLAIN_FP32, policy="full"),
    },
    compared=[
        gb("weights", 4, lambda r: r["fused attention"].weights),
        gb("gradients", 4, lambda r: r["fused attention"].gradients),
        gb("Adam", 8, lambda r: r["fused attention"].optimizer),
        gb(
            "activations with fused / eager attention",
            32,
            lambda r: [r["fused attention"].activations, r["eager attention"].activations],
        ),
        gb(
            "peak with fused / eager attention",
            48,
            lambda r: [r["fused attention"].peak, r["eager attention"].peak],
        ),
    ],
    why=[
        Because(
            "The model planned is TinyLlama's layer, 20 times: {n:.2f} billion parameters. Plain fp32 needs no "
            "master copy: 16 bytes per parameter.",
            lambda r: (
                abs(r["fused attention"].num_params / GB - 1) < 0.05
                and abs(bytes_per_param(r["fused attention"].states, r, "fused attention") - 16) < 0.1
            ),
            lambda r: {"n": r["fused attention"].num_params / GB},
        ),
        Because(
            "Eager attention keeps the scores of every head, seq x seq: {ratio:.1f} times the activations of a fused "
            "kernel. With each layer recomputed they are {little:.1f} GiB.",
            lambda r: r["eager attention"].activations > 2 * r["fused attention"].activations,
            lambda r: {
                "ratio": r["eager attention"].activations / r["fused attention"].activations,
                "little": r["checkpointed"].activations,
            },
        ),
        Because(
            "The peak is less than the sum, since the gradients are not there yet when the activations are.",
            lambda r: (
                r["fused attention"].peak < r["fused attention"].states + r["fused attention"].activations
            ),
        ),
    ],
    depends_on="the attention kernel",
)

A4 = Claim(
    id="A4",
    title="70B under ZeRO-3 with optimizer and parameters in host memory, on one 24 GB GPU",
    said="21 GB on the GPU (weights 4.4, gradients 4.4, activations 12), 550 GB of host memory, 30 to 40 % of speed",
    runs={
        "1 x 2048": run(SEVENTY, "zero3_offload", 1, 2048, policy="full"),
        "5 x 2048": run(SEVENTY, "zero3_offload", 5, 2048, policy="full"),
        "1 x 2048, 16 micro-batches": run(SEVENTY, "zero3_offload", 1, 2048, policy="full", accumulation=16),
    },
    compared=[
        gb("weights and gradients on the GPU", 8.8, lambda r: r["1 x 2048"].passing),
        gb(
            "activations at 1 x 2048 / 5 x 2048",
            12,
            lambda r: [r["1 x 2048"].activations, r["5 x 2048"].activations],
        ),
        gb("peak of the GPU at 1 x 2048 / 5 x 2048", 21, lambda r: [r["1 x 2048"].peak, r["5 x 2048"].peak]),
        gb("host memory", 550, lambda r: r["1 x 2048"].host),
        share(
            "GPU at work, of a step of 1 / 16 micro-batches",
            (30, 40),
            lambda r: [
                (r["1 x 2048"].compute_s + r["1 x 2048"].again_s) / r["1 x 2048"].step_s,
                16 * (r["1 x 2048"].compute_s + r["1 x 2048"].again_s) / r["1 x 2048, 16 micro-batches"].step_s,
            ],
        ),
    ],
    why=[
        Because(
            "It fits the GPU, with less than claimed on it at one sequence: ZeRO-3 holds the weights of about a "
            "layer at a time.",
            lambda r: r["1 x 2048"].gpu < r["1 x 2048"].gpu_found and r["1 x 2048"].peak < 21 * GB / GIB / 2,
        ),
        Because(
            "What does not hold is the host: 20 bytes per parameter (weights, gradients in 16 and 32 bits, fp32 "
            "master copy, two moments) are {raw:,.0f} GiB before pinned buffers are rounded up to powers of two; "
            "the claim is {claimed:.1f} bytes per parameter.",
            lambda r: (
                r["1 x 2048"].host > 20 * r["1 x 2048"].num_params / GIB
                and 550 * GB / r["1 x 2048"].num_params < 10
            ),
            lambda r: {
                "raw": 20 * r["1 x 2048"].num_params / GIB,
                "claimed": 550 * GB / r["1 x 2048"].num_params,
            },
        ),
        Because(
            "Speed depends on how many tokens share one update on the CPU, and on the host's memory, here that of a "
            "desktop; no desktop has so much of it."
        ),
    ],
)

A5 = Claim(
    id="A5",
    title="The offload ladder of a 7B model",
    said="none: 66 GB GPU, 100 % speed; optimizer offload: 38 GB GPU, 36 GB host, 85 %; "
    "everything: 14 GB GPU, 60 GB host, 45 %",
    runs={
        f"{name}, {few or 'one micro-batch'}": run(
            "model=llama2_7b hardware=1xh100-80", strategy, batch, 2048, accumulation=steps
        )
        for name, strategy in (
            ("none", "zero2"),
            ("optimizer", "zero2_offload"),
            ("everything", "zero3_offload"),
        )
        for few, batch, steps in (("", 1, 1), ("64 of 4", 4, 64))
    },
    compared=[
        gb("none: peak of the GPU at 1 x 2048", 66, lambda r: r["none, one micro-batch"].peak),
        gb("optimizer: peak of the GPU", 38, lambda r: r["optimizer, one micro-batch"].peak),
        gb("optimizer: host memory", 36, lambda r: r["optimizer, one micro-batch"].host),
        share("optimizer: speed, 1 / 256 sequences a step", 85, lambda r: _speeds(r, "optimizer")),
        gb("everything: peak of the GPU", 14, lambda r: r["everything, one micro-batch"].peak),
        gb("everything: host memory", 60, lambda r: r["everything, one micro-batch"].host),
        share("everything: speed, 1 / 256 sequences a step", 45, lambda r: _speeds(r, "everything")),
    ],
    why=[
        Because(
            "The bottom rung is right at 2048 tokens without activation checkpointing, nearly all of it activations.",
            lambda r: (
                r["everything, one micro-batch"].activations > 0.9 * r["everything, one micro-batch"].peak
            ),
        ),
        Because(
            "The first does not exist on an 80 GB GPU: it needs {none:.0f} GiB.",
            lambda r: r["none, one micro-batch"].gpu > 80,
            lambda r: {"none": r["none, one micro-batch"].gpu},
        ),
        Because(
            "The optimizer is counted too small, as in A1. On the host it is more: fp32 master copy, moments and "
            "gradients, and 16-bit copies, in pinned buffers that round up to powers of two: {host:.0f} GiB.",
            lambda r: r["optimizer, one micro-batch"].host > 16 * r["none, one micro-batch"].num_params / GIB,
            lambda r: {"host": r["optimizer, one micro-batch"].host},
        ),
        Because(
            "Speed has no single figure: the update on the CPU takes as long whether 2048 or half a million "
            "tokens came before it."
        ),
    ],
)


def _speeds(r: Runs, name: str) -> list[float]:
    """Against the same step without offload, if that had the memory."""
    return [r[f"none, {few}"].step_s / r[f"{name}, {few}"].step_s for few in ("one micro-batch", "64 of 4")]


A9 = Claim(
    id="A9",
    title="1B parameters and more on an 8 GB GPU",
    said="trainable with mixed precision, gradient accumulation and activation checkpointing",
    runs={
        name: run(
            f"{ONE_BILLION} hardware=1x3090 hardware.gpu_memory_gib=8",
            strategy,
            1,
            1024,
            *more,
            policy="full",
            accumulation=16,
        )
        for name, strategy, more in (
            ("as said", "zero2", ()),
            ("optimizer on the host", "zero2_offload", ()),
            ("LoRA", "zero2", ("peft=lora",)),
        )
    },
    compared=[
        Statement(
            "full fine-tuning with these three",
            "fits 8 GB",
            lambda r: r["as said"].fits,
            lambda r: f"needs {r['as said'].gpu:.1f} GiB",
        ),
    ],
    why=[
        Because(
            "The three leave the model states as they are: {states:.1f} GiB for {n:.2f} billion parameters, "
            "where the activations are {act:.2f} GiB.",
            lambda r: r["as said"].states > 8 > 8 * r["as said"].activations,
            lambda r: {
                "states": r["as said"].states,
                "n": r["as said"].num_params / GB,
                "act": r["as said"].activations,
            },
        ),
        Because(
            "What makes it fit is the optimizer in host memory ({off:.1f} GiB on the GPU, {host:.0f} GiB on the "
            "host) or LoRA ({lora:.1f} GiB).",
            lambda r: r["optimizer on the host"].fits and r["LoRA"].fits,
            lambda r: {
                "off": r["optimizer on the host"].gpu,
                "host": r["optimizer on the host"].host,
                "lora": r["LoRA"].gpu,
            },
        ),
    ],
)

CLAIMS = [A1, A2, A3, A4, A5, A9]
