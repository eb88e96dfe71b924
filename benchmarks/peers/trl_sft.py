"""TRL's SFTTrainer with its activation offloading, under the same DeepSpeed config."""

from __future__ import annotations

import tempfile

from benchmarks.peers import common


def main() -> None:
    args = common.arguments()
    common.alone(args)
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import SFTConfig, SFTTrainer

    from remat.data.tokenizer import load_tokenizer
    from remat.machine import ops
    from remat.report import console

    ops.use_environment_folder()
    console.quiet_libraries(debug=False)
    config, clock = common.model_config(args), common.Clock(args.device)
    tokens = common.Rows(config.vocab_size, args.seq_len).ids.tolist()
    rows = Dataset.from_dict({"input_ids": tokens, "labels": tokens})
    with tempfile.TemporaryDirectory() as scratch:
        settings = SFTConfig(
            output_dir=scratch, max_steps=common.STEPS, per_device_train_batch_size=args.micro_batch,
            gradient_accumulation_steps=1, bf16=True, use_cpu=args.device == "cpu", learning_rate=1e-5,
            activation_checkpointing=True, activation_checkpointing_kwargs={"use_reentrant": False},
            activation_offloading=True, max_length=args.seq_len, packing=False,
            deepspeed=common.deepspeed_config(args, "zero2"), max_grad_norm=1.0, weight_decay=0.1, report_to=[],
            save_strategy="no", logging_steps=10**6, disable_tqdm=True, log_level="error",
        )  # fmt: skip
        trainer = SFTTrainer(
            AutoModelForCausalLM.from_config(config),
            args=settings,
            train_dataset=rows,
            processing_class=load_tokenizer("bytes", None, trust_remote_code=False),
            callbacks=[clock],
        )
        trainer.train()
    differs = "TRL also computes entropy and token accuracy of every step from the logits"
    common.finish(args, clock.row(args, common.versions("deepspeed", "trl"), differs))


if __name__ == "__main__":
    main()
