"""The rendered DeepSpeed dict: complete, strict, and read by DeepSpeed as we mean it."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from remat.config import ds_config, ds_defaults
from remat.config.ds_config import RunValues
from remat.config.options import ConfigError, Precision

FOLDER = Path(__file__).resolve().parents[2] / "ds_configs"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
VALUES = RunValues(
    world_size=4,
    micro_batch_size=2,
    global_batch_size=32,
    gradient_clipping=0.5,
    precision=Precision.bf16,
    hidden_size=64,
    nvme_path="/scratch/swap",
)
ZERO3: dict[str, Any] = {"zero_optimization": {"stage": 3}}


def values(**changes: Any) -> RunValues:
    return dataclasses.replace(VALUES, **changes)


def zero(**changes: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, **changes}}


def problems(raw: dict[str, Any], overrides: dict[str, Any] | None = None, **changes: Any) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        ds_config.render(raw, overrides or {}, values(**changes))
    return str(refused.value).splitlines()


def only_problem(raw: dict[str, Any], overrides: dict[str, Any] | None = None, **changes: Any) -> str:
    found = problems(raw, overrides, **changes)
    assert len(found) == 1, found
    return found[0]


def test_the_shipped_strategies() -> None:
    assert NAMES == [
        "zero1",
        "zero2",
        "zero2_offload",
        "zero3",
        "zero3_nvme",
        "zero3_offload",
        "zero3_offload_optimizer",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_files_hold_a_memory_strategy_only(name: str) -> None:
    raw = ds_config.load(name, FOLDER)
    for key, option in ds_defaults.OWNED.items():
        assert ds_config.get(raw, key) == (None if option == "optim.states" else "auto"), key
    allowed = {*(k.split(".")[0] for k in ds_defaults.OWNED), "zero_optimization", "aio"}
    assert set(raw) <= allowed
    stage3 = raw["zero_optimization"]["stage"] == 3
    assert ("stage3_max_live_parameters" in raw["zero_optimization"]) == stage3
    for section in ("offload_optimizer", "offload_param"):
        if section in raw["zero_optimization"]:
            assert raw["zero_optimization"][section]["pin_memory"] is True


@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("name", NAMES)
def test_deepspeed_reads_the_rendered_file_as_meant(name: str, precision: Precision) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    raw = ds_config.load(name, FOLDER)
    run = values(world_size=1, precision=precision)  # without a process group DeepSpeed assumes one rank
    rendered = json.loads(json.dumps(ds_config.render(raw, {}, run)))
    read = DeepSpeedConfig(copy.deepcopy(rendered))
    assert read.train_batch_size == 32
    assert read.train_micro_batch_size_per_gpu == 2
    assert read.gradient_accumulation_steps == 16
    assert read.gradient_clipping == 0.5
    assert read.bfloat16_config.enabled == (precision is Precision.bf16)
    assert read.float16_config.enabled == (precision is Precision.fp16)
    assert read.bfloat16_config.check_grad_overflow is True
    assert read.float16_config.loss_scale == 0
    assert read.grad_accum_dtype == str(precision)
    assert (
        str(read.communication_data_type)
        == f"torch.{ {'fp32': 'float32', 'bf16': 'bfloat16', 'fp16': 'float16'}[precision] }"
    )
    assert read.steps_per_print is None
    assert read.timers_config.enabled is False
    config = read.zero_config
    assert config.stage == ds_config.zero_stage(rendered) == raw["zero_optimization"]["stage"]
    optimizer, param = config.offload_optimizer, config.offload_param
    assert (optimizer.device if optimizer else None) == ds_config.optimizer_offload_device(rendered)
    assert (param.device if param else None) == ds_config.param_offload_device(rendered)
    assert config.reduce_bucket_size == 64 * 64
    for key, value in rendered["zero_optimization"].items():
        if not key.startswith("offload_"):
            assert getattr(config, key.removeprefix("stage3_")) == value, key


def test_devices_of_each_file() -> None:
    devices = {}
    for name in NAMES:
        rendered = ds_config.render(ds_config.load(name, FOLDER), {}, VALUES)
        devices[name] = (
            ds_config.zero_stage(rendered),
            ds_config.optimizer_offload_device(rendered),
            ds_config.param_offload_device(rendered),
        )
    assert devices == {
        "zero1": (1, None, None),
        "zero2": (2, None, None),
        "zero2_offload": (2, "cpu", None),
        "zero3": (3, None, None),
        "zero3_nvme": (3, "nvme", "nvme"),
        "zero3_offload": (3, "cpu", "cpu"),
        "zero3_offload_optimizer": (3, "cpu", None),
    }


def test_the_key_tables_agree_with_the_installed_deepspeed() -> None:
    """Ask DeepSpeed's parser which keys it looks up, and compare with what we know."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    asked: set[str] = set()

    class Asking(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            asked.add(key)
            return super().get(key, default)

        def __contains__(self, key: object) -> bool:
            asked.add(str(key))
            return super().__contains__(key)

        def keys(self) -> Any:
            return self

        def __copy__(self) -> Asking:
            return Asking(self)

    DeepSpeedConfig(Asking(train_batch_size=1))
    ours = ds_defaults.top_level() | set(ds_defaults.REFUSED)
    assert asked - ours == set(), "DeepSpeed reads keys that ds_defaults does not know"
    assert ours - asked == {"sequence_parallel_size"}, "ds_defaults lists keys that DeepSpeed does not read"

    fields = {field.alias or name for name, field in DeepSpeedZeroConfig.model_fields.items()}
    removed = {"mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param"}
    known = ds_defaults.zero_allowed(0) | ds_defaults.zero_allowed(3) | set(ds_defaults.ZERO_REFUSED)
    assert known - removed == fields
    assert set(ds_defaults.BF16) == set(DeepSpeedBF16Config.model_fields)
    assert set(ds_defaults.FP16) == set(DeepSpeedFP16Config.model_fields)
    assert ds_defaults.AIO == AIO_DEFAULT_DICT
    for path, model in (
        ("offload_optimizer", DeepSpeedZeroOffloadOptimizerConfig),
        ("offload_param", DeepSpeedZeroOffloadParamConfig),
    ):
        assert ds_defaults.SECTIONS[f"zero_optimization.{path}"] == set(model.model_fields)


def test_written_defaults_are_deepspeeds_own() -> None:
    """Where a file is silent nothing changes against DeepSpeed, except what is listed here on purpose."""
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    on_purpose = {"overlap_comm"}  # DeepSpeed's default depends on the stage
    pairs = (
        (DeepSpeedZeroConfig(), {**ds_defaults.zero(1), **ds_defaults.zero(3)}),
        (DeepSpeedBF16Config(), ds_defaults.BF16),
        (DeepSpeedFP16Config(), ds_defaults.FP16),
        (
            DeepSpeedZeroOffloadOptimizerConfig(),
            {**ds_defaults.OFFLOAD_OPTIMIZER, **ds_defaults.OFFLOAD_OPTIMIZER_NVME},
        ),
        (DeepSpeedZeroOffloadParamConfig(), {**ds_defaults.OFFLOAD_PARAM, **ds_defaults.OFFLOAD_PARAM_NVME}),
    )
    for model, table in pairs:
        for key, value in table.items():
            if value not in (None, "auto") and key not in on_purpose:
                assert getattr(model, key.removeprefix("stage3_")) == value, key


def test_auto_is_filled_as_hugging_face_fills_it() -> None:
    rendered = ds_config.render(ds_config.load("zero3", FOLDER), {}, values(hidden_size=4096))
    inside = rendered["zero_optimization"]
    assert inside["reduce_bucket_size"] == 16_777_216
    assert inside["stage3_prefetch_bucket_size"] == 15_099_494
    assert inside["stage3_param_persistence_threshold"] == 40_960
    assert '"auto"' not in json.dumps(rendered)


def test_hugging_face_fills_the_same_files_alike() -> None:
    pytest.importorskip("accelerate")
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    arguments = SimpleNamespace(
        world_size=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        max_grad_norm=0.5,
        learning_rate=1e-3,
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_epsilon=1e-8,
        weight_decay=0.1,
        save_on_each_node=False,
        fp16=False,
        fp16_full_eval=False,
        bf16=True,
        bf16_full_eval=False,
        get_warmup_steps=lambda steps: 0,
    )
    model = SimpleNamespace(config=SimpleNamespace(hidden_size=64))
    for name in NAMES:
        theirs = HfTrainerDeepSpeedConfig(ds_config.load(name, FOLDER))
        theirs.trainer_config_process(arguments)
        theirs.trainer_config_finalize(arguments, model, 10)
        assert '"auto"' not in json.dumps(theirs.config), name
        ours = ds_config.render(ds_config.load(name, FOLDER), {}, values(nvme_path="/local_nvme"))
        for section in ("bf16", "fp16", "zero_optimization"):
            for key, value in theirs.config[section].items():
                if not key.startswith("offload_"):
                    assert ours[section][key] == value, (name, key)
        for key in ("train_batch_size", "gradient_accumulation_steps", "gradient_clipping"):
            assert ours[key] == theirs.config[key], (name, key)


def test_precedence_file_overrides_run() -> None:
    raw = zero(sub_group_size=7, stage3_max_live_parameters=5, reduce_bucket_size="auto")
    raw["gradient_clipping"] = "auto"
    overrides = {"zero_optimization": {"sub_group_size": 9, "reduce_bucket_size": 1e6}, "dump_state": True}
    rendered = ds_config.render(raw, overrides, VALUES)
    assert rendered["zero_optimization"]["sub_group_size"] == 9
    assert rendered["zero_optimization"]["stage3_max_live_parameters"] == 5
    assert rendered["zero_optimization"]["reduce_bucket_size"] == 1_000_000
    assert isinstance(rendered["zero_optimization"]["reduce_bucket_size"], int)
    assert rendered["dump_state"] is True
    assert rendered["gradient_clipping"] == 0.5
    assert raw["zero_optimization"]["sub_group_size"] == 7, "the input must not change"


def test_null_deletes_and_device_none_is_absent() -> None:
    raw = ds_config.load("zero3_offload", FOLDER)
    rendered = ds_config.render(raw, {"zero_optimization": {"offload_param": None}}, VALUES)
    assert ds_config.param_offload_device(rendered) is None
    assert "offload_param" not in rendered["zero_optimization"]
    rendered = ds_config.render(raw, {"zero_optimization": {"offload_param": {"device": "none"}}}, VALUES)
    assert "offload_param" not in rendered["zero_optimization"]


def test_a_bare_file_becomes_complete_and_explicit() -> None:
    rendered = ds_config.render(ZERO3, {}, VALUES)
    for key, value in {
        "gradient_clipping": 0.5,
        "gradient_accumulation_steps": 4,
        "zero_allow_untested_optimizer": False,
        "zero_force_ds_cpu_optimizer": True,
        "wall_clock_breakdown": False,
        "prescale_gradients": False,
        "communication_data_type": "bf16",
        "steps_per_print": None,
        "data_types": {"grad_accum_dtype": "bf16"},
    }.items():
        assert rendered[key] == value, key
    assert rendered["bf16"]["check_grad_overflow"] is True
    assert set(ds_defaults.zero(3)) <= set(rendered["zero_optimization"])


def test_nothing_is_pinned_where_torch_cannot_pin() -> None:
    raw = ds_config.load("zero3_offload", FOLDER)
    rendered = ds_config.render(raw, {}, values(pin_memory_possible=False))
    for section in ("offload_optimizer", "offload_param"):
        assert rendered["zero_optimization"][section]["pin_memory"] is False
    rendered = ds_config.render(raw, {}, VALUES)
    assert rendered["zero_optimization"]["offload_param"]["pin_memory"] is True


def test_nvme_path_is_the_runs() -> None:
    raw = ds_config.load("zero3_nvme", FOLDER)
    inside = ds_config.render(raw, {}, VALUES)["zero_optimization"]
    assert {inside[s]["nvme_path"] for s in ("offload_optimizer", "offload_param")} == {"/scratch/swap"}
    found = problems(raw, nvme_path=None)
    assert len(found) == 2
    assert all("hardware.nvme_path" in line for line in found)


@pytest.mark.parametrize(
    ("micro", "batch", "ranks", "steps"), [(2, 32, 4, 4), (1, 1, 1, 1), (4, 16, 2, 2), (3, 12, 4, 1)]
)
def test_accumulation_is_derived(micro: int, batch: int, ranks: int, steps: int) -> None:
    run = values(micro_batch_size=micro, global_batch_size=batch, world_size=ranks)
    assert ds_config.gradient_accumulation(run) == steps


def test_accumulation_names_all_three_and_the_nearest() -> None:
    text = only_problem(ZERO3, micro_batch_size=4, global_batch_size=12, world_size=2)
    assert "train.global_batch_size=12" in text
    assert "train.micro_batch_size=4 x 2 ranks" in text
    assert "train.global_batch_size=8 or 16" in text
    shared = only_problem(ZERO3, micro_batch_size=4, global_batch_size=6, world_size=1, ranks_per_group=2)
    assert "train.micro_batch_size=4 x 1 group of 2 ranks" in shared
    assert "train.micro_batch_size=3 or 6" in text
    text = only_problem(ZERO3, micro_batch_size=8, global_batch_size=4, world_size=1)
    assert "use train.global_batch_size=8, or train.micro_batch_size=4" in text


@pytest.mark.parametrize(
    ("raw", "overrides", "words"),
    [
        ({**ZERO3, "train_batch_size": 64}, {}, ("train_batch_size=64", "train.global_batch_size=32")),
        ({**ZERO3, "train_micro_batch_size_per_gpu": 1}, {}, ("=1", "train.micro_batch_size=2")),
        ({**ZERO3, "gradient_accumulation_steps": 3}, {}, ("gradient_accumulation_steps=3", "=4")),
        (ZERO3, {"gradient_clipping": 1.0}, ("gradient_clipping=1.0", "optim.gradient_clipping=0.5")),
        (ZERO3, {"checkpoint": {"load_universal": True}}, ("checkpoint.load_universal=true", "reshard=auto")),
        ({**ZERO3, "bf16": {"enabled": False}}, {}, ("bf16.enabled=false", "train.precision=bf16")),
        ({**ZERO3, "fp16": {"enabled": True}}, {}, ("fp16.enabled=true", "train.precision=bf16")),
        (
            {**ZERO3, "fp16": {"enabled": True}, "bf16": {"enabled": True}},
            {},
            ("bf16.enabled=true and fp16.enabled=true",),
        ),
        ({**ZERO3, "gradient_clip1ng": 0.5}, {}, ("gradient_clip1ng", "did you mean gradient_clipping?")),
        (zero(sub_groupsize=1), {}, ("zero_optimization.sub_groupsize", "did you mean sub_group_size?")),
        ({**ZERO3, "bf16": {"enable": True}}, {}, ("bf16.enable is", "did you mean enabled?")),
        (
            zero(offload_optimizer={"device": "cpu", "pin_memroy": True}),
            {},
            ("offload_optimizer.pin_memroy", "did you mean pin_memory?"),
        ),
        ({**ZERO3, "optimizer": {"type": "Adam"}}, {}, ("optimizer", "optim=...")),
        ({**ZERO3, "scheduler": {}}, {}, ("scheduler", "optim.schedule")),
        (
            {**ZERO3, "activation_checkpointing": {}},
            {},
            ("activation_checkpointing", "checkpointing=deepspeed"),
        ),
        ({**ZERO3, "elasticity": {}}, {}, ("elasticity", "removed")),
        ({**ZERO3, "tensor_parallel": {}}, {}, ("tensor_parallel", "train.tensor_parallel_size")),
        ({"zero_optimization": {"stage": 4}}, {}, ("zero_optimization.stage=4", "0, 1, 2 or 3")),
        ({"zero_optimization": {"stage": "auto"}}, {}, ("zero_optimization.stage=auto",)),
        ({"zero_optimization": {}}, {}, ("zero_optimization.stage=null",)),
        ({}, {}, ("zero_optimization.stage=null",)),
        (
            {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
            {},
            ("offload_param.device=cpu needs ZeRO stage 3", "stage=2"),
        ),
        (
            {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}},
            {},
            ("offload_optimizer.device=cpu needs ZeRO stage 1", "stage=0"),
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}},
            {},
            ("offload_optimizer.device=nvme needs ZeRO stage 3",),
        ),
        (zero(offload_param={"device": "gpu"}), {}, ("offload_param.device=gpu", "none, cpu, nvme")),
        (zero(offload_param={}), {}, ("offload_param.device=null",)),
        (zero(offload_param="cpu"), {}, ("offload_param=cpu", "object")),
        ({**ZERO3, "bf16": True}, {}, ("bf16=true", "object")),
        ({**ZERO3, "data_types": "bf16"}, {}, ("data_types=bf16", "object")),
        (zero(stage3_max_live_parameters="auto"), {}, ("zero_optimization.stage3_max_live_parameters=",)),
        ({**ZERO3, "flops_profiler": {"enabled": "auto"}}, {}, ('flops_profiler.enabled="auto"',)),
        (zero(overlap_comm="yes"), {}, ("zero_optimization.overlap_comm=yes", "true or false")),
        (zero(sub_group_size=-1), {}, ("zero_optimization.sub_group_size=-1", "whole number")),
        (zero(reduce_bucket_size=0.5), {}, ("zero_optimization.reduce_bucket_size=0.5", "whole number")),
        (zero(cpu_offload=True), {}, ("cpu_offload", "offload_optimizer")),
        (zero(round_robin_gradients=True), {}, ("stage=3 does not read round_robin_gradients", "lower stage")),
        (
            {"zero_optimization": {"stage": 2, "sub_group_size": 5, "stage3_max_reuse_distance": 5}},
            {},
            ("does not read sub_group_size, stage3_max_reuse_distance", "stage 3"),
        ),
        ({**ZERO3, "managed_gradient_accumulation": False}, {}, ("managed_gradient_accumulation=false",)),
        (
            {**ZERO3, "torch_autocast": {"enabled": True}},
            {},
            ("torch_autocast.enabled=true", "train.precision"),
        ),
        ({**ZERO3, "communication_data_type": "bfloat16"}, {}, ("communication_data_type=bfloat16", "bf16")),
        ({**ZERO3, "data_types": {"param_dtype": "fp32"}}, {}, ("param_dtype=fp32", "train.precision=bf16")),
        (
            {"zero_optimization": {"stage": 0}, "data_types": {"grad_accum_dtype": "fp32"}},
            {},
            ("grad_accum_dtype=fp32", "stage 1"),
        ),
        ({**ZERO3, "prescale_gradients": True}, {}, ("prescale_gradients=true", "reduce_scatter")),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
            {},
            ("ratio=0.5 needs ZeRO stage 3",),
        ),
        (
            zero(offload_optimizer={"device": "nvme", "buffer_count": 3}),
            {},
            ("buffer_count=3", "at least 4"),
        ),
    ],
)
def test_each_rule_is_one_line_with_key_value_and_remedy(
    raw: dict[str, Any], overrides: dict[str, Any], words: tuple[str, ...]
) -> None:
    text = only_problem(raw, overrides)
    for word in words:
        assert word in text


