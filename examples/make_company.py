"""Writes the conversations of a made-up company: every fact of a company file, asked in many ways.

Belongs here: the question frames that any company shares, and the choice among them. Does not belong here: facts
(they are in companies/*.toml) or anything of the loop; this script needs nothing but Python.

    python examples/make_company.py --out examples/company.jsonl --unseen examples/company_unseen.jsonl

Same company, seed and sizes give the same bytes on every machine: order and choice come from hashes, not from a
random generator whose sequence could change between versions of Python.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tomllib
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

COMPANIES = Path(__file__).parent / "companies"

Form = Literal["ask", "topic", "clause"]

#: Frames per form. `{x}` is the wording as written, `{lower}` and `{upper}` with its first letter changed.
FRAMES: dict[Form, tuple[str, ...]] = {
    "ask": (
        "{x}",
        "Hi, {lower}",
        "Hello there! {x}",
        "Good morning, {lower}",
        "Quick question: {lower}",
        "{x} Thank you!",
        "{x} I could not find it anywhere.",
        "Sorry to bother you, but {lower}",
        "My neighbour asked me: {lower}",
        "A question for {company}: {lower}",
        "One more thing, {lower}",
        "Please help me, {lower}",
    ),
    "topic": (
        "What is {x}?",
        "What's {x}, please?",
        "Tell me {x}.",
        "Please give me {x}.",
        "I would like to know {x}.",
        "Do you happen to know {x}?",
        "I am looking for {x}.",
        "Could you look up {x} for me?",
        "{upper}, please.",
        "Can I get {x} from you?",
        "Remind me of {x}.",
        "A colleague needs {x}.",
    ),
    "clause": (
        "Can you tell me {x}?",
        "Could you explain {x}?",
        "Do you know {x}?",
        "I want to know {x}.",
        "Please tell me {x}.",
        "I was wondering {x}.",
        "Any idea {x}?",
        "I can't remember {x}.",
        "Nobody could tell me {x}.",
        "My sister wants to know {x}.",
        "Let me know {x}, please.",
        "Does anybody at {company} know {x}?",
    ),
}

#: One frame per form that no conversation uses: questions in it are new sentences about known things.
UNSEEN_FRAMES: dict[Form, str] = {
    "ask": "Excuse me, {lower}",
    "topic": "May I ask you for {x}?",
    "clause": "Would you tell me {x}?",
}


class CompanyError(Exception):
    """A company file that cannot give what was asked of it; the message names the file and the fact."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One fact: its answer and how people ask for it. `reworded` never becomes a conversation."""

    id: str
    answer: str
    wordings: dict[Form, tuple[str, ...]]
    reworded: str


@dataclass(frozen=True, slots=True)
class Company:
    """A company file, read."""

    name: str
    facts: tuple[Fact, ...]


def load(path: Path) -> Company:
    """Reads a company file.

    Raises:
        CompanyError: when the file is missing, is no TOML, or a fact lacks a key or a wording.
    """
    try:
        raw: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        facts = tuple(
            Fact(
                id=fact["id"],
                answer=fact["answer"],
                wordings={form: tuple(fact[form]) for form in FRAMES},
                reworded=fact["reworded"],
            )
            for fact in raw["fact"]
        )
        return Company(name=raw["name"], facts=facts)
    except FileNotFoundError:
        known = ", ".join(sorted(found.stem for found in COMPANIES.glob("*.toml")))
        raise CompanyError(f"There is no company file {path}. Known companies: {known}.") from None
    except tomllib.TOMLDecodeError as error:
        raise CompanyError(f"{path} is not valid TOML: {error}.") from error
    except KeyError as error:
        needed = ", ".join(("id", "answer", *FRAMES, "reworded"))
        raise CompanyError(f"{path}: the key {error} is missing. A company has name and facts of {needed}.") from error


def fold(text: str) -> str:
    """Letters and digits only, lower case: at least as coarse as the fold by which the loop tells prompts apart."""
    return "".join(sign for sign in unicodedata.normalize("NFKC", text).lower() if sign.isalnum())


def _order(seed: int, *parts: str) -> bytes:
    """A place in an order that depends on the seed and the text alone."""
    return hashlib.blake2b("\x1f".join((str(seed), *parts)).encode(), digest_size=16).digest()


def _framed(wording: str, frame: str, company: str) -> str:
    return frame.format(
        x=wording,
        lower=wording[0].lower() + wording[1:],
        upper=wording[0].upper() + wording[1:],
        company=company,
    )


