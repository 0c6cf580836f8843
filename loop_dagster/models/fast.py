"""LoRA training on a CPU in half the time, with the same result.

Belongs here: two rewritings of the same computation, and the proof that a model takes them. Does not belong here: the
training loop (train.py), anything of conversations (template.py).

* The rows of a batch mostly begin with the same tokens (a system prompt). `pack` lays them out as one sequence: the
  shared beginning once, then what follows in each row. A mask lets a row see the beginning and itself, so every row
  gets exactly what it would get alone, without padding, and only labelled positions reach the model's head.
* `fuse` computes a LoRA layer in one autograd step that keeps the layer's input once and in the base's precision; the
  adapter's own weights stay float32.

`speed_up` compares both with the plain computation on real rows before they are used: an architecture whose layers look
at more than the mask (a recurrent state, a short convolution) is found out there.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from loop_dagster.models.template import IGNORED, Encoded

if TYPE_CHECKING:
    import torch

#: Tokens of one packed sequence. Attention costs the square of it: beyond this, more rows at once save nothing.
PACK_TOKENS = 512

#: Largest relative difference in loss between the plain and the rewritten computation: rounding, and nothing else.
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}


def shared_prefix(rows: Sequence[Encoded]) -> int:
    """How many tokens all rows begin with, at most up to one before the shortest prompt's end.

    The last token of each prompt stays in its own row: the first label is predicted from it.
    """
    first = rows[0].input_ids
    end = min(row.prompt_tokens for row in rows) - 1
    for row in rows[1:]:
        end = next((i for i in range(end) if row.input_ids[i] != first[i]), end)
    return max(0, end)


def split(rows: Sequence[Encoded], limit: int = PACK_TOKENS) -> list[list[Encoded]]:
    """Rows in groups whose packed length is at most `limit`; a longer row is a group of its own."""
    if not rows:
        return []
    shared = shared_prefix(rows)
    groups: list[list[Encoded]] = []
    room = 0
    for row in sorted(rows, key=lambda row: row.tokens):
        if not groups or row.tokens - shared > room:
            groups.append([])
            room = limit - shared
        groups[-1].append(row)
        room -= row.tokens - shared
    return groups


def pack(rows: Sequence[Encoded], dtype: torch.dtype, *, shared: int | None = None) -> dict[str, Any]:
    """One packed sequence of N tokens: input_ids and position_ids (1, N), attention_mask (1, 1, N, N) in `dtype`,
    `keep` (K,) the positions that predict a label, `targets` (K,) those labels. A single row needs no mask.

    `shared` tokens are taken as the beginning of all rows; None finds out how many they are.
    """
    import torch

    if shared is None:
        shared = shared_prefix(rows) if len(rows) > 1 else 0
    ids, positions, labels = list(rows[0].input_ids[:shared]), list(range(shared)), [IGNORED] * shared
    owner = [0] * shared
    for number, row in enumerate(rows, start=1):
        ids += row.input_ids[shared:]
        labels += row.labels[shared:]
        positions += range(shared, row.tokens)
        owner += [number] * (row.tokens - shared)
    # The label after a row's last token is the first one of the next row: part of a prompt, so never a target.
    after = torch.tensor(labels[1:])
    keep = (after != IGNORED).nonzero()[:, 0]
    packed: dict[str, Any] = {
        "input_ids": torch.tensor([ids]),
        "position_ids": torch.tensor([positions]),
        "keep": keep,
        "targets": after[keep],
    }
    if len(rows) > 1:
        row_of, place = torch.tensor(owner), torch.arange(len(ids))
        seen = (row_of[:, None] == row_of[None, :]) | (row_of[None, :] == 0)
        seen &= place[:, None] >= place[None, :]
        mask = torch.zeros(len(ids), len(ids), dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)
        packed["attention_mask"] = mask[None, None]
    return packed


def label_logits(model: Any, packed: dict[str, Any]) -> torch.Tensor:
    """Logits (K, vocabulary) at the positions of a packed sequence that predict a label."""
    inputs = {name: value for name, value in packed.items() if name not in {"keep", "targets"}}
    # The model's own forward, so that a family's scaling or capping of logits is in it.
    logits: torch.Tensor = model(**inputs, logits_to_keep=packed["keep"], use_cache=False).logits[0]
    return logits


def loss_sum(model: Any, packed: dict[str, Any]) -> torch.Tensor:
    """Sum of the negative log-likelihood of a packed sequence's labels, in float32."""
    from torch.nn.functional import cross_entropy

    return cross_entropy(label_logits(model, packed).float(), packed["targets"], reduction="sum")


def plain_loss_sum(model: Any, rows: Sequence[Encoded]) -> torch.Tensor:
    """The same sum the plain way: each row alone, all logits."""
    import torch
    from torch.nn.functional import cross_entropy

    total = torch.zeros(())
    for row in rows:
        logits = model(input_ids=torch.tensor([row.input_ids]), use_cache=False).logits[0, :-1]
        total += cross_entropy(logits.float(), torch.tensor(row.labels[1:]), ignore_index=IGNORED, reduction="sum")
    return total


