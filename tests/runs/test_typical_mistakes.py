"""What users of other trainers type by mistake: exit code 2, one message with the right hint, nothing left behind.

All ranks are forks of one process: the cases are data, and one launch runs them (tests/support/mistakes.py).
"""

from __future__ import annotations

import gzip
import io
import json
import shutil
import tarfile
from pathlib import Path
from typing import NamedTuple

import pytest

from remat.data.tokenizer import byte_tokenizer
from tests.support import tiny
from tests.support.grids import chosen
from tests.support.launcher import deepspeed

pytestmark = pytest.mark.launch

OPTIONS = {  # of recipe=finetune with a model and data: what is typed, and what is told
    "learning_rate=2e-5": "did you mean optim.lr?",
    "per_device_train_batch_size=4": "did you mean train.micro_batch_size",
    "gradient_accumulation_steps=8": "train.global_batch_size: accumulation is derived",
    "num_train_epochs=3": "did you mean train.epochs?",
    "bf16=true": "did you mean train.precision=bf16?",
    "bf16.enabled=true": "did you mean train.precision=bf16?",
    "fsdp=full_shard": "did you mean deepspeed.config=zero2, zero3",
    "deepspeed=ds.json": "write deepspeed.config=ds.json",
    "load_in_4bit=true": "did you mean peft=qlora?",
    "adapter=lora": "did you mean peft=lora?",
    "lora_r=16": "did you mean peft=lora peft.r?",
    "lora_target_linear=true": "did you mean peft=lora, beside every linear layer",
    "warmup_ratio=0.03": "did you mean optim.warmup_steps (a number of steps)?",
    "gradient_checkpointing=true": "did you mean checkpointing=full",
    "enable_activation_offloading=true": "did you mean checkpointing=offload?",
    "report_to=wandb": "did you mean tracking=wandb_online",
    "metric_logger._component_=x": "did you mean tracking=wandb_online",
    "base_model=gpt2": "did you mean model=hf model.path?",
    "tokenizer.path=x": "did you mean model.tokenizer?",
    "cutoff_len=2048": "did you mean train.seq_len?",
    "val_set_size=0.1": "did you mean data.eval_fraction?",
    "dataset.packed=true": "did you mean data.packing?",
    "train_on_inputs=false": "did you mean data.train_on_roles=[assistant]",
    "template=llama3": "no such option: the tokenizer's own chat template is used",
    "stage=sft": "no such option: a run trains on next tokens",
    "do_train=true": "no such option: a launch always trains",
    "overwrite_output_dir=true": "a run has a folder of its own, output_dir/NAME/RUN_ID",
    "torch_compile=true": "did you mean compile=layers?",
    "dataloader_num_workers=4": "batches are prepared while the step before runs",
    "push_to_hub=true": "`remat push RUN_DIR/export OWNER/NAME`",
    "special_tokens.pad_token=x": "special tokens are the tokenizer's",
    "model.revision=main": "`hf download NAME --revision REVISION`",
    "local=X": "conf/local/default.yaml, or DIR/local/default.yaml with --config-dir DIR",
    "+experiment=x": "a recipe holds all that a run is, recipe=NAME",
    "-sc install=bash": "-sc install=bash is not an option here: `remat --install-completion`",
    "--learning_rate 2e-5": "did you mean optim.lr?",
    "--deepspeed ds.json": "deepspeed.config=ds.json",
    "--config-name x": "write recipe=NAME",
    "-m optim.lr=1e-5,2e-5": "remat compare optim.lr=1e-5,2e-5",
    "hydra.run.dir=x": "set output_dir=FOLDER",
    "config.yaml": "write --config-dir DIR recipe=config",
    "train": "train is a section: write train.OPTION=value",
    "data.path = x": "data.path = x: write data.path=x, without spaces",
    "train.steps= 3": "train.steps= 3: write train.steps=3, without spaces",
    "data.columns={prompt: question}": "write 'data.columns={prompt: question}'",
    "data.path=a.jsonl,b.jsonl": "a list is written data.path=[a.jsonl,b.jsonl]",
    "data.path=~/none.jsonl": "data.path=~/none.jsonl does not exist",
    "data.path=https://example.com/a.jsonl": "is an address: download it",
    "train.steps=ten": "ten is not a whole number: give one",
    "train.steps=1e3": "give a whole number, train.steps=1000",
    "train.steps=-1": "train.steps=-1 is too small: give at least 1",
    "train.steps=50,": "write train.steps=50, without the comma",
    "compile=true": "(did you mean layers?)",
    "\u2013num_gpus=2": "begins with a long dash, as text programs write it: write --num_gpus=2",
    "optim.lr=nan": "optim.lr=nan is no size: give at least 0",
    "optim.lr=2e5": "(did you mean 2e-5?)",
    "optim.warmup_steps=0.03": "0.03 is not a whole number: give one",
    "train.micro_batch_size=auto": "strategy=auto chooses it by the plan",
    "train.precision=bfloat16": "(did you mean bf16?)",
    "data.packing=true": "(did you mean documents?)",
    "data.format=openai": "(did you mean chat?)",
    "optim.schedule=cosine_with_restarts": "(did you mean cosine?)",
    "optim=adamw_torch": "did you mean optim.name=adamw?",
    "peft.target_modules=all-linear": "every linear layer is the default: leave it out",
    "checkpointing=true": "did you mean checkpointing=full?",
    "peft=dora": "did you mean peft=lora peft.dora=true?",
    "peft=LoRA": "did you mean lora?",
    "tracking=wandb": "did you mean tracking=wandb_online?",
    "tracking=none": "did you mean tracking=wandb_disabled?",
    "save=no": "did you mean save.every=0 save.at_end=false?",
    "model=meta-llama/Llama-3.1-8B": "did you mean model=hf model.path=meta-llama/Llama-3.1-8B?",
    "data=tatsu-lab/alpaca": "did you mean data=files data.path=tatsu-lab/alpaca?",
    "data=json": "did you mean data=files?",
    "hardware=rtx4090": "did you mean 1x4090 or 2x4090 or 4x4090 or 8x4090?",
    "hardware=8xA100": "did you mean 8xa100-40 or 8xa100-80?",
    "resume=last": "no such folder (did you mean resume=auto",
    "resume=auto": "no complete saved state in",
    "output_dir=/proc/nope": "output_dir=/proc/nope cannot be written",
    "train.tensor_parallel_size=3": "cannot be divided into groups of 3",
}
FILES = {  # the same with what a workshop holds, {} of its folder
    "data.path={}/dta.jsonl": "/dta.jsonl does not exist (there is ",
    "model.path=FOLDER_OR_HUB_NAME": "stands for your own: give a folder",
    "model.path={}/none": "does not exist: give a folder with config.json, or a hub name",
    "model.path={}/model/config.json": "is a file: give the folder that holds it",
    "model.path=https://huggingface.co/openai/gpt2": "write the hub name, model.path=openai/gpt2",
    "model.path={}/no_weights": "has no weights, model.safetensors or",
    "model.path={}/bin": "has weights in .bin files alone, which can run code",
    "model.path={}/gguf": "GGUF is not trained",
    "model.path={}/adapters": "these are adapters; give their base, or merge them",
    "model.path={}/broken_config": "config.json is not JSON",
    "model.path={}/other_config": "the weights are not those of the model that config.json",
    "model.path={}/no_tokenizer": "has no tokenizer (tokenizer.json",
    "model.path={}/no_template data.path={}/chats.jsonl": "chats need a chat template",
    "data.path={}/empty.jsonl": "holds no row: give a file with data",
    "data.path={}/no_data": "name a folder with data",
    "data.path={}/broken.jsonl.gz": "is damaged or incomplete",
    "data.path={}/archive.tar.gz": "is a tar archive: unpack it",
    "data.path={}/semicolons.csv": "has the fields question, answer",
    "data.path={}/columns.jsonl": "'data.columns={prompt: question, completion: answer}'",
    "data.path={}/preferences.jsonl": "'data.columns={prompt: prompt, completion: chosen}'",
    "data.path={}/wrapped.json": "The field data holds rows itself",
    "data.path={}/cut.json": "is not JSON from here on",
    "data.path={}/latin1.jsonl": "is not UTF-8 (byte 0xE9",
    "data=hub data.path={}/data.jsonl": "is a file on this machine, and data.source=hub: choose data=files",
    "data.eval_path={}/data.jsonl": "/data.jsonl is in data.path=",
    "data.chat_template={}/template.jinja": "is no Jinja template",
    "deepspeed.config={}/slip.json": "zero_optimization has stag (did you mean stag?)",
    "deepspeed.config={}/no.json": "no such file; give a path to a JSON file, or one of zero1,",
    "resume={}/model": "no complete saved state in",
    "output_dir={}/data.jsonl": "cannot be written",
}
OF_THEIR_OWN = {  # whole command lines
    "": "recipe=NAME is missing",
    "recipe=fine_tune": "did you mean finetune?",
    "recipe=recipes/finetune.yaml": "did you mean finetune?",
    "recipe=finetune": "model.path=FOLDER_OR_HUB_NAME",
    "--config-dir {}/own recipe=mine": "train.stepz: no such option (did you mean train.steps?)",
    "--config-dir {}/own recipe=unpacked": "begins with the line `# @package _global_`",
    "resume={}/no_data": "has no config.yaml; give the folder of a run",
}


