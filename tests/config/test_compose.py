"""Composition as a user meets it: precedence, typos, every recipe, and all problems in one message."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

import remat
from remat.config import compose, ds_config, validation
from remat.config.options import ConfigError, DataSource, Policy, Precision


def run(*words: str) -> compose.RunConfig:
    return compose.from_command_line(list(words)).run


def message(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        compose.from_command_line(list(words))
    return str(caught.value)


@pytest.mark.parametrize("recipe", compose.recipe_names())
def test_every_recipe_composes_and_says_what_it_is_for(recipe: str) -> None:
    cfg = run(f"recipe={recipe}")
    assert cfg.name == recipe
    assert cfg.meta.summary
    assert cfg.meta.machine != "any"
    header = (compose.RECIPE_DIR / f"{recipe}.yaml").read_text().splitlines()[0]
    assert header.startswith("# deepspeed") and f"recipe={recipe}" in header


@pytest.mark.parametrize("name", compose.starting_points())
def test_every_starting_point_needs_only_a_model_and_data(name: str) -> None:
    assert "model.path" in message(f"recipe={name}")
    cfg = run(f"recipe={name}", "model.path=/my/model", "data.path=/my/data.jsonl")
    assert (cfg.name, cfg.meta.machine) == (name, "any")
    assert cfg.optim.warmup_steps is None and cfg.train.eval_batches > 0 and cfg.save.export
    assert ds_config.zero_stage(strategy_file(cfg)) in (2, 3)
    header = (compose.RECIPE_DIR / f"{name}.yaml").read_text().splitlines()[0]
    assert header == f"# deepspeed train.py recipe={name} model.path=FOLDER_OR_HUB_NAME data.path=FILE"


def strategy_file(cfg: compose.RunConfig) -> dict[str, Any]:
    return ds_config.load(cfg.deepspeed.config, compose.DS_CONFIG_DIR)


def test_learning_rates_of_starting_points_are_those_of_their_kind() -> None:
    rates = {name: run(f"recipe={name}", "model.path=/m").optim.lr for name in compose.starting_points()}
    assert rates == {"finetune": 1e-5, "lora": 2e-4, "qlora": 2e-4, "pretrain": 3e-4}


FULL_8B = "recipe=llama8b_zero3_offload_optimizer"


@pytest.mark.parametrize(
    "words", [["peft=lora"], ["peft=qlora"], ["peft=lora", "peft.r=4"], ["peft.method=lora", "peft.lr=2e-4"]]
)
def test_adapters_bring_their_learning_rate(words: list[str]) -> None:
    cfg = run(FULL_8B, *words, "model.path=/m")
    assert cfg.optim.lr == cfg.peft.lr == 2e-4
    assert run(FULL_8B, "model.path=/m").optim.lr == 1e-5


@pytest.mark.parametrize(
    ("words", "lr"),
    [
        (["peft=lora", "optim.lr=7e-5"], 7e-5),
        (["optim.lr=1e-5", "peft=lora"], 1e-5),
        (["peft=lora", "peft.lr=3e-4"], 3e-4),
        (["recipe=lora", "model.path=/m"], 2e-4),
        (["recipe=lora", "model.path=/m", "optim.lr=1e-4"], 1e-4),
        (["recipe=lora", "model.path=/m", "peft.lr=1e-3"], 1e-3),
        ([], 1e-5),
    ],
)
def test_a_learning_rate_that_is_given_stays(words: list[str], lr: float) -> None:
    cfg = run(*([FULL_8B] if "recipe" not in "".join(words) else []), *words)
    assert cfg.optim.lr == lr
    assert cfg.peft.lr in (None, lr)


def test_two_learning_rates_are_refused() -> None:
    assert "leave one out" in message(FULL_8B, "peft=lora", "peft.lr=1e-4", "optim.lr=1e-5")
    assert "no effect" in message(FULL_8B, "peft.lr=1e-4")


@pytest.mark.parametrize(
    ("group", "choice"), [(g, c) for g, choices in compose.group_choices().items() for c in choices]
)
def test_every_group_choice_composes(group: str, choice: str) -> None:
    more = ["model.path=x"] if (group, choice) == ("model", "hf") else []
    more += ["optim.decay_steps=10"] if choice == "adamw_wsd" else []
    run(f"{group}={choice}", *more)


def test_precedence_default_group_train_yaml_recipe_command_line(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /checkpointing: none\ntrain:\n  steps: 7\n  seq_len: 33\n"
    )
    search = ["--config-dir", str(tmp_path)]
    assert run("recipe=tiny_zero3_offload").checkpointing.policy is Policy.full
    mine = run(*search, "recipe=mine")
    assert (mine.name, mine.train.steps, mine.train.seq_len) == ("mine", 7, 33)
    assert mine.checkpointing.policy is Policy.none
    assert mine.optim.lr == 3e-4
    assert run(*search, "recipe=mine", "train.steps=9").train.steps == 9
    assert run(*search, "recipe=mine", "checkpointing=full").checkpointing.policy is Policy.full


def test_a_users_own_defaults_are_weaker_than_a_recipe(tmp_path: Path) -> None:
    """local/default.yaml of a folder that is searched, or of conf/ itself, where git ignores it."""
    (tmp_path / "local").mkdir()
    own = tmp_path / "local" / "default.yaml"
    own.write_text("output_dir: /mine\ntracking:\n  tags: [ann]\ntrain:\n  seq_len: 77\n")
    tiny = "recipe=tiny_zero3_offload"
    for way in (f"--config-dir={tmp_path}", f"hydra.searchpath=[file://{tmp_path}]"):
        found = run(way, tiny)
        assert (found.output_dir, found.tracking.tags) == ("/mine", ["ann"])
        assert found.train.seq_len == run(tiny).train.seq_len != 77
        assert run(way, tiny, "output_dir=/other").output_dir == "/other"
    own.write_text("trainz: 3\n")
    text = message(f"--config-dir={tmp_path}", tiny)
    assert "local/default.yaml, your own defaults: Key 'trainz' not in 'RunConfig'; correct that file" in text
    ignored = (compose.ROOT / ".gitignore").read_text().splitlines()
    assert "conf/local/" in ignored and "local" not in compose.group_choices()


def test_a_typo_in_a_users_recipe_names_the_file_and_the_key(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "bad.yaml").write_text("# @package _global_\ntrain:\n  micro_bach: 7\n")
    text = message("--config-dir", str(tmp_path), "recipe=bad")
    assert "micro_bach" in text
    assert "bad" in text


@pytest.mark.parametrize(
    "spelling", [["--local_rank=1"], ["--local-rank=1"], ["--local_rank", "1"], ["--local-rank", "1"]]
)
def test_the_launchers_local_rank_is_dropped(spelling: list[str]) -> None:
    assert run(*spelling, "train.steps=3").train.steps == 3


def test_wrong_recipe_lists_the_choices_and_the_nearest() -> None:
    text = message("recipe=tiny_zero3_ofload")
    assert "did you mean tiny_zero3_offload?" in text
    assert "llama70b_zero3_offload" in text


def test_wrong_key_type_and_choice_come_in_one_message() -> None:
    text = message(
        "train.stepz=3", "train.seq_len=x", "checkpointing=fulll", "train.precision=int4", "trian.steps=1"
    )
    assert len(text.splitlines()) == 5
    assert "train.stepz=3: no such option (did you mean train.steps?)" in text
    assert "train.seq_len=x: x is not a whole number" in text
    assert "checkpointing=fulll: no such choice (did you mean full?)" in text
    assert "train.precision=int4" in text and "fp32, bf16, fp16" in text
    assert "trian.steps=1: no such option (did you mean train.steps?)" in text


def test_a_group_given_twice_or_an_override_without_a_value_is_explained() -> None:
    assert "train.steps: not an override" in message("train.steps")


def test_contradictions_are_collected() -> None:
    text = message(
        "train.steps=0", "model.init=pretrained", "optim.decay_steps=5", "save.keep=0", "data.eval_fraction=1.5"
    )
    for option in (
        "train.steps=0",
        "model.init=pretrained",
        "optim.decay_steps=5",
        "save.keep=0",
        "data.eval_fraction",
    ):
        assert option in text
    assert len(text.splitlines()) >= 5


def test_the_length_on_the_command_line_replaces_the_recipes(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    for name, length in (
        ("mine", "epochs: 2.5"),
        ("both", "{steps: 7, epochs: 1}"),
        ("neither", "seq_len: 33"),
    ):
        (tmp_path / "recipe" / f"{name}.yaml").write_text(
            f"# @package _global_\ntrain: {length}\n"
            if "{" in length
            else f"# @package _global_\ntrain:\n  {length}\n"
        )
    mine = ["--config-dir", str(tmp_path), "recipe=mine"]

    def length(*words: str) -> tuple[int | None, float | None]:
        train = run(*words).train
        return train.steps, train.epochs

    assert length() == (200, None)
    assert length("train.epochs=3") == length("train.steps=null", "train.epochs=3") == (None, 3.0)
    assert length(*mine) == (None, 2.5)
    assert length(*mine, "train.steps=9") == (9, None)
    assert length(*mine, "train.epochs=0.5") == (None, 0.5)
    assert "train.steps=9 and train.epochs=3: both say how long to train" in message(
        "train.steps=9", "train.epochs=3"
    )
    assert "train.steps=7 and train.epochs=1: both" in message(*mine[:2], "recipe=both")
    assert length(*mine[:2], "recipe=both", "train.epochs=4") == (None, 4.0)
    for words in ((*mine[:2], "recipe=neither"), ("train.steps=null",)):
        assert length(*words) == (None, None), "enough for a plan"
        with pytest.raises(
            ConfigError, match=r"train\.steps and train\.epochs are both empty: give one of them"
        ):
            validation.check_launch(run(*words))
    assert "train.epochs=0 must be above 0" in message("train.epochs=0")
    for word in ("train.stop_at=5", "optim.warmup_steps=300"):  # against steps that only the data tells
        assert length("train.epochs=1", word) == (None, 1.0)


def test_bad_granularity_is_refused_before_anything_is_built() -> None:
    text = message(
        "checkpointing.interval=0",
        "checkpointing.segment_layers=0",
        "checkpointing.block_layers=-1",
        "checkpointing.offload.min_bytes=-1",
        "model.architecture.use_cache=true",
    )
    for option in (
        "interval=0",
        "segment_layers=0",
        "block_layers=-1",
        "offload.min_bytes=-1",
        "use_cache=true",
    ):
        assert option in text


def test_multirun_is_refused_with_the_reason() -> None:
    for words in (["-m", "train.steps=1,2"], ["train.steps=1,2"]):
        text = message(*words)
        assert "`remat compare train.steps=1,2 recipe=NAME`" in text
        assert "`remat plan --sweep train.steps=1,2 recipe=NAME`" in text
        assert "multirun" not in text


def test_added_keys_flags_and_hydras_own_settings_come_in_one_message_with_the_rest() -> None:
    text = message(
        "+train.num_epochs=3", "--learning_rate=1e-5", "hydra.run.dir=x", "train.stepz=3", "data=alpacca"
    )
    assert len(text.splitlines()) == 5
    for part in ("train.epochs", "optim.lr", "output_dir=FOLDER", "train.steps?", "did you mean alpaca?"):
        assert part in text


@pytest.mark.parametrize(
    "word", ["data.path=a=b", "data.path='a", "data.path=a{b", "data.path=(x", "data.path=x]"]
)
def test_a_value_that_the_grammar_cannot_read_is_told_in_plain_words(word: str) -> None:
    text = message(word)
    assert "put the value in quotes" in text
    assert not any(jargon in text for jargon in ("Lexer", "mismatched", "expecting", "hydra.cc", "EOF"))
    quoted = shlex.split(text.partition("in quotes: ")[2])
    assert run(*quoted).data.path == word.partition("=")[2]


@pytest.mark.parametrize(
    "word",
    [
        "hardware.num_nodes=0",
        "hardware.gpus_per_node=-1",
        "hardware.gpu_link_gbs=0",
        "hardware.gpu_memory_gib=nan",
        "hardware.gpu_rates.memory_gbs=0",
    ],
)
def test_a_figure_that_no_machine_has_is_refused(word: str) -> None:
    assert f"{word} must be above 0" in message("recipe=tiny_zero3_offload", word)


def test_each_item_of_a_list_that_cannot_be_read_is_put_in_quotes() -> None:
    text = message("data.path=[a=b,'c d']")
    assert run(*shlex.split(text.partition("each item in quotes: ")[2])).data.path == ["a=b", "c d"]
    assert "put each text in it in quotes" in message("data.mix={a: {path: x(1)}}")


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("data.path=~/a b.jsonl", "~/a b.jsonl"),
        ("data.path=[~/a, b,'~/c']", ["~/a", "b", "~/c"]),
        ("data.mix.one.path=~/a", "~/a"),
        ("data.mix.one.path=[~/a,~/b]", ["~/a", "~/b"]),
        ("model.architecture.vocabulary=~/a", "~/a"),
    ],
)
def test_a_path_in_the_home_folder_needs_no_quotes(word: str, found: object) -> None:
    cfg = run("model.path=/m", "data=files", word, *["data.mix.two.path=b"] * ("mix" in word))
    paths = (cfg.data.path, cfg.data.mix.get("one", cfg.data).path, cfg.model.architecture.get("vocabulary"))
    assert found in paths


def test_what_a_users_own_file_sets_beside_the_options_is_refused(tmp_path: Path) -> None:
    (tmp_path / "extra").mkdir()
    (tmp_path / "extra" / "mine.yaml").write_text("learning_rate: 3\n")
    assert "no such option" in message("--config-dir", str(tmp_path), "+extra=mine")
    (tmp_path / "extra" / "mine.yaml").write_text("# @package _global_\ntrain:\n  steps: 77\n")
    assert run("--config-dir", str(tmp_path), "+extra=mine").train.steps == 77


def test_a_free_form_section_may_be_given_whole() -> None:
    assert run("model.architecture={hidden_size: 96}").model.architecture["hidden_size"] == 96


@pytest.mark.parametrize("words", [[], ["train.steps=3"], ["resume=auto"], ["resume=none"]])
def test_a_launch_without_a_recipe_lists_them_and_the_lines_to_type(words: list[str]) -> None:
    composed = compose.from_command_line(words)
    with pytest.raises(ConfigError) as caught:
        compose.check_launch(composed, 1)
    text = str(caught.value)
    assert "deepspeed train.py recipe=tiny_zero3_offload" in text
    assert "recipe=finetune model.path=" in text
    assert all(name in text for name in compose.recipe_names())
    compose.check_launch(compose.from_command_line([*words, "recipe=tiny_zero3_offload"]), 1)


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        compose.from_command_line(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"remat {remat.__version__}\n"


def test_unknown_flag_is_refused() -> None:
    assert "--fast is not an option" in message("--fast")


def test_what_follows_info_is_not_taken_for_an_override() -> None:
    text = message("--info", "searchpath", "recipe=tiny_zero3_offload")
    assert text.startswith("--info searchpath is not an option here: --cfg prints") and "override" not in text


def test_free_form_sections_take_new_keys() -> None:
    cfg = run("deepspeed.overrides.zero_optimization.stage=2", "model.architecture.rope_theta=5e5")
    assert cfg.deepspeed.overrides == {"zero_optimization": {"stage": 2}}
    assert cfg.model.architecture["rope_theta"] == 5e5
    assert cfg.model.architecture["hidden_size"] == 192


def test_the_issue_commands_compose() -> None:
    assert run("checkpointing=none").checkpointing.policy is Policy.none
    assert run("train.seq_len=512").train.seq_len == 512
    assert run("deepspeed.config=zero2_offload").deepspeed.config == "zero2_offload"
    data = run("data=jsonl", "data.path=my.jsonl").data
    assert (data.source, data.path) == (DataSource.files, "my.jsonl")
    assert run("model=hf", "model.path=/my/model").model.path == "/my/model"
    assert run("train.precision=fp16").train.precision is Precision.fp16


def test_cfg_prints_the_composed_yaml(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        compose.from_command_line(["--cfg", "train.steps=12"])
    assert caught.value.code == 0
    assert "steps: 12" in capsys.readouterr().out


def test_help_lists_recipes_and_groups(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compose.from_command_line(["--help"])
    out = capsys.readouterr().out
    assert "llama70b_zero3_offload" in out
    assert "checkpointing=" in out


def test_composing_touches_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run("recipe=tiny_zero3_offload")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_tasks_that_do_not_know_their_rank_are_refused(variable: str) -> None:
    with pytest.raises(ConfigError, match=f"{variable}=4 but RANK is not set"):
        validation.check_environment({variable: "4"})
    validation.check_environment({variable: "4", "RANK": "0"})
    validation.check_environment({variable: "1"})


VALUES = [
    "name=x",
    "train.steps=7",
    "optim.lr=1e-2",
    "tracking.tags=[a,b]",
]
NOT_ONE_VALUE = ["train.steps=1,2", "~train.steps", "+train.more=1", "model=nothing", "a b"]
WRONG_VALUES = ["train.stepz=3", "train.steps=x", "a.b.c=1", "train.deadlines.x=3", "train.precision=int4"]
CHOICES = ["checkpointing=offload", "data=alpaca", "data.path=/d.jsonl", "++model.architecture.n_layer=3"]


@pytest.mark.sample(one_in=14)
@pytest.mark.parametrize("recipe", compose.recipe_names())
def test_values_set_in_what_was_composed_before_are_what_hydra_composes(recipe: str) -> None:
    """And the choices that were composed once are left as they were."""
    for words in (VALUES, CHOICES, [*VALUES, *CHOICES], []):
        asked = [f"recipe={recipe}", *words]
        quick = compose._with_values(asked)
        assert quick is not None
        assert finished(quick) == finished(compose._loaded(asked))


@pytest.mark.parametrize(
    ("recipe", "sample"),
    [
        ("tiny_zero3_offload", slice(0, None, 12)),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                ("tiny_zero3_offload", slice(None)),
                ("llama8b_qlora_1x24", slice(1, None, 20)),
                ("finetune", slice(1, None, 20)),
            )
        ),
    ],
    ids=["a sample", "all", "qlora", "finetune"],
)
def test_every_choice_is_what_hydra_composes(recipe: str, sample: slice) -> None:
    """Put into what was composed before; of each group all files, or some, and several groups at once."""
    every = [f"{group}={name}" for group, names in compose.group_choices().items() for name in names]
    asked = [[word] for word in every if not word.startswith("recipe=")]
    assert len(asked) > 60
    for words in (*asked[sample], ["checkpointing=offload", "peft=lora", "optim=adamw", "model=hf"]):
        quick = compose._with_values([*words, f"recipe={recipe}"])
        assert quick is not None
        assert finished(quick) == finished(compose._loaded([*words, f"recipe={recipe}"])), words


def finished(cfg: compose.DictConfig) -> tuple[compose.RunConfig, str]:
    run, write_yaml = compose._finished(cfg)
    return run, write_yaml()


@pytest.mark.parametrize("group", ["checkpointing=none", "recipe=llama8b_zero3_offload_optimizer"])
def test_the_last_of_two_choices_of_a_group_holds_as_in_hydra(group: str) -> None:
    words = ["recipe=tiny_zero3_offload", group, "checkpointing=full", "checkpointing=offload"]
    quick = compose._with_values(words)
    assert quick is not None
    assert finished(quick) == finished(compose._loaded(words))
    assert finished(compose._loaded(words)) != finished(compose._loaded(words[:-1]))


def test_a_value_that_cannot_be_set_is_explained_as_after_hydra_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = [message(word) for word in WRONG_VALUES]
    monkeypatch.setattr(compose, "_with_values", lambda overrides: None)
    assert quick == [message(word) for word in WRONG_VALUES]


@pytest.mark.parametrize("word", NOT_ONE_VALUE)
def test_what_is_more_than_a_value_is_left_to_hydra(word: str) -> None:
    assert compose._with_values([word]) is None


def test_a_recipe_that_changes_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compose, "RECIPE_DIR", tmp_path)
    recipe = tmp_path / "mine.yaml"
    for steps in (11, 2222):
        recipe.write_text(f"# @package _global_\ntrain:\n  steps: {steps}\n")
        assert compose.compose_run(["recipe=mine", "train.seq_len=64"]).run.train.steps == steps
