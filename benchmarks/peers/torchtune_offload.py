"""torchtune's OffloadActivations around a Hugging Face model, in a bare DeepSpeed loop."""

from __future__ import annotations

import torch

from benchmarks.peers import common


def main() -> None:
    args = common.arguments()
    common.alone(args)
    from torchtune.training import OffloadActivations  # first: it fails without the torchao it was made for
    import deepspeed  # isort: skip
    from transformers import AutoModelForCausalLM

    from remat.machine import ops

    ops.use_environment_folder()
    config = common.model_config(args)
    with torch.device(args.device):
        net = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    net.activation_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-5, weight_decay=0.1, fused=True)
    engine, _, _, _ = deepspeed.initialize(
        model=net, optimizer=optimizer, config=common.deepspeed_config(args, "zero2")
    )
    offloading = OffloadActivations()

    def step(batch: dict[str, torch.Tensor]) -> None:
        with offloading:
            loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()

    clock = common.bare_steps(step, common.Rows(config.vocab_size, args.seq_len), args)
    differs = "a bare DeepSpeed loop around torchtune's context, not a torchtune recipe"
    common.finish(args, clock.row(args, common.versions("deepspeed", "torchtune", "torchao"), differs))


if __name__ == "__main__":
    main()
