from __future__ import annotations

import pytest

from loop_dagster.models.probe import probe

AMX = frozenset({"avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile"})
AVX512_BF16 = frozenset({"avx2", "avx512f", "avx512_bf16"})
AVX512 = frozenset({"avx2", "avx512f", "avx512_vnni"})
AVX2 = frozenset({"avx", "avx2", "fma"})


@pytest.mark.parametrize(
    ("flags", "cap", "dtype"),
    [
        (AMX, None, "bfloat16"),
        (AVX512_BF16, None, "bfloat16"),
        (AVX512, None, "float32"),
        (AVX2, None, "float32"),
        (frozenset(), None, "float32"),
        (AMX, "AVX2", "float32"),
        (AMX, "avx2", "float32"),
        (AMX, "AVX512_CORE", "float32"),
        (AMX, "AVX512_CORE_BF16", "bfloat16"),
        (AMX, "AVX512_CORE_AMX", "bfloat16"),
        (AMX, "DEFAULT", "bfloat16"),
        (AVX2, "AVX512_CORE_AMX", "float32"),
    ],
)
def test_bfloat16_needs_the_instructions_and_leave_to_use_them(
    flags: frozenset[str], cap: str | None, dtype: str
) -> None:
    found = probe(cpu_flags=flags, environ={"ONEDNN_MAX_CPU_ISA": cap} if cap else {})
    assert (found.dtype, found.device) == (dtype, "cpu")
    assert found.why.startswith(dtype)
    assert found.why.endswith(".")


def test_the_sentence_names_the_cap_that_costs_bfloat16() -> None:
    assert "ONEDNN_MAX_CPU_ISA=AVX2" in probe(cpu_flags=AMX, environ={"ONEDNN_MAX_CPU_ISA": "AVX2"}).why


def test_it_answers_for_this_machine() -> None:
    assert probe().dtype in {"bfloat16", "float32"}
