"""Which precision this machine trains and answers in.

Belongs here: reading what the processor and the drivers say. Does not belong here: anything of a model.

Rule (design.md, Machines): bfloat16 only with AVX512_BF16, AMX or a CUDA GPU, else float32; on an AVX2 machine
bfloat16 works and is twelve times slower.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Dtype = Literal["bfloat16", "float32"]
Device = Literal["cuda", "cpu"]

#: Values of ONEDNN_MAX_CPU_ISA that leave bfloat16 instructions in use; every other one caps them away.
_ISA_WITH_BF16 = frozenset(
    {
        "ALL",
        "DEFAULT",
        "AVX512_CORE_BF16",
        "AVX512_CORE_FP16",
        "AVX512_CORE_AMX",
        "AVX512_CORE_AMX_FP16",
        "AVX10_1_512",
        "AVX10_1_512_AMX",
        "AVX10_1_512_AMX_FP16",
        "AVX10_2_512",
        "AVX10_2_512_AMX_2",
    }
)
_BF16_FLAGS = ("amx_bf16", "avx512_bf16")
_GPU_NODES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd", "/dev/dxg")


@dataclass(frozen=True, slots=True)
class Precision:
    """What to compute in, where, and one sentence that says why."""

    dtype: Dtype
    device: Device
    why: str


def probe(*, cpu_flags: frozenset[str] | None = None, environ: Mapping[str, str] | None = None) -> Precision:
    """The precision for this process. `cpu_flags` and `environ` replace what the machine says.

    Imports torch only where a GPU's device node exists, so it is cheap in a code server without one.
    """
    env = os.environ if environ is None else environ
    if cpu_flags is None and any(Path(node).exists() for node in _GPU_NODES):
        gpu = _gpu()
        if gpu is not None:
            return gpu
    flags = _cpu_flags() if cpu_flags is None else cpu_flags
    cap = (env.get("ONEDNN_MAX_CPU_ISA") or env.get("DNNL_MAX_CPU_ISA") or "DEFAULT").upper()
    found = next((flag for flag in _BF16_FLAGS if flag in flags), None)
    if found is None:
        return Precision(
            "float32", "cpu", "float32 on the CPU: it has neither AVX512_BF16 nor AMX, and no GPU is there."
        )
    if cap not in _ISA_WITH_BF16:
        return Precision(
            "float32", "cpu", f"float32 on the CPU: it has {found}, but ONEDNN_MAX_CPU_ISA={cap} keeps it out of use."
        )
    return Precision("bfloat16", "cpu", f"bfloat16 on the CPU: it has {found}, and no GPU is there.")


def _gpu() -> Precision | None:
    import torch

    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name(0)
    # Compute capability 8 is the first with bfloat16 arithmetic; older cards would emulate it.
    if torch.cuda.get_device_capability(0)[0] >= 8:
        return Precision("bfloat16", "cuda", f"bfloat16 on the GPU ({name}).")
    return Precision("float32", "cuda", f"float32 on the GPU: {name} has no bfloat16 arithmetic.")


def _cpu_flags() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in {"flags", "Features"}:
            return frozenset(value.split())
    return frozenset()
