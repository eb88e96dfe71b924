"""Say what to type instead of an option, a choice or a value that does not exist: other tools' names, close spellings.

Standard library only.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence

SLIP, SAME_SECTION, ANY_SECTION = 0.8, 0.66, 0.8  # least similarity, of 1, for which a name is suggested
FREE_FORM = (  # sections that take any key
    "deepspeed.overrides",
    "model.architecture",
    "meta.measured",
    "meta.planned",
    "checkpointing.layers",
    "data.columns",
    "data.mix",
    "hardware.gpu_rates",
    "hardware.sources",
)
EVERYDAY = {"name", "path", "config", "enabled", "method", "mode", "split", "source", "format", "dtype", "r"}


def _read_table(table: str) -> dict[str, str]:
    """Read lines of what to write here, below each the names for it that other tools have."""
    found, ours = dict[str, str](), ""
    for line in table.splitlines():
        if line.startswith(" "):
            found |= dict.fromkeys(line.split(), ours)
        else:
            ours = line
    return found


MEANING = _read_table("""\
optim.lr
    learning_rate lr max_lr peak_lr base_lr learning_rate_init lr_max
optim.name
    optim optimizer optimizer_name optim_name optimizer_type optimizer.name optimizer.type
optim.schedule
    lr_scheduler_type lr_scheduler lr_schedule lr_decay_style scheduler scheduler_type
optim.weight_decay
    weight_decay wd adam_weight_decay
optim.gradient_clipping
    max_grad_norm grad_clip grad_norm gradient_clip_val clip_grad clip_grad_norm max_norm gradient_clip
optim.beta1
    adam_beta1 beta_1
optim.beta2
    adam_beta2 beta_2
optim.eps
    adam_epsilon epsilon adam_eps
optim.min_lr_ratio
    min_lr cosine_min_lr_ratio lr_min min_lr_rate
optim.warmup_steps (a number of steps)
    warmup_ratio warmup warmup_steps num_warmup_steps warmup_iters
train.epochs
    num_train_epochs epochs num_epochs max_epochs n_epochs epoch train_epochs
train.steps
    max_steps num_steps total_steps num_training_steps train_steps training_steps max_iters train_iters
    iterations num_iterations
train.micro_batch_size (of one rank and forward pass)
    per_device_train_batch_size per_gpu_train_batch_size per_device_batch_size micro_batch micro_bsz mbs
    per_device_eval_batch_size train_micro_batch_size_per_gpu micro_batch_size eval_batch_size
train.global_batch_size (of all ranks and accumulation)
    train_batch_size total_batch_size global_batch global_bsz gbs effective_batch_size
train.micro_batch_size (of one rank and forward pass) or train.global_batch_size (of one optimizer step)
    batch_size bsz
train.global_batch_size: accumulation is derived, global_batch_size / (micro_batch_size x ranks)
    gradient_accumulation_steps grad_accum grad_accum_steps accumulate_grad_batches
    gradient_accumulation accumulation_steps
train.seq_len
    max_seq_length max_seq_len cutoff_len max_length sequence_len sequence_length block_size
    model_max_length context_length seq_length seqlen max_sequence_length context_len ctx_len
    max_position
train.precision=fp32, bf16 or fp16
    mixed_precision torch_dtype amp precision_type compute_dtype dtype use_bf16 use_fp16 half_precision
    pure_bf16
train.eval_every
    eval_steps eval_interval evaluation_strategy eval_strategy val_every validate_every
    val_check_interval evals_per_epoch
train.log_every
    logging_steps log_steps log_interval log_freq logging_interval logging_strategy
train.seed
    seed random_seed data_seed
train.tensor_parallel_size
    tensor_parallel tp tp_size tensor_model_parallel_size
train.pipeline_parallel_size
    pipeline_parallel pp pp_size pipeline_model_parallel_size num_stages pipeline_stages
train.sequence_parallel_size
    sequence_parallel sp sp_size context_parallel cp cp_size context_parallel_size ulysses
    ulysses_sequence_parallel_size sequence_parallel_degree
model=hf model.path
    model_name_or_path model_name base_model model_id model_path pretrained_model
    pretrained_model_name_or_path checkpoint_path model.name model.id
model.tokenizer
    tokenizer_name tokenizer_name_or_path tokenizer_path tokenizer
model.rope_scaling=yarn model.rope_factor=4
    rope_scaling_type rope_type rope_parameters rope_scaling_factor rope_freq_base yarn
