"""Another tool's name, a slip or an option of Hydra is refused with what to type here; nothing near says nothing."""

from __future__ import annotations

import re

import pytest

from remat.config import command_line, compose, hints
from remat.config.options import ConfigError

OPTIONS = compose.option_names()
GROUPS = {*compose.group_choices(), "recipe"}


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("learning_rate", "optim.lr"),
        ("lr", "optim.lr"),
        ("train.learning_rate", "optim.lr"),
        ("training.lr", "optim.lr"),
        ("optimizer.lr", "optim.lr"),
        ("trainer.args.learning-rate", "optim.lr"),
        ("train.num_train_epochs", "train.epochs"),
        ("train.num_epochs", "train.epochs"),
        ("per_device_train_batch_size", "train.micro_batch_size (of one rank and forward pass)"),
        ("train.gradient_accumulation_steps", "train.global_batch_size: accumulation is derived"),
        ("max_seq_length", "train.seq_len"),
        ("cutoff_len", "train.seq_len"),
        ("data.max_length", "train.seq_len"),
        ("max_steps", "train.steps"),
        ("model_name_or_path", "model=hf model.path"),
        ("base_model", "model=hf model.path"),
        ("model.name", "model=hf model.path"),
        ("bf16", "train.precision=bf16"),
        ("train.fp16", "train.precision=fp16"),
        ("gradient_checkpointing", "checkpointing=full"),
        ("peft.lora_alpha", "peft=lora peft.alpha"),
        ("lora_r", "peft=lora peft.r"),
        ("packing", "data.packing"),
        ("train.sample_packing", "data.packing"),
        ("dataset", "data.path"),
        ("train.output_dir", "output_dir"),
        ("train.save_steps", "save.every"),
        ("eval_steps", "train.eval_every"),
        ("logging_steps", "train.log_every"),
        ("warmup_ratio", "optim.warmup_steps"),
        ("optimizer", "optim.name"),
        ("train.optim", "optim.name"),
        ("optim.warmup", "optim.warmup_steps"),
        ("train.weight_decay", "optim.weight_decay"),
        ("max_grad_norm", "optim.gradient_clipping"),
        ("lr_scheduler_type", "optim.schedule"),
        ("seed", "train.seed"),
        ("report_to", "tracking="),
        ("resume_from_checkpoint", "resume"),
        ("deepspeed.zero_optimization.stage", "deepspeed.overrides.zero_optimization.stage"),
        ("deepspeed.overides.steps_per_print", "deepspeed.overrides.steps_per_print"),
        ("train.stepz", "train.steps"),
        ("trian.steps", "train.steps"),
        ("train.micro_bach", "train.micro_batch_size"),
        ("seq_ln", "train.seq_len"),
        ("output_dri", "output_dir"),
        ("checkpointing.offlod.enabled", "checkpointing.offload.enabled"),
    ],
)
def test_what_was_meant(given: str, meant: str) -> None:
    assert hints.find(given, OPTIONS).startswith(meant)


@pytest.mark.parametrize(
    "given",
    [
        "optim.kind",
        "data.enabled",
        "foo.bar",
        "train.foo",
        "name.x",
        "a.b.c",
        "train.deadlines.x",
        "",
        ".",
        "-",
    ],
)
def test_nothing_is_guessed_where_nothing_is_near(given: str) -> None:
    assert hints.find(given, OPTIONS) == ""


def test_every_hint_names_options_that_exist() -> None:
    for ours in {*hints.MEANING.values()}:
        named = re.findall(r"\b[a-z]+\.[a-z_0-9]+", ours)
        assert {*named} - {"train.py"} <= {*OPTIONS}, ours
        for group, choice in re.findall(r"(?<![.\w])([a-z]+)=([a-z_0-9]+)", ours):
            assert group in OPTIONS or choice in compose.group_choices()[group], ours