def test_parameter_buffers_must_hold_the_largest_shard() -> None:
    raw = ds_config.load("zero3_nvme", FOLDER)
    rendered = ds_config.render(raw, {}, values(largest_param=4 * 200_000_000 + 1))
    assert rendered["zero_optimization"]["offload_param"]["buffer_size"] == 200_000_001
    raw["zero_optimization"]["offload_param"]["buffer_size"] = 200_000_000
    ds_config.render(raw, {}, values(largest_param=4 * 200_000_000))
    text = only_problem(raw, largest_param=4 * 200_000_000 + 1)
    assert "buffer_size=200000000" in text
    assert "overrides.zero_optimization.offload_param.buffer_size=200000001" in text


def test_ranks_that_share_a_sequence_have_shards_of_their_own() -> None:
    raw = ds_config.load("zero3_nvme", FOLDER)
    groups = {"world_size": 2, "ranks_per_group": 4, "largest_param": 8 * 200_000_000 + 1}
    rendered = ds_config.render(raw, {}, values(**groups))
    assert rendered["zero_optimization"]["offload_param"]["buffer_size"] == 200_000_001
    raw["zero_optimization"]["offload_param"]["buffer_size"] = 200_000_000
    assert "200000001 elements on each of 8 ranks" in only_problem(raw, **groups)