model.attention
    attn_implementation flash_attention use_flash_attention flash_attn attn flash_attention_2
    use_flash_attn use_flash_attention_2 sdp_attention attn_impl
checkpointing=full (or another policy)
    gradient_checkpointing activation_checkpointing recompute use_gradient_checkpointing
    enable_gradient_checkpointing enable_activation_checkpointing gradient_checkpointing_kwargs
    recompute_granularity
compile=layers
    torch_compile use_compile compile_model enable_torch_compile
checkpointing=offload
    enable_activation_offloading activation_offloading activation_cpu_offload offload_activations
peft=lora peft.r
    lora_r lora_rank lora_dim rank
peft=lora peft.alpha
    lora_alpha
peft=lora peft.dropout
    lora_dropout
peft=lora peft.target_modules
    lora_target_modules lora_target lora_modules lora_attn_modules target_layers
peft=lora, beside every linear layer unless peft.target_modules names some
    lora_target_linear apply_lora_to_mlp lora_mlp lora_query lora_key lora_value
peft.rslora=true
    use_rslora rslora
peft.dora=true
    use_dora dora
peft.modules_to_save
    modules_to_save lora_modules_to_save additional_target lora_extra_modules
train.router_aux_loss_coef
    moe_aux_loss_coef router_aux_loss aux_loss_coef output_router_logits aux_loss_alpha moe_aux_loss
train.neftune_alpha
    neftune_noise_alpha neftune noise_alpha
peft=lora
    use_lora lora use_peft finetuning_type adapter adapter_name
peft=qlora
    load_in_4bit load_in_8bit quantization_bit use_qlora qlora bnb_4bit_quant_type quantization
data.packing
    packing sample_packing pack neat_packing multipack pack_sequences use_packing packed packing_strategy
    pad_to_sequence_len pad_to_max_length padding
data.train_on_roles=[assistant] (or all)
    train_on_inputs train_on_prompt train_on_input train_on_source completion_only_loss assistant_only_loss
    roles_to_train mask_history mask_prompt
data.processes
    dataset_num_proc num_proc preprocessing_num_workers dataset_processes preprocessing_workers
train.deadlines
    ddp_timeout nccl_timeout timeout
data.path
    dataset train_file dataset_name datasets data_path train_data dataset_path data_files dataset_dir
    data_dir dataset_name_or_path training_data train_dataset dataset_id data.name data.file data.files
data.eval_path
    validation_file eval_file val_file eval_dataset eval_data val_data test_file test_datasets
    validation_data
data.eval_fraction
    val_set_size val_size validation_split validation_split_percentage eval_split_ratio test_size
data.text_field
    dataset_text_field text_column content_field text_key
data.cache_dir
    dataset_prepared_path preprocessed_path
deepspeed.config=zero2, zero3 or another of ds_configs/
    zero_stage deepspeed_config ds_config zero deepspeed_config_file zero_optimization_stage fsdp
    sharding_strategy fsdp_config fsdp_sharding_strategy deepspeed_plugin hf_deepspeed_config
deepspeed.config=zero3_offload (or another of ds_configs/)
    offload_optimizer offload_params cpu_offload offload_param offload_model optimizer_offload
output_dir
    output_path out_dir save_dir save_path output_folder checkpoint_dir ckpt_dir
run_id
    run_name experiment_name exp_name wandb_run_name wandb_name
resume
    resume_from_checkpoint resume_from load_checkpoint ckpt_path auto_resume resume_path
    auto_resume_from_checkpoints
save.every
    save_steps save_interval save_every checkpoint_every save_strategy checkpoint_interval
    saves_per_epoch save_freq
save.keep
    save_total_limit keep_last max_checkpoints keep_checkpoint_max save_top_k
save.best
    load_best_model_at_end save_best metric_for_best_model
save.export
    save_safetensors export_model save_hf_model
save.merge
    merge_lora merge_adapters merge_and_unload merge_adapter save_merged merge
train.early_stopping_evals
    early_stopping_patience early_stopping patience early_stop_patience
tracking=wandb_online, wandb_offline or wandb_disabled
    report_to wandb use_wandb logger wandb_mode tracker log_with metric_logger loggers trackers
tracking.tensorboard
    tensorboard use_tensorboard tensorboard_dir tb log_tensorboard
tracking.project
    wandb_project project_name
tracking.entity
    wandb_entity wandb_team
