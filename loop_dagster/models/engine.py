"""Engines: conversations in, answers out, from one base model with any number of adapters.

Belongs here: the protocol (free of HTTP, jobs and tables), the embedded `transformers` engine, and the factory.
Does not belong here: which questions are asked (`answer.py`), live traffic (`serve.py`), the chat template and how an
answer's text becomes a message (`template.py`).
"""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from loop_dagster.errors import AdapterLeaks, AdapterRefused, BadRequest
from loop_dagster.models.base import verify
from loop_dagster.models.child import cores
from loop_dagster.models.probe import Dtype, Precision, probe
from loop_dagster.models.template import Message, Row, RowRefusal, Template, Tools
from loop_dagster.models.train import check_adapter_config

#: How an answer ended: at an end token, at its token limit, not asked since the prompt is too long, without text or
#: tool call, or not at all (the template refuses the conversation, the machine has no room for it).
Finish = Literal["stop", "length", "too_long", "empty", "error"]

#: Most conversations, and most tokens of prompts and answers together, that are worked on at once.
BATCH_ROWS = {"cpu": 64, "cuda": 256}
BATCH_TOKENS = {"cpu": 32_768, "cuda": 524_288}
#: Share of the free memory that keys and values of a batch may take; the rest is for activations and other processes.
CACHE_SHARE = {"cpu": 0.3, "cuda": 0.6}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One conversation to answer. `temperature` 0 takes the likeliest token each time; `max_new_tokens` bounds it."""

    key: str
    messages: Sequence[Message]
    tools: Tools | None = None
    max_new_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back. `message` is an assistant message (content, tool_calls), null unless finish is stop or length.

    `answer_tokens` counts the generated tokens without the end token.
    """

    key: str
    message: dict[str, Any] | None
    finish: Finish
    prompt_tokens: int
    answer_tokens: int


class Engine(Protocol):
    """One loaded base that answers with adapters on top, or without. For one thread at a time.

    Adapters are named by their digest. Several at once add up, oldest first, as if each were merged into what is below.
    """

    @property
    def name(self) -> str: ...

    @property
    def base_digest(self) -> str: ...

    @property
    def adapters(self) -> frozenset[str]:
        """Names of the adapters that are loaded."""

    def load_adapter(self, name: str, path: Path, *, base_digest: str) -> None:
        """Load an adapter that was trained on `base_digest`. Raises BaseChanged, AdapterRefused, AdapterLeaks."""

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; one that is not loaded is nothing to do."""

    def answer(
        self,
        requests: Sequence[Request],
        *,
        adapters: Sequence[str] = (),
        max_length: int | None = None,
        on_answer: Callable[[Answer], None] | None = None,
        on_token: Callable[[str, int], None] | None = None,
        check: Callable[[], None] | None = None,
    ) -> list[Answer]:
        """Answers in the order of the requests.

        A prompt of more than `max_length` tokens, or one that leaves the model no room for an answer, is not asked.
        `on_answer` gets each answer as soon as it is whole, in any order; `on_token` gets (key, token id) as tokens
        come; `check` is called between steps and ends the work by raising.
        """

    def close(self) -> None:
        """Give the memory back."""


def open_engine(
    name: str = "transformers",
    *,
    base: Path,
    base_digest: str,
    precision: Precision | None = None,
    dtype: Dtype | None = None,
) -> Engine:
    """Load a base model into the engine called `name`; there is `transformers`.

    The base's digest is verified first (BaseChanged): an adapter loads onto a wrong base without any error. `precision`
    is what the probe says unless given; `dtype` replaces its type alone.
    """
    if name != "transformers":
        raise BadRequest(f"There is no engine called {name!r}; there is: transformers.")
    found = precision or probe()
    return TransformersEngine(base, base_digest, Precision(dtype or found.dtype, found.device, found.why))


@dataclass(slots=True)
class _Asked:
    """A request on its way: its prompt's ids, how many tokens it may still get, and those it got."""

    request: Request
    ids: list[int]
    allowed: int
    got: list[int] = field(default_factory=list)
    stopped: bool = False
    generator: Any = None


