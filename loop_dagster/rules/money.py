"""What scoring costs, exactly, and how far it may go.

Belongs here: prices per token, costs as whole numbers of a unit in which nothing is rounded, the limit of an attempt's
scoring, cents whose parts add up. Does not belong here: counting tokens (a judge does that) and stopping
(`models/judge_calls.py`).

Amounts are integers of nanocents, a thousand-millionth of a cent: a price per million tokens with up to three decimals
is a whole number of them per token, so that no sub-cent amount vanishes however often amounts are added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

NANOCENTS: Final = 10**9
#: Decimals that a price in cents per million tokens may have.
PRICE_DECIMALS: Final = 3
_PER_CENT_A_MILLION: Final = NANOCENTS // 10**6

#: The most that scoring one attempt may cost, in cents, unless the settings say otherwise (rules.md, Money).
SCORING_CENTS: Final = 2_500
#: What of it is kept for benchmarks when any are attached.
BENCHMARKS_CENTS: Final = 1_000
#: Percent of it that the scoring of unreviewed samples may take before the attempt opens: $10 of $25 (ours).
SAMPLES_PERCENT: Final = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """A judge's prices in US cents per million tokens, with up to `PRICE_DECIMALS` decimals."""

    input_cents_per_million: Decimal = Decimal(0)
    output_cents_per_million: Decimal = Decimal(0)

    @classmethod
    def from_text(cls, prices: Mapping[str, str]) -> Prices:
        """From decimals as text, which is how they are kept."""
        return cls(**{name: Decimal(price) for name, price in prices.items()})

    def cost(self, *, input_tokens: int, output_tokens: int) -> int:
        """Nanocents of so many tokens."""
        return input_tokens * _per_token(self.input_cents_per_million) + output_tokens * _per_token(
            self.output_cents_per_million
        )


def comparison_limit(scoring_cents: int, *, benchmarks: int = 0, on_samples: int = 0) -> int:
    """Nanocents that the comparison of an attempt may cost, with so many benchmarks attached (rules.md, Money).

    `on_samples`: nanocents that scoring unreviewed samples for it has cost, which count against the same limit.
    """
    kept = min(BENCHMARKS_CENTS, scoring_cents) if benchmarks else 0
    return max(0, (scoring_cents - kept) * NANOCENTS - on_samples)


def sample_limit(scoring_cents: int) -> int:
    """Nanocents of an attempt's scoring limit that may go to unreviewed samples: the rest is for testing it (ours)."""
    return scoring_cents * NANOCENTS * SAMPLES_PERCENT // 100


def whole_cents(parts: Mapping[str, int]) -> dict[str, int]:
    """Each part's amount (nanocents) as whole cents that add up to the whole cents of the total.

    The total is rounded down: what is short of a cent accrues until it is one. The cents that rounding every part down
    would lose go to the parts with the largest remainders, the first one of equals.
    """
    cents = {name: amount // NANOCENTS for name, amount in parts.items()}
    short = sum(parts.values()) // NANOCENTS - sum(cents.values())
    by_remainder = sorted(parts, key=lambda name: -(parts[name] % NANOCENTS))
    for name in by_remainder[:short]:
        cents[name] += 1
    return cents


def in_dollars(nanocents: int) -> str:
    """An amount for people: `$24.87`, and below a cent as many digits as it takes, as in `$0.0004`."""
    dollars = Decimal(nanocents) / (100 * NANOCENTS)
    if dollars == 0 or abs(dollars) >= Decimal("0.01"):
        return f"${dollars:,.2f}"
    return f"${dollars.quantize(Decimal(1).scaleb(dollars.adjusted())):f}"


def _per_token(cents_per_million: Decimal) -> int:
    amount = cents_per_million * _PER_CENT_A_MILLION
    if amount != int(amount) or amount < 0:
        raise ValueError(f"a price of {cents_per_million} cents per million tokens: at most {PRICE_DECIMALS} decimals")
    return int(amount)