a launcher's option: deepspeed --num_gpus N train.py ...
    num_gpus n_gpus gpus devices num_processes world_size nproc_per_node n_gpu ngpus
""")  # an option here, and below it the names that other tools have for it
WITHOUT = _read_table("""\
a launch always trains, and evaluates as train.eval_every says: leave it out
    do_train do_eval do_predict prediction_loss_only
a run has a folder of its own, output_dir/NAME/RUN_ID, and none is overwritten: leave it out
    overwrite_output_dir overwrite_cache overwrite_output
the tokenizer's own chat template is used: leave it out, or name another with data.chat_template=FILE_OR_FOLDER
    template conversation_template prompt_template chat_template_path prompt_style
decoder layers are compiled by compile=layers, with torch's own backend: leave it out
    torch_compile_backend torch_compile_mode
a run is as long as train.steps or train.epochs says: leave it out
    max_steps_per_epoch steps_per_epoch max_train_samples max_samples limit_train_batches
batches are prepared while the step before runs: leave it out
    dataloader_num_workers num_workers dataloader_pin_memory dataloader_prefetch_factor pin_memory
    dataloader_drop_last dataloader_persistent_workers
rows are packed (data.packing), or batched by length without packing: leave it out
    group_by_length length_column_name length_grouped_sampler
only the fields that the format needs are read: leave it out
    remove_unused_columns label_names
ranks share the work by ZeRO (deepspeed.config): leave it out
    ddp_find_unused_parameters ddp_backend ddp_bucket_cap_mb ddp_broadcast_buffers strategy_ddp
records go to the folder of the run: set output_dir=FOLDER, or tracking.tensorboard=true
    logging_dir log_dir logging_first_step tensorboard_log_dir
upload after training: `remat push RUN_DIR/export OWNER/NAME`
    push_to_hub hub_model_id hub_strategy hub_private_repo push_to_hub_model_id
an evaluation keeps no logits: leave it out
    eval_accumulation_steps include_inputs_for_metrics batch_eval_metrics
train.loss=chunked, the default, never holds all logits: leave it out
    use_liger_kernel liger_kernel enable_liger_kernel liger liger_fused_linear_cross_entropy use_liger
set torch's own switch in a script of yours: leave it out
    tf32 float32_matmul_precision allow_tf32
the plan finds the largest micro-batch: recipe=finetune, lora or qlora, whose strategy=auto chooses it
    auto_find_batch_size auto_micro_batch auto_batch_size
special tokens are the tokenizer's: change them in its folder and name it with model.tokenizer=FOLDER
    special_tokens pad_token eos_token bos_token unk_token added_tokens resize_vocab tokens
a run trains on next tokens, of texts or of chats: there is no other stage. ZeRO's is chosen by deepspeed.config=zero3
    stage rl training_type task rlhf dpo trainer_type
the folder's own files are read, fast tokenizers alone: leave it out
    use_fast_tokenizer use_fast tokenizer_type model_type is_llama_derived_model
one version of a model is had as a folder: `hf download NAME --revision REVISION`, then model.path=FOLDER
    revision model_revision
a run that resumes goes on where it was, data position included: leave it out
    ignore_data_skip save_only_model save_on_each_node restore_callback_states_from_checkpoint
there are no experiments of a group: a recipe holds all that a run is, recipe=NAME
    experiment experiments exp
your own defaults are in conf/local/default.yaml, or DIR/local/default.yaml with --config-dir DIR: leave it out
    local
""")  # an answer, and below it the names without a counterpart that get it
OPTIMIZERS = _read_table("""\
adamw
    adamw adam adamw_torch adamw_torch_fused adamw_hf adamw_apex_fused fused_adam fusedadam torch_adam cpuadam
    deepspeedcpuadam
adamw_8bit
    adamw_8bit adamw8bit adamw_bnb_8bit adam_8bit adam8bit adamw_bnb adamw_bitsandbytes
paged_adamw_8bit
    paged_adamw_8bit paged_adamw8bit pagedadamw8bit paged_adamw paged_adamw_32bit pagedadamw
lion
    lion lion_32bit lion_8bit paged_lion paged_lion_32bit paged_lion_8bit fusedlion lion_pytorch
adafactor
    adafactor adafactor_hf transformers_adafactor
