"""LoRA adapters for the tiny model, made without training: random ones change every answer, enough for many tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def adapter(base: Path, folder: Path, *, seed: int, rank: int = 8, config: dict[str, Any] | None = None) -> Path:
    """A random adapter of the model in `base`, written to `folder`; `config` overwrites entries of its config file."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", init_lora_weights=False)
    made: Any = get_peft_model(model, lora)
    made.save_pretrained(folder)
    if config:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder
