"""The training loop: TRL's SFTTrainer with PEFT's LoRA, checks on the way, the best weights kept in memory.

Belongs here: the model, its trainer, what happens after each step. Does not belong here: jobs and files (train.py) and
when to stop or what to keep (rules/recipe.py). Importing this module imports torch; only children do.

Checked weights are kept in memory, not as checkpoints: an adapter is small, and a killed training leaves nothing.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import SFTConfig, SFTTrainer

from loop_dagster.errors import TrainingDiverged
from loop_dagster.models import fast
from loop_dagster.models.child import Reporter
from loop_dagster.models.probe import Precision
from loop_dagster.models.template import IGNORED, Encoded
from loop_dagster.models.train import CurvePoint, Rows, TrainJob, planned_steps
from loop_dagster.rules.recipe import kept_step, out_of_patience

#: Points that the curve gets from training, beside the checks.
_LOGGED_POINTS = 150
#: A check at most every hundredth of the training, so that all of them fit the curve.
_MOST_CHECKS = 100
#: Share of the free memory that one step's activations may take.
_MEMORY_SHARE = 0.6


class Loop:
    """One training from loaded base to kept weights. After `run`, `model` holds the kept weights."""

    def __init__(self, job: TrainJob, rows: Rows, precision: Precision, reporter: Reporter) -> None:
        self.job, self.rows, self.precision, self.reporter = job, rows, precision, reporter
        self.planned_steps = planned_steps(len(rows.train), job.batch_size, job.epochs)
        self.check_every = max(job.check_every, math.ceil(self.planned_steps / _MOST_CHECKS))
        self.trained_steps = self.kept_step = 0
        self.tokens = 0
        self.checks: list[tuple[int, float]] = []
        self.logged: dict[int, float] = {}
        self.is_main = int(os.environ.get("RANK", "0")) == 0
        self._best: dict[str, torch.Tensor] = {}
        self.dtype = getattr(torch, precision.dtype)
        torch.manual_seed(job.seed)  # the adapter's first weights
        self.model = self._load()
        self.processes = int(os.environ.get("WORLD_SIZE", "1"))
        self.packed = self._packs()
        self.trainer = self._trainer()

    def run(self) -> None:
        """Train; raises Stopped, TrainingDiverged. Ends with the kept weights in `model`."""
        self._started = time.monotonic()
        self.trainer.train()
        self.trained_steps = int(self.trainer.state.global_step)
        self.tokens = self.trainer.tokens
        self.kept_step = kept_step(self.checks, keep=self.job.keep, last_step=self.trained_steps)
        if self.kept_step != self.trained_steps:
            self._restore()
        self._refuse_nonsense()
        fast.unfuse(self.model)

    def curve(self) -> list[CurvePoint]:
        """Every logged and checked step, in order."""
        checked = dict(self.checks)
        return [
            CurvePoint(step=step, train_loss=_finite(self.logged.get(step)), check_loss=_finite(checked.get(step)))
            for step in sorted(self.logged.keys() | checked.keys())
        ]

    def after_step(self, step: int) -> bool:
        """What happens between two steps; True to go on, False when patience has run out."""
        self.reporter.check()
        self._report(step)
        # The last step is checked too: what the final steps learned must be able to win.
        due = step % self.check_every == 0 or step == self.planned_steps
        if not self.rows.check or not due:
            return True
        self.checks.append((step, self.check_loss()))
        if self.job.keep == "best" and kept_step(self.checks, keep="best", last_step=step) == step:
            self._best = {name: value.detach().clone() for name, value in self._trained().items()}
        self._report(step, force=True)
        losses = [loss for _, loss in self.checks]
        return self.job.keep == "last" or not out_of_patience(losses, patience=self.job.patience)

    def check_loss(self) -> float:
        """Mean loss per answer token over the check rows, all of them in equal weight per token."""
        total, count = 0.0, 0
        self.model.eval()
        with torch.no_grad():
            for batch in self._check_batches:
                self.reporter.check()
                loss, tokens = self.trainer.loss_and_tokens(batch)
                total, count = total + loss, count + tokens
        self.model.train()
        return round(total / max(1, count), 6)

    def _load(self) -> Any:
        model = AutoModelForCausalLM.from_pretrained(self.job.base_path, dtype=self.dtype, local_files_only=True)
        model.config.use_cache = False
        adapter = LoraConfig(
            r=self.job.lora_rank,
            lora_alpha=self.job.lora_alpha,
            lora_dropout=0.0,
            bias="none",
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
        return get_peft_model(model, adapter)

    def _packs(self) -> bool:
        """Take the fast computation where it is there and proven for this model."""
        if self.precision.device != "cpu" or self.processes > 1 or not self.job.pack:
            return False
        plain = self.model.get_base_model()
        usual = plain.config._attn_implementation
        if self.precision.dtype == "bfloat16" and self._longest() <= fast.PACK_TOKENS:
            # In bfloat16, torch's CPU kernel for attention takes several times as long backwards as plain products do;
            # those keep all weights of attention, which only short sequences can afford.
            plain.set_attn_implementation("eager")
        if fast.speed_up(self.model, self._probe_rows(), self.precision.dtype):
            return True
        plain.set_attn_implementation(usual)
        return False

    def _longest(self) -> int:
        return max(row.tokens for row in self.rows.train)

    def _probe_rows(self) -> list[Encoded]:
        """A few rows, the shorter ones, to prove the packed computation on; two at least, or packing proves nothing."""
        some = sorted(self.rows.train[:64], key=lambda row: row.tokens)[:4]
        return some if len(some) > 1 else some * 2

    def _trainer(self) -> _Trainer:
        job = self.job
        micro, checkpointing = self._memory_plan()
        on_cpu = self.precision.device == "cpu"
        config = SFTConfig(
            output_dir=job.work_dir,
            num_train_epochs=job.epochs,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=max(1, job.batch_size // (micro * self.processes)),
            learning_rate=job.learning_rate,
            lr_scheduler_type="linear",
            warmup_steps=job.warmup_steps,
            optim="adamw_torch_fused",
            use_cpu=on_cpu,
            # Packed layers compute in the base's precision by themselves.
            bf16=self.precision.dtype == "bfloat16" and not self.packed,
            gradient_checkpointing=checkpointing,
            # Without padding there is nothing to gain from equal lengths, and an order by chance learns better.
            train_sampling_strategy="random" if self.packed else "group_by_length",
            max_length=None,
            dataset_kwargs={"skip_prepare_dataset": True},
            remove_unused_columns=False,
            seed=job.seed,
            logging_strategy="steps",
            logging_steps=math.ceil(self.planned_steps / _LOGGED_POINTS),
            logging_nan_inf_filter=False,
            save_strategy="no",
            eval_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_num_workers=0,
            dataloader_pin_memory=not on_cpu,
        )
        tokenizer = AutoTokenizer.from_pretrained(job.base_path, local_files_only=True)
        collate = _Collator(self.rows.train, self.dtype if self.packed else None)
        lengths = [row.tokens for row in self.rows.train]
        trainer = _Trainer(
            model=self.model,
            args=config,
            train_dataset=Dataset.from_dict({"row": list(range(len(lengths))), "length": lengths}),
            data_collator=collate,
            processing_class=tokenizer,
            callbacks=[_AfterStep(self)],
        )
        trainer.remove_callback(PrinterCallback)
        collate.pad_id = int(tokenizer.pad_token_id or 0)
        self._check_batches = _check_batches(self.rows.check, micro, collate)
        return trainer

    def _memory_plan(self) -> tuple[int, bool]:
        """(rows at once on one device, gradient checkpointing): neither is given up while a step fits the free memory.

        Packed rows go through one sequence at a time whatever the batch, so only the longest sequence counts.
        """
        text = self.model.config.get_text_config()
        longest = self._longest()
        free = _free_bytes(self.precision.device) * _MEMORY_SHARE
        size = 2 if self.precision.dtype == "bfloat16" else 4
        per_layer = size * (14 * text.hidden_size + 7 * getattr(text, "intermediate_size", 4 * text.hidden_size))
        if self.packed:  # the weights of attention, should they be kept: a row of each head for every token
            per_layer += 3 * size * text.num_attention_heads * fast.PACK_TOKENS
        head = 10 * text.vocab_size  # logits in the base's precision and float32, and their gradient

        def needed(rows: int, layers: int) -> float:
            at_once = max(longest, fast.PACK_TOKENS) if self.packed else rows * longest
            return float(at_once * (per_layer * layers + text.hidden_size * size * text.num_hidden_layers + head))

        rows = max(1, self.job.batch_size // self.processes)
        if needed(rows, text.num_hidden_layers) <= free:
            return rows, False
        while not self.packed and rows > 1 and rows % 2 == 0 and needed(rows, 2) > free:
            rows //= 2
        self.reporter.say(f"gradient checkpointing, {rows} rows at once: a whole step would not fit the free memory")
        return rows, True

    def _report(self, step: int, *, force: bool = False) -> None:
        if not self.is_main:
            return
        seconds = time.monotonic() - self._started
        rate = step / seconds if seconds > 0 else 0.0
        self.reporter.report(
            step,
            self.planned_steps,
            force=force,
            loss=next(reversed(self.logged.values()), None),
            check_loss=self.checks[-1][1] if self.checks else None,
            rows_per_s=round(rate * self.job.batch_size, 2),
            eta_s=round((self.planned_steps - step) / rate, 1) if rate else None,
        )

    def _trained(self) -> dict[str, torch.Tensor]:
        return {name: value for name, value in self.model.named_parameters() if value.requires_grad}

    def _restore(self) -> None:
        with torch.no_grad():
            for name, value in self._trained().items():
                value.copy_(self._best[name])

    def _refuse_nonsense(self) -> None:
        if not all(bool(torch.isfinite(value).all()) for value in self._trained().values()):
            raise TrainingDiverged(self.trained_steps, self.job.learning_rate)


class _Collator:
    """Rows by number to a batch: packed sequences in `dtype`, or padded by length where `dtype` is None.

    Padding is by length and its labels are IGNORED: an end token that doubles as the padding token keeps its label.
    """

    def __init__(self, rows: Sequence[Encoded], dtype: torch.dtype | None) -> None:
        self._rows = rows
        self._dtype = dtype
        self.pad_id = 0

    def __call__(self, examples: Sequence[dict[str, int]]) -> dict[str, Any]:
        return self.batch([self._rows[example["row"]] for example in examples])

    def batch(self, rows: Sequence[Encoded]) -> dict[str, Any]:
        tokens = sum(row.tokens for row in rows)
        if self._dtype is not None:
            return {"packs": [fast.pack(group, self._dtype) for group in fast.split(rows)], "tokens": tokens}
        longest = max(row.tokens for row in rows)
        ids = torch.full((len(rows), longest), self.pad_id)
        mask = torch.zeros_like(ids)
        labels = torch.full_like(ids, IGNORED)
        for i, row in enumerate(rows):
            ids[i, : row.tokens] = torch.tensor(row.input_ids)
            labels[i, : row.tokens] = torch.tensor(row.labels)
            mask[i, : row.tokens] = 1
        return {"input_ids": ids, "attention_mask": mask, "labels": labels, "tokens": tokens}


def _check_batches(rows: Sequence[Encoded], micro: int, collate: _Collator) -> list[dict[str, Any]]:
    if not rows:
        return []
    ordered = sorted(rows, key=lambda row: row.tokens)
    # Without gradients four times the rows take no more memory.
    size = max(8, 4 * micro)
    return [collate.batch(ordered[i : i + size]) for i in range(0, len(ordered), size)]


class _Trainer(SFTTrainer):  # type: ignore[misc]  # trl is not followed by the type checker
    """SFTTrainer that also takes packed batches, one backward pass per sequence."""

    tokens = 0

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        self.tokens += int(inputs.pop("tokens"))
        if "packs" not in inputs:
            loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
            return loss
        model.train()
        count = sum(len(pack["targets"]) for pack in inputs["packs"])
        total = torch.zeros(())
        for pack in inputs["packs"]:
            part = fast.loss_sum(model, pack) / count
            self.accelerator.backward(part)
            total += part.detach()
        return total

    def loss_and_tokens(self, batch: dict[str, Any]) -> tuple[float, int]:
        """Sum of the loss over a batch's labels, and how many there are; call it without gradients."""
        if "packs" in batch:
            return (
                sum(fast.loss_sum(self.model, pack).item() for pack in batch["packs"]),
                sum(len(pack["targets"]) for pack in batch["packs"]),
            )
        inputs = self._prepare_inputs({name: value for name, value in batch.items() if name != "tokens"})
        count = int((inputs["labels"][:, 1:] != IGNORED).sum())
        with self.compute_loss_context_manager():
            mean = self.compute_loss(self.model, inputs)
        return float(mean) * count, count

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        return 0  # an estimate for packed batches would be wrong, and nobody reads it


class _AfterStep(TrainerCallback):  # type: ignore[misc]  # transformers is not followed by the type checker
    """Hands each step to the loop."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self._loop.after_step(int(state.global_step)):
            control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self._loop.logged[int(state.global_step)] = float(logs["loss"])


def _finite(value: float | None) -> float | None:
    return round(value, 6) if value is not None and math.isfinite(value) else None


def _free_bytes(device: str) -> float:
    if device == "cuda":
        return float(torch.cuda.mem_get_info()[0])
    free = psutil.virtual_memory().available
    limit = _container_limit()
    return float(min(free, limit - psutil.Process().memory_info().rss) if limit else free)


def _container_limit() -> int | None:
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            text = (Path("/sys/fs/cgroup") / name).read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < 2**60:
            return int(text)
    return None