""")  # values of optim.name, and below each the names that other tools have for it or for what is nearest to it
SWITCHES = {"bf16", "fp16", "fp32"}  # train.precision, as switches of their own


def suggest_optimizer(name: str) -> str:
    """Return ` (did you mean optim.name=...?)` for the name of an optimizer; empty for another word."""
    if "muon" in name.lower():
        return "; Muon is not offered, because DeepSpeed clips its update and not the gradient: choose adamw or lion"
    meant = OPTIMIZERS.get(name.lower().replace("-", "_"))
    return _ask(f"optim.name={meant}") if meant else ""


def suggest(option: str, known: Sequence[str]) -> str:
    """Return ` (did you mean ...?)` for an option that is not among the `known` ones, or `: why there is none`.

    Empty without a good guess.
    """
    parts = option.lstrip("+~-").replace("-", "_").lower().split(".")
    if answer := WITHOUT.get(parts[-1]) or WITHOUT.get(parts[0]):
        return f": {answer}"
    meant = find(option, known)
    return _ask(meant) if meant else ""


def find(option: str, known: Sequence[str]) -> str:
    """Return what the author of `option` meant: one of `known`, or what to write here; empty if nothing is near.

    A name of another tool is found in any section: learning_rate, train.learning_rate, --learning-rate.
    """
    plain = option.lstrip("+~-").replace("-", "_").lower()
    section, _, leaf = plain.rpartition(".")
    sections = {name.rpartition(".")[0] for name in known} - {""}
    own = [name for name in known if name.rpartition(".")[0] == section]
    if section in sections and (near := _nearest(leaf, own, SLIP)):
        return near
    if renamed := _with_known_section(plain, known, sections):
        return renamed
    if leaf in SWITCHES:
        return f"train.precision={leaf}"
    if meant := MEANING.get(plain, MEANING.get(leaf)):
        return meant
    if section in sections and (near := _nearest(leaf, own, SAME_SECTION)):
        return near
    if leaf in EVERYDAY:
        return _of_section(section, sections)
    same = [name for name in known if name.rpartition(".")[2] == leaf]
    if same:
        return max(same, key=lambda name: difflib.SequenceMatcher(None, name, plain).ratio())
    return _nearest(leaf, known, ANY_SECTION) or _of_section(section, sections)


def _of_section(section: str, ours: set[str]) -> str:
    """Return what to write for another tool's section: tokenizer.path, bf16.enabled, metric_logger._component_."""
    name = section.rpartition(".")[2]
    if not name or section.partition(".")[0] in ours or name in EVERYDAY:
        return ""
    return f"train.precision={name}" if name in SWITCHES else MEANING.get(name, "")


def _with_known_section(option: str, known: Sequence[str], sections: set[str]) -> str:
    """Return `option` with the spelling of its section corrected; empty unless that section has it or is free-form.

    trian.steps -> train.steps, deepspeed.overides.x -> deepspeed.overrides.x
    """
    parts = option.split(".")
    if "zero_optimization" in parts:
        return ".".join(["deepspeed.overrides", *parts[parts.index("zero_optimization") :]])
    for count in range(len(parts) - 1, 0, -1):
        given, rest = ".".join(parts[:count]), ".".join(parts[count:])
        if given in sections:
            return ""
        for near in difflib.get_close_matches(given, {*sections, *FREE_FORM}, n=3, cutoff=SLIP):
            if near in FREE_FORM or f"{near}.{rest}" in known:
                return f"{near}.{rest}"
    return ""


def _nearest(leaf: str, names: Sequence[str], least: float) -> str:
    """Return the name whose last part is most like `leaf`, if it is at least that alike."""
    by_leaf: dict[str, str] = {}
    for name in names:
        by_leaf.setdefault(name.rpartition(".")[2], name)
    near = difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=least)
    return by_leaf[near[0]] if near else ""