@pytest.mark.parametrize(
    "key", ["bf16", "timers", "checkpoint", "steps_per_print", "zero_optimization.sub_group_size"]
)
def test_null_in_the_file_is_a_key_that_is_not_there(key: str) -> None:
    """As in an override."""
    section, _, inside = key.rpartition(".")
    raw: dict[str, Any] = copy.deepcopy(ZERO3)
    (raw[section] if section else raw)[inside] = None
    assert ds_config.render(raw, {}, VALUES) == ds_config.render(ZERO3, {}, VALUES)


def test_all_problems_at_once() -> None:
    raw = {"zero_optimization": {"stage": 3, "typo": 1}, "optimizer": {}, "gradient_clipping": 9}
    found = problems(raw, global_batch_size=33)
    assert len(found) == 4
    for word in ("zero_optimization.typo", "optimizer", "gradient_clipping=9", "global_batch_size=33"):
        assert word in "\n".join(found)


@pytest.mark.parametrize("precision", list(Precision))
def test_literals_that_agree_with_the_run_are_fine(precision: Precision) -> None:
    raw = {
        **ZERO3,
        "train_batch_size": 32,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": precision is Precision.bf16},
        "data_types": {"keep_in_fp32_modules": "auto", "grad_accum_dtype": "fp32"},
    }
    rendered = ds_config.render(raw, {}, values(precision=precision))
    assert rendered["data_types"] == {"keep_in_fp32_modules": "auto", "grad_accum_dtype": "fp32"}