class Ended(NamedTuple):
    """What became of a command line: exit code, what was shown and which files it left."""

    code: int
    shown: str
    left: list[str]


def make_workshop(place: Path) -> None:
    model = tiny.make_model(place / "model", max_position_embeddings=512)
    byte_tokenizer().save_pretrained(model)
    tiny.make_instructions(place / "data.jsonl")

    def copy(name: str, *but: str) -> Path:
        return Path(shutil.copytree(model, place / name, ignore=shutil.ignore_patterns(*but)))

    copy("no_weights", "*.safetensors")
    copy("bin", "*.safetensors").joinpath("pytorch_model.bin").write_bytes(b"")
    copy("no_tokenizer", "tokenizer*", "chat_template*")
    copy("no_template", "chat_template*")
    copy("broken_config").joinpath("config.json").write_text("{")
    config = json.loads((model / "config.json").read_text())
    copy("other_config").joinpath("config.json").write_text(json.dumps(config | {"hidden_size": 64}))
    for name, file in {"gguf": "model.gguf", "adapters": "adapter_config.json", "no_data": ".hidden"}.items():
        (place / name).mkdir()
        (place / name / file).write_text("{}")
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    rows = {
        "empty": "",
        "chats": json.dumps(chat),
        "columns": json.dumps({"question": "a", "answer": "b"}),
        "preferences": json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}),
    }
    for name, text in rows.items():
        (place / f"{name}.jsonl").write_text(text)
    (place / "latin1.jsonl").write_bytes(b'{"text": "caf\xe9"}')
    (place / "wrapped.json").write_text(json.dumps({"version": 1, "data": [{"text": "a"}]}))
    (place / "cut.json").write_text('[{"text": "a"}, {"te')
    (place / "semicolons.csv").write_text("question;answer\na, b;c\n")
    (place / "broken.jsonl.gz").write_bytes(gzip.compress((place / "data.jsonl").read_bytes())[:200])
    with tarfile.open(place / "archive.tar.gz", "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("rows.jsonl"), io.BytesIO())
    (place / "template.jinja").write_text("{{ messages")
    (place / "slip.json").write_text('{"zero_optimization": {"stag": 3}}')
    own = place / "own" / "recipe"
    own.mkdir(parents=True)
    (own / "mine.yaml").write_text("# @package _global_\ntrain:\n  stepz: 3\n")
    (own / "unpacked.yaml").write_text("train:\n  steps: 3\n")


def command_lines(place: Path) -> dict[str, list[str]]:
    good = [
        "recipe=finetune",
        f"model.path={place}/model",
        f"data.path={place}/data.jsonl",
        "train.seq_len=512",
    ]
    of_finetune = {line: [*good, *line.replace("{}", str(place)).split(" ")] for line in (*OPTIONS, *FILES)}
    return of_finetune | {line: line.replace("{}", str(place)).split() for line in OF_THEIR_OWN}


@pytest.fixture(scope="module")
def ended(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    place, folders = tmp_path_factory.mktemp("workshop"), tmp_path_factory.mktemp("started")
    make_workshop(place)
    before = files_in(place)
    asked = chosen(request, "line")
    lines = {line: words for line, words in command_lines(place).items() if line in asked}
    spec = [{"words": words, "folder": str(folders / str(n))} for n, words in enumerate(lines.values())]
    (folders / "spec.json").write_text(json.dumps(spec))
    done = deepspeed(str(folders / "spec.json"), script="tests/support/mistakes.py", ranks=1)
    assert done.code == 0, done.out[-4000:]
    assert files_in(place) == before
    codes = json.loads((folders / "spec.done.json").read_text())
    return {
        line: Ended(code, (folders / f"{n}.out").read_text(), files_in(folders / str(n)))
        for n, (line, code) in enumerate(zip(lines, codes, strict=True))
    }


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.sample(one_in=3)
@pytest.mark.parametrize(("line", "told"), [*OPTIONS.items(), *FILES.items(), *OF_THEIR_OWN.items()])
def test_a_mistake_is_one_message_with_the_right_hint(ended: dict[str, Ended], line: str, told: str) -> None:
    code, shown, left = ended[line]
    assert code == 2, shown[-2000:]
    assert shown.count("remat: ") == 1 and "Traceback" not in shown
    assert told in shown
    assert left == []