ON, OFF = {"true", "yes", "on", "1"}, {"false", "no", "off", "0", "none", "null", "disabled", "never"}
SWITCHED = {  # what an on-off value in place of a choice means: on, off
    "checkpointing": ("checkpointing=full", "checkpointing=none"),
    "peft": ("peft=lora", "peft=none"),
    "profile": ("profile=summary", "profile=none"),
    "save": ("save.every=STEPS", "save.every=0 save.at_end=false"),
    "tracking": ("tracking=wandb_online", "tracking=wandb_disabled"),
}
CHOICES = {  # group -> what to write here -> other tools' choices
    "checkpointing": {"checkpointing=selective_ops": "selective", "checkpointing=offload": "unsloth"},
    "data": {
        "data=files": "json csv local",
        "data=chat": "openai messages",
        "data=sharegpt": "conversations",
        "data=hub": "huggingface",
    },
    "hardware": {"hardware=this_machine": "cpu auto local"},
    "peft": {
        "peft=lora peft.dora=true": "dora",
        "peft=lora peft.rslora=true": "rslora",
        "peft=qlora": "qdora",
        "peft=none": "full",
        "peft=lora": "freeze",
    },
    "profile": {"profile=trace": "torch nsys"},
    "tracking": {
        "tracking=wandb_online": "wandb online",
        "tracking=wandb_offline": "offline",
        "tracking.tensorboard=true": "tensorboard",
    },
}
VALUES = {  # option -> our value -> other tools' values
    "train.precision": {
        "bf16": "bfloat16 bf16-mixed true",
        "fp16": "float16 half 16 16-mixed",
        "fp32": "float32 float 32 no",
    },
    "data.format": {
        "chat": "openai messages chatml chat_template",
        "sharegpt": "conversations",
        "plain": "completion text pretrain",
        "alpaca": "instruction",
    },
    "compile": {"layers": "true inductor default reduce-overhead max-autotune", "none": "false"},
    "data.packing": {"documents": "true", "none": "false"},
    "model.attention": {"flash_attention_2": "flash flash_attention flash_attn flash_attn_2 fa2"},
    "optim.schedule": {
        "cosine": "cosine_with_restarts cosine_with_min_lr",
        "constant": "constant_with_warmup",
        "wsd": "warmup_stable_decay",
    },
}
OWN_PATH = {"model": "model=hf model.path={value}", "data": "data=files data.path={value}"}


def suggest_choice(group: str, value: str, choices: Sequence[str]) -> str:
    """Return ` (did you mean ...?)` for a `value` that is no choice of `group`; empty without a good guess."""
    plain = value.lower().strip("'\"")
    own = plain.removesuffix(".yaml")
    own = (own.rpartition("/")[2] if own != plain else own).replace("-", "_")
    exact = [choice for choice in choices if own in (choice, choice.replace("-", "_"))]
    if group == "optim" and (optimizer := suggest_optimizer(value)):
        return optimizer
    if meant := _ours(CHOICES.get(group, {}), plain) or _switched(group, plain):
        return _ask(meant)
    if exact:
        return _ask(exact[0])
    if group == "hardware":
        return _machine(plain, choices)
    if group in OWN_PATH and ("/" in value or group == "model" or "." in value):
        near = difflib.get_close_matches(plain, choices, n=1, cutoff=0.8)
        also = f", or {group}={near[0]}" if near else ""
        return _ask(OWN_PATH[group].format(value=value) + also)
    near = difflib.get_close_matches(plain, choices, n=1)
    return _ask(near[0]) if near else ""


def suggest_value(option: str, value: str, expected: Sequence[str]) -> str:
    """Suggest the nearest of the values that `option` takes for a `value` that is none of them."""
    if option == "optim.name":
        return suggest_optimizer(value)
    meant = _ours(VALUES.get(option, {}), value.lower())
    near = [meant] if meant else difflib.get_close_matches(value.lower(), expected, n=1)
    return _ask(near[0]) if near else ""


def _ours(table: Mapping[str, str], theirs: str) -> str:
    """Return the key of `table` among whose words `theirs` is; empty if it is nowhere."""
    return next((ours for ours, words in table.items() if theirs in words.split()), "")


def _switched(group: str, value: str) -> str:
    on, off = SWITCHED.get(group, ("", ""))
    return on if value in ON else off if value in OFF else ""


def _machine(value: str, choices: Sequence[str]) -> str:
    """Suggest machines with the GPU that `value` names, and with its number of GPUs if it has one: rtx4090, 8xA100."""
    counted = re.match(r"(\d+)\s*[x*]\s*", value)
    named = value[counted.end() :] if counted else value
    card = re.sub(r"nvidia|geforce|rtx|tesla|gb\b|[^a-z0-9]", "", named)
    with_card = [name for name in choices if card and name.partition("x")[2].replace("-", "").startswith(card)]
    as_many = [name for name in with_card if counted and name.startswith(f"{counted.group(1)}x")]
    return _ask(" or ".join((as_many or with_card)[:4])) if with_card else ""


def _ask(meant: str) -> str:
    return f" (did you mean {meant}?)"
