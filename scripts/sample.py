"""Generate text from an exported model with plain transformers: `python scripts/sample.py EXPORT_DIR "PROMPT"`."""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, prompt = sys.argv[1], sys.argv[2]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
torch.manual_seed(0)
ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
out = model.generate(
    ids,
    attention_mask=torch.ones_like(ids),
    max_new_tokens=200,
    do_sample=True,
    temperature=0.7,
    pad_token_id=tokenizer.pad_token_id,
)
print(tokenizer.decode(out[0], skip_special_tokens=True))
