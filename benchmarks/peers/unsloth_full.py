"""Unsloth, full fine-tuning in bf16 with its offloaded activation checkpointing. It reads weights from a folder."""

from __future__ import annotations

import tempfile

from benchmarks.peers import common


def main() -> None:
    args = common.arguments()
    from unsloth import FastLanguageModel  # first: it patches transformers
    import torch  # isort: skip
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    from remat.data.tokenizer import load_tokenizer

    config, clock = common.model_config(args), common.Clock(args.device)
    with tempfile.TemporaryDirectory() as scratch:
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(scratch)
        load_tokenizer("bytes", None, trust_remote_code=False).save_pretrained(scratch)
        net, _ = FastLanguageModel.from_pretrained(
            scratch, max_seq_length=args.seq_len, dtype=torch.bfloat16, load_in_4bit=False, full_finetuning=True,
            use_gradient_checkpointing="unsloth",
        )  # fmt: skip
        settings = TrainingArguments(
            output_dir=scratch, max_steps=common.STEPS, per_device_train_batch_size=args.micro_batch,
            gradient_accumulation_steps=1, bf16=True, learning_rate=1e-5, max_grad_norm=1.0, weight_decay=0.1,
            optim="adamw_torch_fused", report_to=[], save_strategy="no", logging_steps=10**6, disable_tqdm=True,
        )  # fmt: skip
        rows = common.Rows(config.vocab_size, args.seq_len)
        Trainer(net, settings, train_dataset=rows, callbacks=[clock]).train()
    differs = "plain AdamW without DeepSpeed; how Unsloth keeps master weights is its own choice"
    common.finish(args, clock.row(args, common.versions("unsloth"), differs))


if __name__ == "__main__":
    main()