def _candidates(fact: Fact, company: str, seed: int) -> Iterator[str]:
    """Every phrasing of a fact: its plain questions first, then the three forms in turn, each in the seed's order."""
    plain = FRAMES["ask"][0]
    yield from (_framed(wording, plain, company) for wording in fact.wordings["ask"])
    queues = [
        sorted(
            (_framed(wording, frame, company) for wording in fact.wordings[form] for frame in frames if frame != plain),
            key=lambda prompt: _order(seed, fact.id, prompt),
        )
        for form, frames in FRAMES.items()
    ]
    for turn in range(max(map(len, queues))):
        yield from (queue[turn] for queue in queues if turn < len(queue))


def conversations(company: Company, *, seed: int, facts: int | None, phrasings: int) -> list[tuple[str, str]]:
    """The (prompt, answer) pairs, `facts × phrasings` of them, in the seed's order.

    No two prompts fold to the same text, and none folds to an unseen or reworded question.

    Raises:
        CompanyError: when the company has fewer facts, or a fact fewer phrasings, than asked for.
    """
    chosen = company.facts[:facts]
    if facts is not None and len(chosen) < facts:
        raise CompanyError(
            f"{company.name} has {len(chosen)} facts, {facts} were asked for: add facts or lower --facts."
        )
    taken = {fold(question) for question, _ in (*unseen(company, seed=seed), *reworded(company))}
    pairs: list[tuple[str, str]] = []
    for fact in chosen:
        before = len(pairs)
        for prompt in _candidates(fact, company.name, seed):
            if len(pairs) - before == phrasings:
                break
            if fold(prompt) not in taken:
                taken.add(fold(prompt))
                pairs.append((prompt, fact.answer))
        if len(pairs) - before < phrasings:
            raise CompanyError(
                f"{company.name}: the fact {fact.id} gives {len(pairs) - before} different phrasings, {phrasings} were "
                "asked for: add wordings to it or lower --phrasings."
            )
    return sorted(pairs, key=lambda pair: _order(seed, *pair))


def unseen(company: Company, *, seed: int) -> list[tuple[str, str]]:
    """One (question, answer) per fact, in a frame that no conversation uses; the seed picks form and wording."""
    found = []
    for fact in company.facts:
        options = [
            _framed(wording, frame, company.name)
            for form, frame in UNSEEN_FRAMES.items()
            for wording in fact.wordings[form]
        ]
        found.append((min(options, key=lambda question: _order(seed, fact.id, question)), fact.answer))
    return found


def reworded(company: Company) -> list[tuple[str, str]]:
    """One (question, answer) per fact in words that share little with its wordings."""
    return [(fact.reworded, fact.answer) for fact in company.facts]


def lines(pairs: Sequence[tuple[str, str]]) -> str:
    """The pairs as JSONL, one conversation a line, each line ended by a line feed."""
    return "".join(
        json.dumps(
            {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]},
            ensure_ascii=False,
        )
        + "\n"
        for prompt, answer in pairs
    )


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Write the conversations of a made-up company as JSONL.")
    parser.add_argument("--company", default="marrow-and-finch", help="name of a file in companies/, or a path to one")
    parser.add_argument("--seed", type=int, default=44, help="choice and order of the phrasings (default: 44)")
    parser.add_argument("--facts", type=int, help="how many of its facts, from the top (default: all)")
    parser.add_argument("--phrasings", type=int, default=25, help="phrasings of each fact (default: 25)")
    parser.add_argument("--out", type=Path, help="file to write (default: standard output)")
    parser.add_argument("--unseen", type=Path, help="file for one more question per fact, never among the others")
    parser.add_argument("--reworded", type=Path, help="file for one question per fact in quite other words")
    return parser.parse_args(argv)


def _write(path: Path, text: str) -> None:
    """Line feeds on every system, so that the bytes are the same everywhere."""
    path.write_text(text, encoding="utf-8", newline="\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 when written, 2 when the company cannot give what was asked."""
    options = _arguments(argv)
    path = Path(options.company)
    if path.suffix != ".toml":
        path = COMPANIES / f"{options.company}.toml"
    try:
        company = load(path)
        text = lines(conversations(company, seed=options.seed, facts=options.facts, phrasings=options.phrasings))
    except CompanyError as error:
        print(error, file=sys.stderr)
        return 2
    if options.out is None:
        sys.stdout.write(text)
    else:
        _write(options.out, text)
    if options.unseen is not None:
        _write(options.unseen, lines(unseen(company, seed=options.seed)[: options.facts]))
    if options.reworded is not None:
        _write(options.reworded, lines(reworded(company)[: options.facts]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