def test_no_option_of_ours_is_taken_for_another_tools_name() -> None:
    """Each option, slightly misspelt, leads back to itself or to nothing, never elsewhere."""
    for option in OPTIONS:
        section, _, leaf = option.rpartition(".")
        if len(leaf) > 5 and section:
            slip = f"{section}.{leaf[:-2]}{leaf[-1]}{leaf[-2]}"
            assert slip in OPTIONS or hints.find(slip, OPTIONS) in (option, ""), slip


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("+train.num_epochs=3", "no such option (did you mean train.epochs?)"),
        ("+train.foo=1", "no such option"),
        ("++train.foo=1", "no such option"),
        ("++train.deadlines.foo=1", "no such option"),
        ("+foo=1", "no such option"),
        ("+foo.bar=1", "no such option"),
        ("+train.steps=1", "write train.steps=1, without +"),
        ("+data=alpaca", "write data=alpaca, without +"),
        ("~train.steps", "an option always has a value"),
        ("~data", "a run has one choice of each group"),
        ("~recipe", "a run has one choice of each group"),
        ("hydra.run.dir=X", "set output_dir=FOLDER, name=NAME or run_id=RUN_ID"),
        ("+hydra.run.dir=X", "set output_dir=FOLDER"),
        ("hydra.searchpath=[file:///x]", "write --config-dir DIR"),
        ("hydra/launcher=joblib", "write `remat launch`"),
        ("hydra.sweeper.params=1", "remat compare"),
        ("hydra=x", "leave it out"),
        ("data@train=alpaca", "write data=alpaca"),
        ("deepspeed=zero3", "write deepspeed.config=zero3"),
        ("checkpointing.offload=true", "write checkpointing.offload.enabled=true"),
        ("train=3", "train is a section: set an option of it, such as train.steps"),
        ("optim.lr=1e-4,2e-4", "remat compare optim.lr=1e-4,2e-4"),
        ("optim.lr=1e-4,2e-4", "remat plan --sweep optim.lr=1e-4,2e-4"),
        ("train.steps=range(1,3)", "remat compare train.steps=FIRST,SECOND"),
    ],
)
def test_words_that_no_run_would_keep_are_refused(word: str, told: str) -> None:
    assert told in (command_line.refusal(word, OPTIONS, GROUPS) or "")


@pytest.mark.parametrize(
    "word",
    [
        "train.steps=3",
        "++train.steps=3",
        "data=alpaca",
        "model.architecture.new=1",
        "+model.architecture.new=1",
        "~model.architecture.hidden_size",
        "++deepspeed.overrides.a.b=1",
        "tracking.tags=[a,b]",
        "data.path='a,b'",
        "checkpointing.layers={0-7: none, 31: full}",
        "deepspeed={config: zero2}",
        "train.stepz=3",
        "train.steps",
    ],
)
def test_other_words_are_left_to_composing(word: str) -> None:
    assert command_line.refusal(word, OPTIONS, GROUPS) is None


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["-m", "optim.lr=1e-4,2e-4"], "remat compare optim.lr=1e-4,2e-4 recipe=NAME"),
        (["--multirun"], "remat plan --sweep"),
        (["--info"], "--cfg prints"),
        (["-cn", "mine"], "write recipe=NAME"),
        (["--config-path=conf"], "write --config-dir DIR"),
        (["-sc", "install=bash"], "remat --install-completion"),
        (["--cfg", "hydra"], "prints the configuration of the run"),
        (["--learning_rate", "1e-5"], "did you mean optim.lr?"),
        (["--learning-rate=1e-5"], "did you mean optim.lr?"),
        (["--bf16", "train.steps=3"], "did you mean train.precision=bf16?"),
        (["--deepspeed", "zero3"], "deepspeed.config=zero3"),
        (["--train.steps", "3"], "train.steps=3"),
        (["--config-dir"], "needs a folder"),
        (["--config-dir=/no/such"], "--config-dir /no/such is not a folder"),
    ],
)
def test_flags_say_what_to_type(words: list[str], told: str) -> None:
    assert told in "\n".join(command_line.take_apart(words, OPTIONS).problems)


def test_the_value_of_a_flag_is_not_told_as_a_word_of_its_own() -> None:
    taken = command_line.take_apart(["--learning_rate", "1e-5", "train.steps=3", "--bf16", "true"], OPTIONS)
    assert taken.overrides == ["train.steps=3"]
    assert len(taken.problems) == 2


@pytest.mark.parametrize("words", [["--cfg"], ["--cfg", "job"], ["-c", "job"], ["--cfg=job"]])
def test_cfg_may_be_followed_by_job(words: list[str]) -> None:
    taken = command_line.take_apart([*words, "train.steps=3"], OPTIONS)
    assert taken.show_config and taken.overrides == ["train.steps=3"] and not taken.problems


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("optim.name=adamw_torch_fused", "adamw"),
        ("optim.name=adamw_bnb_8bit", "adamw_8bit"),
        ("optim.name=PagedAdamW8bit", "paged_adamw_8bit"),
        ("optim.name=lion_32bit", "lion"),
        ("optim=adafactor", "adafactor"),
        ("optim=adamw_8bit", "adamw_8bit"),
    ],
)
def test_an_optimizer_of_another_tool_is_refused_with_ours(word: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"(did you mean optim.name={meant}?)")):
        compose.compose_run([word])


@pytest.mark.parametrize("word", ["optim.name=muon", "optim=Muon"])
def test_muon_is_refused_with_the_reason(word: str) -> None:
    with pytest.raises(
        ConfigError, match="because DeepSpeed clips its update and not the gradient: choose adamw"
    ):
        compose.compose_run([word])


def test_an_unknown_optimizer_lists_the_known() -> None:
    with pytest.raises(
        ConfigError, match=r"expected one of \[adamw, adamw_8bit, paged_adamw_8bit, lion, adafactor"
    ):
        compose.compose_run(["optim.name=sgd"])
