"""Hugging Face Trainer + DeepSpeed, with transformers' own activation checkpointing and offload."""

from __future__ import annotations

import tempfile

from benchmarks.peers import common

FULL, OFFLOAD = "full", "offload"


def main() -> None:
    args = common.arguments(
        ("--checkpointing", [FULL, OFFLOAD]), ("--zero", ["zero2", "zero2_offload", "zero3"])
    )
    common.alone(args)
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    from remat.machine import ops
    from remat.report import console

    ops.use_environment_folder()  # the same builds of DeepSpeed's operations
    console.quiet_libraries(debug=False)
    config, clock = common.model_config(args), common.Clock(args.device)
    with tempfile.TemporaryDirectory() as scratch:
        settings = TrainingArguments(
            output_dir=scratch, max_steps=common.STEPS, per_device_train_batch_size=args.micro_batch,
            gradient_accumulation_steps=1, bf16=True, use_cpu=args.device == "cpu", learning_rate=1e-5,
            activation_checkpointing=args.checkpointing == FULL,
            activation_checkpointing_kwargs={"use_reentrant": False},
            deepspeed=common.deepspeed_config(args, args.zero),
            max_grad_norm=1.0, weight_decay=0.1, report_to=[], save_strategy="no", logging_steps=10**6,
            disable_tqdm=True, log_level="error",
        )  # fmt: skip
        net = AutoModelForCausalLM.from_config(config)
        if args.checkpointing == OFFLOAD:
            net.activation_checkpointing_enable({"use_reentrant": False}, offload=True)
        rows = common.Rows(config.vocab_size, args.seq_len)
        trainer = Trainer(net, settings, train_dataset=rows, callbacks=[clock])
        trainer.train()
    differs = "the loss is over all logits at once; remat's default computes it in chunks"
    common.finish(args, clock.row(args, common.versions("deepspeed", "accelerate"), differs))


if __name__ == "__main__":
    main()