class TransformersEngine:
    """The embedded engine: a transformers model, PEFT adapters, batches sorted by length, a key-value cache.

    In float32 a batch gives the answers that one conversation at a time gives. In bfloat16 the kernels round
    differently for other batch shapes, so a near tie between two tokens may fall the other way.
    """

    name = "transformers"

    def __init__(self, base: Path, base_digest: str, precision: Precision) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        verify(base, base_digest)
        self._path, self.base_digest, self.precision = base, base_digest, precision
        self.template = Template.load(base)
        if precision.device == "cpu":
            torch.set_num_threads(cores())
        model = AutoModelForCausalLM.from_pretrained(base, dtype=getattr(torch, precision.dtype), local_files_only=True)
        # Asked directly, also with adapters: PEFT puts them into its layers, and its own wrapper looks up an adapter
        # that it calls active even when that one is unloaded.
        self._model: Any = model.to(precision.device).eval().requires_grad_(False)
        self._peft: Any = None
        self._config: Any = model.config.get_text_config()
        self._limit = int(getattr(self._config, "max_position_embeddings", None) or 2_048)
        self._stops = torch.tensor(self.template.stop_ids, device=precision.device)
        self._adapters: set[str] = set()
        self._base_logits = self._probe_logits()

    @property
    def adapters(self) -> frozenset[str]:
        return frozenset(self._adapters)

    def load_adapter(self, name: str, path: Path, *, base_digest: str) -> None:
        """See `Engine`. Also proves that with all adapters off the logits are still the base's, to the last bit."""
        import torch
        from peft import PeftModel

        if name in self._adapters:
            return
        verify(self._path, self.base_digest)
        _check_adapter(path)
        if base_digest != self.base_digest:
            raise AdapterRefused(f"been trained on base {base_digest[:16]}", f"base {self.base_digest[:16]}")
        if self._peft is None:
            self._peft = PeftModel.from_pretrained(self._model, str(path), adapter_name=name, is_trainable=False)
        else:
            self._peft.load_adapter(str(path), name, is_trainable=False)
        self._model.eval()
        self._adapters.add(name)
        try:
            self._check_weights(name, path)
            off = self._probe_logits()
            if not torch.equal(off, self._base_logits):
                raise AdapterLeaks(self._path.name, float((off - self._base_logits).abs().max()))
        except BaseException:
            self.unload_adapter(name)
            raise

    def unload_adapter(self, name: str) -> None:
        """See `Engine`."""
        if name in self._adapters:
            self._adapters.discard(name)
            if self._adapters:
                self._peft.delete_adapter(name)
            else:
                self._model, self._peft = self._peft.unload(), None

    def answer(
        self,
        requests: Sequence[Request],
        *,
        adapters: Sequence[str] = (),
        max_length: int | None = None,
        on_answer: Callable[[Answer], None] | None = None,
        on_token: Callable[[str, int], None] | None = None,
        check: Callable[[], None] | None = None,
    ) -> list[Answer]:
        """See `Engine`."""
        import torch

        answers: dict[int, Answer] = {}

        def done(place: int, answer: Answer) -> None:
            answers[place] = answer
            if on_answer:
                on_answer(answer)

        asked: dict[int, _Asked] = {}
        for place, prepared in enumerate(self._prepare(requests, min(max_length or self._limit, self._limit))):
            if isinstance(prepared, Answer):
                done(place, prepared)
            else:
                asked[place] = prepared
        # The longest first: what does not fit shows at once.
        order = sorted(asked, key=lambda place: (-len(asked[place].ids), place))
        with torch.inference_mode(), self._with(adapters):
            for batch in self._batches(order, asked):
                self._run({place: asked[place] for place in batch}, done, on_token, check or (lambda: None))
        return [answers[place] for place in range(len(requests))]

    def close(self) -> None:
        """See `Engine`."""
        self._model = self._peft = self._base_logits = None
        self._adapters.clear()
        self._free()

    def _free(self) -> None:
        import torch

        if self.precision.device == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    # --- what is asked ---

    def _prepare(self, requests: Sequence[Request], limit: int) -> Iterator[_Asked | Answer]:
        rows = [Row(key=request.key, messages=request.messages, tools=request.tools) for request in requests]
        for request, prompt in zip(requests, self.template.prompts(rows), strict=True):
            if isinstance(prompt, RowRefusal):
                yield Answer(request.key, None, "error", 0, 0)
            elif len(prompt) > limit or len(prompt) >= self._limit:
                yield Answer(request.key, None, "too_long", len(prompt), 0)
            else:
                yield _Asked(request, prompt, min(request.max_new_tokens, self._limit - len(prompt)))

    def _batches(self, order: Sequence[int], asked: Mapping[int, _Asked]) -> Iterator[list[int]]:
        most_rows, most_tokens = BATCH_ROWS[self.precision.device], self._room()
        batch: list[int] = []
        widest = 0
        for place in order:
            width = max(widest, len(asked[place].ids) + asked[place].allowed)
            if batch and (len(batch) >= most_rows or width * (len(batch) + 1) > most_tokens):
                yield batch
                batch, width = [], len(asked[place].ids) + asked[place].allowed
            batch.append(place)
            widest = width
        if batch:
            yield batch

    def _room(self) -> int:
        """Tokens of keys and values that the free memory holds, up to the device's own bound."""
        import psutil
        import torch

        config, device = self._config, self.precision.device
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        each = 2 * config.num_hidden_layers * heads * size * (2 if self.precision.dtype == "bfloat16" else 4)
        free: int = torch.cuda.mem_get_info()[0] if device == "cuda" else psutil.virtual_memory().available
        return min(BATCH_TOKENS[device], int(free * CACHE_SHARE[device] / each))

    # --- how it is answered ---

    def _run(
        self,
        batch: Mapping[int, _Asked],
        done: Callable[[int, Answer], None],
        on_token: Callable[[str, int], None] | None,
        check: Callable[[], None],
    ) -> None:
        """Answer a batch; where the memory does not hold it, each half of it, down to one conversation."""
        waiting = dict(batch)

        def finish(place: int) -> None:
            done(place, self._read(waiting.pop(place)))

        try:
            self._decode(batch, finish, on_token, check)
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
        else:
            return
        self._free()
        places = list(waiting)
        if len(places) == 1 and len(batch) == 1:
            done(places[0], Answer(waiting[places[0]].request.key, None, "error", len(waiting[places[0]].ids), 0))
            return
        half = max(1, len(places) // 2)
        for part in (places[:half], places[half:]):
            again = {
                place: _Asked(waiting[place].request, waiting[place].ids, waiting[place].allowed) for place in part
            }
            if again:
                self._run(again, done, on_token, check)

    def _decode(
        self,
        batch: Mapping[int, _Asked],
        finish: Callable[[int], None],
        on_token: Callable[[str, int], None] | None,
        check: Callable[[], None],
    ) -> None:
        """Prompts padded on the left, one token a step for all that are not finished, which then leave the cache."""
        import torch
        from transformers import DynamicCache

        device = self.precision.device
        places, rows = list(batch), list(batch.values())
        longest = max(len(row.ids) for row in rows)
        ids = torch.tensor([[self._stops[0]] * (longest - len(row.ids)) + row.ids for row in rows], device=device)
        lengths = torch.tensor([len(row.ids) for row in rows], device=device)
        mask = (torch.arange(longest, device=device) >= longest - lengths[:, None]).long()
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        cache = DynamicCache(config=self._model.config)
        for step in range(max(row.allowed for row in rows)):
            check()
            logits = self._model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                cache=cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]
            tokens = self._pick(logits, rows)
            stops = torch.isin(tokens, self._stops).tolist()
            going = []
            for at, (row, token, stop) in enumerate(zip(rows, tokens.tolist(), stops, strict=True)):
                if stop:
                    row.stopped = True
                else:
                    row.got.append(token)
                    if on_token:
                        on_token(row.request.key, token)
                if stop or len(row.got) >= row.allowed:
                    finish(places[at])
                else:
                    going.append(at)
            if not going:
                return
            if len(going) < len(rows):
                keep = torch.tensor(going, device=device)
                cache.batch_select_indices(keep)
                tokens, mask, lengths = tokens[keep], mask[keep], lengths[keep]
                places, rows = [places[at] for at in going], [rows[at] for at in going]
            ids, positions = tokens[:, None], (lengths + step)[:, None]
            mask = torch.cat([mask, mask.new_ones((len(rows), 1))], dim=1)

    def _pick(self, logits: Any, rows: Sequence[_Asked]) -> Any:
        """The next token of each row: the likeliest at temperature 0, else drawn from the top-p share."""
        tokens = logits.argmax(-1)
        for at, row in enumerate(rows):
            if row.request.temperature > 0:
                tokens[at] = self._drawn(logits[at], row)
        return tokens

    def _drawn(self, logits: Any, row: _Asked) -> Any:
        import torch

        if row.generator is None:
            row.generator = torch.Generator(device=self.precision.device)
            if row.request.seed is None:
                row.generator.seed()
            else:
                row.generator.manual_seed(row.request.seed)
        shares, order = torch.softmax(logits.float() / row.request.temperature, -1).sort(descending=True)
        # Tokens before which less than top_p is used up; the first one always.
        shares[1:] = torch.where(shares.cumsum(-1) - shares < row.request.top_p, shares, 0.0)[1:]
        return order[torch.multinomial(shares, 1, generator=row.generator)[0]]

    def _read(self, row: _Asked) -> Answer:
        text = self.template.tokenizer.decode(row.got, skip_special_tokens=True)
        message = self.template.read_answer(text)
        if not message.get("tool_calls") and not (message["content"] or "").strip():
            return Answer(row.request.key, None, "empty", len(row.ids), len(row.got))
        return Answer(row.request.key, message, "stop" if row.stopped else "length", len(row.ids), len(row.got))

    # --- adapters ---

    @contextlib.contextmanager
    def _with(self, adapters: Sequence[str]) -> Iterator[None]:
        missing = [name for name in adapters if name not in self._adapters]
        if missing:
            raise BadRequest(f"Adapter {missing[0]} is not loaded; loaded are {sorted(self._adapters) or 'none'}.")
        if not adapters:
            with self._off():
                yield
            return
        # Several active LoRA adapters of one layer add up, in PEFT as in a chain of merges.
        self._peft.base_model.set_adapter(list(adapters), inference_mode=True)
        yield

    @contextlib.contextmanager
    def _off(self) -> Iterator[None]:
        if not self._adapters:
            yield
            return
        self._peft.base_model.disable_adapter_layers()
        try:
            yield
        finally:
            self._peft.base_model.enable_adapter_layers()

    def _probe_logits(self) -> Any:
        """Logits of a fixed short input with all adapters off."""
        import torch

        ids = (torch.arange(16, device=self.precision.device)[None] * 7 + 3) % self._config.vocab_size
        with torch.inference_mode(), self._off():
            return self._model(input_ids=ids).logits.float()

    def _check_weights(self, name: str, path: Path) -> None:
        """Every tensor of the file has a place in this model, and every place a tensor: PEFT only warns."""
        from safetensors import safe_open

        with safe_open(path / "adapter_model.safetensors", "pt") as file:
            stored = len(file.keys())
        placed = sum(f".{name}." in key for key, _ in self._model.named_parameters())
        if stored != placed:
            raise AdapterRefused(f"{stored} tensors", f"{placed}, one for each place that it names in this model")


def _check_adapter(path: Path) -> None:
    """What this engine can serve: plain LoRA within the limits that training keeps too."""
    config = json.loads((path / "adapter_config.json").read_text(encoding="utf-8"))
    if config.get("peft_type") != "LORA":
        raise AdapterRefused(f"the type {config.get('peft_type')}", "LORA")
    check_adapter_config(config)


def _is_out_of_memory(error: BaseException) -> bool:
    """An illegal memory access, say, is none: answers after it could not be trusted."""
    said = str(error)
    full = any(words in said for words in ("out of memory", "not enough memory", "can't allocate memory"))
    return full or isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