def speed_up(model: Any, rows: Sequence[Encoded], dtype: str) -> bool:
    """Fuse the layers of a PEFT model if it keeps packed rows apart; False, and the model as it was, if not.

    Two things must hold: packed rows have the loss that each has alone, within TOLERANCE, and other words in the first
    row change nothing in the others. Computes no gradients; needs two rows at least.
    """
    import torch

    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            plain = plain_loss_sum(model, rows)
            fuse(model)
            packed = loss_sum(model, pack(rows, getattr(torch, dtype)))
            close = bool((packed - plain).abs() <= TOLERANCE[dtype] * plain.abs().clamp(min=1.0))
            proven = close and _keeps_apart(model, rows, getattr(torch, dtype))
    except (TypeError, ValueError, RuntimeError, IndexError):
        proven = False  # a forward without logits_to_keep, or with another idea of a mask
    finally:
        model.train(was_training)
    if not proven:
        unfuse(model)
    return proven


def _keeps_apart(model: Any, rows: Sequence[Encoded], dtype: torch.dtype) -> bool:
    shared, first = shared_prefix(rows), rows[0]
    vocabulary = int(model.config.get_text_config().vocab_size)
    other = array("i", [(token + 1 if i >= shared else token) % vocabulary for i, token in enumerate(first.input_ids)])
    changed = Encoded(first.key, other, first.labels, first.prompt_tokens)
    ours = sum(label != IGNORED for label in first.labels)
    one, two = (
        label_logits(model, pack([head, *rows[1:]], dtype, shared=shared))[ours:].float() for head in (first, changed)
    )
    # The same shapes go through the same kernels, so rounding is the same too: what differs has leaked.
    return bool((one - two).abs().max() <= 1e-6 * one.abs().max())


def fuse(model: Any) -> int:
    """Give every plain LoRA layer of a PEFT model the one-step computation; returns how many took it.

    A layer with dropout, a variant (DoRA and others), a bias on the adapter or another kind of base stays as it is.
    """
    step = _step()
    plain = [layer for layer in _lora_layers(model) if _is_plain(layer)]
    for layer in plain:
        layer.forward = _forward_of(layer, step)
    return len(plain)


def unfuse(model: Any) -> None:
    """Undo `fuse`."""
    for layer in _lora_layers(model):
        layer.__dict__.pop("forward", None)


def _lora_layers(model: Any) -> list[Any]:
    from peft.tuners.lora.layer import Linear

    return [layer for layer in model.modules() if type(layer) is Linear]


def _is_plain(layer: Any) -> bool:
    import torch

    [*active] = layer.active_adapters
    if len(active) != 1 or layer.disable_adapters or layer.merged or type(layer.base_layer) is not torch.nn.Linear:
        return False
    name = active[0]
    return (
        not getattr(layer, "fan_in_fan_out", False)
        and not layer.lora_variant.get(name)
        and isinstance(layer.lora_dropout[name], torch.nn.Identity)
        and layer.lora_A[name].bias is None
        and layer.lora_B[name].bias is None
        and not layer.base_layer.weight.requires_grad
    )


def _forward_of(layer: Any, step: Any) -> Any:
    [name] = layer.active_adapters
    base, down, up, scale = layer.base_layer, layer.lora_A[name], layer.lora_B[name], layer.scaling[name]

    def forward(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        out: torch.Tensor = step.apply(x, base.weight, base.bias, down.weight, up.weight, scale)
        return out

    return forward


def _step() -> Any:
    import torch

    class LoraStep(torch.autograd.Function):  # type: ignore[misc]  # torch is not followed by the type checker
        """y = x W' + b + s (x A') B', saving x, x A' and nothing of the size of y."""

        @staticmethod
        def forward(ctx: Any, x: Any, *layer: Any) -> Any:
            weight, bias, down, up, scale = layer
            flat = x.reshape(-1, x.shape[-1])
            a, b = down.to(x.dtype), up.to(x.dtype)
            low = flat @ a.t()
            y = torch.nn.functional.linear(flat, weight, bias)
            y.addmm_(low, b.t(), alpha=scale)
            ctx.save_for_backward(flat, low, weight, a, b)
            ctx.scale, ctx.shape, ctx.adapter_dtype = scale, x.shape, down.dtype
            return y.view(*x.shape[:-1], weight.shape[0])

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            flat, low, weight, a, b = ctx.saved_tensors
            g = gradient.reshape(-1, gradient.shape[-1])
            g_low = (g @ b).mul_(ctx.scale)
            g_x = None
            if ctx.needs_input_grad[0]:
                g_x = (g @ weight).addmm_(g_low, a).view(ctx.shape)
            g_down = (g_low.t() @ flat).to(ctx.adapter_dtype)
            g_up = (g.t() @ low).mul_(ctx.scale).to(ctx.adapter_dtype)
            return g_x, None, None, g_down, g_up, None

    return LoraStep
