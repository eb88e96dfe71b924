"""resume=RUN_DIR takes the configuration of the run's last launch; further words change it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from remat.config import compose, resumed
from remat.config.options import ConfigError, Policy, Precision

FIRST = [
    "recipe=tiny_zero3_offload",
    "name=mine",
    "train.seq_len=77",
    "checkpointing=uniform",
    "checkpointing.segment_layers=3",
    "deepspeed.config=zero2",
    "model.architecture.hidden_size=96",
    "train.stop_at=20",
    "run_id=first",
    "data=alpaca",
    "data.path=my.jsonl",
    "optim.lr=7e-4",
]


def make_run(folder: Path, *words: str) -> Path:
    """A run directory with the configuration of its first launch and one saved state, of step 20."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(compose.compose_run([*FIRST, *words]).yaml)
    make_state(folder, 20)
    return folder


def make_state(run: Path, step: int) -> None:
    state = run / "saved" / f"step-{step:06d}"
    state.mkdir(parents=True)
    (state / "manifest.json").write_text("{}")


def composed(*words: str) -> compose.RunConfig:
    return compose.from_command_line(list(words)).run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "outputs" / "mine" / "first")


@pytest.mark.parametrize("below", ["", "saved", "saved/step-000020"])
def test_the_runs_own_configuration_is_taken(run: Path, below: str) -> None:
    place = run / below
    cfg = composed(f"resume={place}")
    expected = compose.compose_run(FIRST).run
    expected.run_id, expected.train.stop_at, expected.resume = None, 0, str(place)
    assert cfg == expected
    compose.check_recipe([f"resume={place}"])


def test_a_folder_of_states_is_inside_its_run_by_any_name(run: Path) -> None:
    kept = (run / "saved").rename(run / "kept")
    for place in (run, kept, kept / "step-000020"):
        assert resumed.run_folder(place) == run


def test_words_change_it(run: Path) -> None:
    cfg = composed(f"resume={run}", "train.steps=300", "optim.lr=1e-4", "train.precision=fp32", "run_id=null")
    assert (cfg.train.steps, cfg.optim.lr, cfg.train.precision) == (300, 1e-4, Precision.fp32)
    assert (cfg.train.seq_len, cfg.name, cfg.data.path) == (77, "mine", "my.jsonl")


def test_a_choice_of_a_group_replaces_its_section_whole(run: Path) -> None:
    cfg = composed(f"resume={run}", "checkpointing=none", "data=text", "data.path=other")
    assert (cfg.checkpointing.policy, cfg.checkpointing.segment_layers) == (Policy.none, 2)
    assert (cfg.data.source, cfg.data.file_type, cfg.data.path) == ("files", "text", "other")
    assert cfg.train.seq_len == 77


def test_free_form_sections_are_those_of_the_run_alone(tmp_path: Path) -> None:
    run = make_run(
        tmp_path / "run", "model=hf", "model.path=/my/model", "deepspeed.overrides.gradient_clipping=2"
    )
    cfg = composed(f"resume={run}", "deepspeed.overrides.steps_per_print=5")
    assert cfg.model.path == "/my/model" and cfg.model.architecture == {"hidden_size": 96}
    assert cfg.deepspeed.overrides == {"gradient_clipping": 2, "steps_per_print": 5}


def test_the_newest_launch_counts_and_an_older_state_is_of_an_older_one(run: Path) -> None:
    for step, steps in ((20, 333), (40, 444)):
        (run / f"resumed-at-{step:06d}").mkdir()
        text = compose.compose_run([*FIRST, f"train.steps={steps}"]).yaml
        (run / f"resumed-at-{step:06d}" / "config.yaml").write_text(text)
        make_state(run, step + 10)
    assert composed(f"resume={run}").train.steps == 444
    assert composed(f"resume={run}/saved/step-000040").train.steps == 333
    assert composed(f"resume={run}/saved/step-000020").train.steps == 200


def test_a_recipe_that_is_given_is_what_the_words_change(run: Path) -> None:
    cfg = composed(f"resume={run}", "recipe=tiny_zero3_offload")
    assert (cfg.train.seq_len, cfg.name) == (256, "tiny_zero3_offload")


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("train.stepz=3", "no such option (did you mean train.steps?)"),
        ("+train.foo=3", "no such option"),
        ("train.steps=x", "x is not a whole number"),
        ("checkpointing=fulll", "no such choice"),
        ("data.path=a=b", "put the value in quotes"),
        ("run_id=x", "has no effect with resume="),
        ("train.steps=5,6", "remat compare"),
    ],
)
def test_wrong_words_are_told_as_without_a_run(run: Path, word: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        composed(f"resume={run}", word, "log_level=debug")
    assert told in str(caught.value)


def test_a_folder_that_is_no_run_is_told_so(tmp_path: Path, run: Path) -> None:
    for place, told in (("/no/such", "no such folder"), (str(tmp_path), "has no config.yaml")):
        with pytest.raises(ConfigError) as caught:
            composed(f"resume={place}")
        assert told in str(caught.value) and "outputs/RECIPE/RUN_ID" in str(caught.value)
    for content in ("train: [", "just text", "train:\n  stepz: 3\n", "train: 3\n"):
        (run / "config.yaml").write_text(content)
        with pytest.raises(ConfigError, match=r"config\.yaml.*give recipe=NAME"):
            composed(f"resume={run}")


def test_a_secret_that_was_kept_out_of_the_record_is_asked_for(run: Path) -> None:
    text = (
        (run / "config.yaml")
        .read_text()
        .replace("overrides: {}", "overrides:\n    comet:\n      api_key: '***'")
    )
    (run / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"deepspeed\.overrides\.comet\.api_key, which is secret"):
        composed(f"resume={run}")
    assert composed(f"resume={run}", "deepspeed.overrides.comet.api_key=x").train.seq_len == 77


def test_adapters_chosen_at_a_resume_bring_their_learning_rate_and_others_keep_the_runs(run: Path) -> None:
    assert composed(f"resume={run}", "peft=lora").optim.lr == 2e-4
    assert composed(f"resume={run}", "peft=lora", "optim.lr=3e-5").optim.lr == 3e-5
    assert composed(f"resume={run}").optim.lr == 7e-4


def test_a_run_with_adapters_takes_another_learning_rate_at_a_resume(run: Path) -> None:
    words = [word for word in FIRST if not word.startswith("optim.lr")]
    (run / "config.yaml").write_text(compose.compose_run([*words, "peft=lora"]).yaml)
    assert composed(f"resume={run}").optim.lr == 2e-4
    cfg = composed(f"resume={run}", "optim.lr=3e-5")
    assert (cfg.optim.lr, cfg.peft.lr) == (3e-5, None)


def test_what_changes_is_what_matters(run: Path) -> None:
    before = resumed.read_config(run / "config.yaml")
    assert resumed.changes(before, asdict(composed(f"resume={run}"))) == []
    words = ["train.steps=300", "log_level=debug", "model.architecture.n=3", "checkpointing=full"]
    changed = resumed.changes(before, asdict(composed(f"resume={run}", *words)))
    assert {name: (old, new) for name, old, new in changed} == {
        "train.steps": (200, 300),
        "model.architecture.n": (None, 3),
        "checkpointing.policy": ("uniform", "full"),
        "checkpointing.segment_layers": (3, 2),
    }
