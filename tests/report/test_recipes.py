"""`remat recipes`: what there is to start from, and what each is planned to need."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from remat import cli
from remat.config import compose
from remat.report import recipes


def test_every_recipe_is_listed_with_its_machine_and_planned_figures() -> None:
    done = CliRunner().invoke(cli.app, ["recipes"], env={"COLUMNS": "140"})
    assert done.exit_code == 0
    for row in recipes.rows():
        (line,) = [line for line in done.output.splitlines() if line.startswith(f"{row.name} ")]
        assert row.gpu_gib in line and row.tokens_per_s in line
        assert row.gpu_gib != "-" or row.name == "tiny_zero3_offload"
    assert all(name in done.output for name in compose.starting_points())
    assert {row.name for row in recipes.rows()} == set(compose.recipe_names())


@pytest.mark.sample(one_in=9)
@pytest.mark.parametrize("recipe", compose.recipe_names())
def test_what_is_listed_is_what_composes(recipe: str) -> None:
    (row,) = [row for row in recipes.rows() if row.name == recipe]
    run = compose.compose_run([f"recipe={recipe}"]).run
    assert (row.summary, row.machine, row.status) == (run.meta.summary, run.meta.machine, run.meta.status)
    assert row.strategy.startswith(f"{run.deepspeed.config}, ")
    same = compose.compose_run([f"recipe={recipe}", f"checkpointing={row.strategy.split(', ')[1]}"]).run
    assert same.checkpointing.policy is run.checkpointing.policy


def test_the_strategy_names_what_the_recipe_chose() -> None:
    (row,) = [row for row in recipes.rows() if row.name == "qwen3_14b_full_8x80"]
    assert row.strategy == "zero3, budget"
