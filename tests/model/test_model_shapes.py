"""The shipped model shapes have exactly the parameters that were published, and compose."""

from __future__ import annotations

import pytest

from remat.config import compose
from remat.model import flops
from remat.model.hf_model import facts, shape_config, skeleton
from remat.planning import strategy

KERAS = (
    "keras-hub model presets, field params"  # github.com/keras-team/keras-hub: counted from the loaded weights
)
HUB = "huggingface.co, safetensors metadata of the repository"
PUBLISHED = {
    "llama1b": (1_235_814_400, HUB),
    "llama8b": (8_030_261_248, HUB),
    "llama70b": (70_553_706_496, HUB),
    "llama2_7b": (6_738_415_616, HUB),
    "llama2_13b": (13_015_864_320, HUB),
    "llama2_70b": (68_976_648_192, HUB),
    "qwen3_0.6b": (
        596_049_920,
        KERAS,
    ),  # the hub counts 751,632,384: its file holds the tied output head once more
    "qwen3_1.7b": (1_720_574_976, KERAS),  # likewise 2,031,739,904
    "qwen3_4b": (4_022_468_096, KERAS),
    "qwen3_8b": (8_190_735_360, KERAS),
    "qwen3_14b": (14_768_307_200, KERAS),
    "qwen3_32b": (32_762_123_264, KERAS),
    "qwen3_30b_a3b": (30_532_122_624, HUB),
    "mistral_7b": (7_241_732_096, HUB),
    "mixtral_8x7b": (46_702_792_704, KERAS),
    "gpt2_small": (124_439_808, KERAS),
    "gpt2_medium": (354_823_168, KERAS),
    "gpt2_large": (774_030_080, KERAS),
    "gpt2_xl": (1_557_611_200, KERAS),
    "gpt_oss_20b": (20_914_757_184, KERAS),
    "gemma3_1b": (999_885_952, HUB),
    "gemma_2b": (2_506_172_416, KERAS),
    "gemma_7b": (8_537_680_896, KERAS),
    "phi2": (2_779_683_840, HUB),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_count_is_the_published_one(name: str) -> None:
    model = compose.compose_run([f"model={name}"]).run.model
    config = shape_config(model)
    model_skeleton = skeleton(config, model)
    found = facts(model_skeleton)
    assert found.num_params == PUBLISHED[name][0]


def test_every_shape_that_ships_is_in_the_table() -> None:
    shipped = {path.stem for path in (compose.CONF_DIR / "model").glob("*.yaml")}
    assert shipped == {*PUBLISHED, "hf", "tiny_llama"}


def test_experts_a_token_visits() -> None:
    """Mixtral: 12.9 billion active parameters (Jiang et al. 2024, table 1)."""
    counted = strategy.counted_model(compose.compose_run(["model=mixtral_8x7b"]).run)
    active = flops.count(counted, 128).num_params_active
    assert round(active / 1e9, 1) == 12.9


def test_window_of_the_first_mistral_only() -> None:
    window = {
        name: getattr(shape_config(compose.compose_run([f"model={name}"]).run.model), "sliding_window", None)
        for name in ("mistral_7b", "mixtral_8x7b", "qwen3_8b")
    }
    assert window == {"mistral_7b": 4096, "mixtral_8x7b": None, "qwen3_8b": None}