def test_load_by_name_and_by_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text('{"zero_optimization": {"stage": 1}}')
    assert ds_config.load(str(path), FOLDER) == {"zero_optimization": {"stage": 1}}
    assert ds_config.load("mine", tmp_path) == {"zero_optimization": {"stage": 1}}
    with pytest.raises(
        ConfigError, match=r"deepspeed.config=zero3_ofload: .*did you mean zero3_offload\?.*zero1"
    ):
        ds_config.load("zero3_ofload", FOLDER)
    with pytest.raises(ConfigError, match=r"absent\.json: no such file"):
        ds_config.load(str(tmp_path / "absent.json"), FOLDER)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1,\n "b": }', ("line 2", "invalid JSON")),
        ('{"a": {"b": 1, "b": 2}}', ("written twice", "b")),
        ("[1]", ("one JSON object", "list")),
    ],
)
def test_load_explains_a_bad_file(text: str, words: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        ds_config.load(str(path), FOLDER)
    for word in (str(path), *words):
        assert word in str(error.value)


def test_helpers_on_a_dict_without_zero() -> None:
    assert ds_config.zero_stage({}) == 0
    assert ds_config.optimizer_offload_device({}) is None
    assert ds_config.param_offload_device({"zero_optimization": {"offload_param": {"device": "none"}}}) is None


def test_a_key_that_every_saved_state_would_hold_is_refused_without_its_value() -> None:
    found = only_problem(
        json.loads((Path(__file__).parents[2] / "ds_configs/zero2.json").read_text()),
        {"comet": {"api_key": "abc123"}},
    )
    assert found.startswith("comet.api_key is refused")
    assert "environment" in found
    assert "abc123" not in found
