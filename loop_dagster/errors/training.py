"""Models and their training: what cannot be loaded, trained on or kept."""

from __future__ import annotations

from collections.abc import Sequence

from loop_dagster.errors.base import EXIT_REFUSED, EXIT_UNAVAILABLE, EXIT_USAGE, LoopError


class ModelNotTrainable(LoopError):
    """A base model that is not there, is not complete, or cannot be trained here."""

    code = "MODEL_NOT_TRAINABLE"
    exit_code = EXIT_USAGE

    def __init__(self, model: str, found: str, next_step: str) -> None:
        super().__init__(
            f"The model {model!r} cannot be used: {found}. {next_step}",
            model=model,
        )


class ModelRevisionUnavailable(LoopError):
    """The hub, or its local copy, does not have the model in the revision that is pinned."""

    code = "MODEL_REVISION_UNAVAILABLE"
    exit_code = EXIT_UNAVAILABLE

    def __init__(self, model: str, revision: str | None, why: str) -> None:
        super().__init__(
            f"The model {model!r}{f' at revision {revision}' if revision else ''} is not on this machine and could "
            f"not be downloaded: {why}. Check the name and this machine's way to the hub (HF_ENDPOINT, HF_TOKEN), or "
            "download the model elsewhere and name its folder instead.",
            model=model,
            revision=revision,
        )


class TrainingSettingOutOfRange(LoopError):
    """A training setting outside its range (rules.md, How it trains)."""

    code = "TRAINING_SETTING_OUT_OF_RANGE"
    exit_code = EXIT_USAGE

    def __init__(self, field: str, allowed: str, got: object) -> None:
        super().__init__(
            f"training.{field} must be {allowed}, got {got!r}. Nothing was saved; left out, it is automatic.",
            field=field,
            allowed=allowed,
        )


class BaseChanged(LoopError):
    """The weights on disk are not the ones that were pinned; an adapter would load onto them without any error."""

    code = "BASE_CHANGED"

    def __init__(self, path: str, needed: str, found: str) -> None:
        super().__init__(
            f"The model in {path!r} has digest {found[:16]}, needed is {needed[:16]}. Nothing was loaded. Restore the "
            "folder as it was, or save the pipeline again to pin what is there now.",
            needed=needed,
            found=found,
        )


class NoLabels(LoopError):
    """Rows whose answer would carry no label; a set with one of them is never trained on (rules.md, How it trains)."""

    code = "NO_LABELS"

    def __init__(self, rows: Sequence[str], total: int) -> None:
        super().__init__(
            f"{len(rows)} of {total} rows would carry no label, so nothing of them could be learned (first: "
            f"{', '.join(rows[:5])}). Nothing was trained. Give them an answer with text or tool calls, mark them "
            "wrong, or choose a model whose chat template shows the answer.",
            rows=list(rows[:100]),
        )


class NothingToTrain(LoopError):
    """Not one row is left that the model's template takes and its length allows."""

    code = "NOTHING_TO_TRAIN"

    def __init__(self, total: int, reasons: dict[str, int]) -> None:
        why = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items())) or "the set is empty"
        super().__init__(
            f"None of {total} rows can be trained on: {why}. Nothing was trained. Look at these rows, or choose "
            "another model.",
            reasons=reasons,
        )


class ConversationRefused(LoopError):
    """A conversation that the model's chat template does not take; the sentence holds nothing of its text."""

    exit_code = EXIT_REFUSED

    def __init__(self, code: str, sentence: str) -> None:
        super().__init__(f"{sentence} Nothing was asked; change the conversation or choose another model.")
        self.code = code  # type: ignore[misc]  # a RefusalCode of models/template.py


class TrainingDiverged(LoopError):
    """The loss became not a number before any checked weights could be kept."""

    code = "TRAINING_DIVERGED"

    def __init__(self, step: int, learning_rate: float) -> None:
        super().__init__(
            f"The loss was not a number any more at step {step}, and no weights were good before it. Nothing was kept. "
            f"Set a learning rate below {learning_rate:g}, or leave it out for the automatic one.",
            step=step,
        )


class AdapterRefused(LoopError):
    """An adapter, or the wish for one, that the engine could not serve (rules.md, cases)."""

    code = "ADAPTER_REFUSED"

    def __init__(self, found: str, needed: str) -> None:
        super().__init__(f"The adapter has {found}; needed is {needed}. Nothing was trained or loaded with it.")


class AdapterLeaks(LoopError):
    """With its adapters off, the engine no longer answers as the base does; nothing it says could be trusted."""

    code = "ADAPTER_LEAKS"

    def __init__(self, model: str, difference: float) -> None:
        super().__init__(
            f"With all adapters off, the engine's logits differ from the base {model!r}'s by up to {difference:.3g}; "
            "needed are the same ones. Nothing was answered. Check the versions of peft and transformers.",
            difference=difference,
        )


class ChildFailed(LoopError):
    """A process that trains, answers or merges ended without a result; `code` is the one that it ended with.

    CHILD_ENDED, where it ended without a word, is what a kill looks like: it may go well the next time.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code  # type: ignore[misc]  # the child's own code
        self.passes = code == "CHILD_ENDED"  # type: ignore[misc]  # as `code`


class Stopped(LoopError):
    """Somebody asked the process to end, and it did."""

    code = "STOPPED"

    def __init__(self, why: str) -> None:
        super().__init__(f"Stopped before the end: {why}. Nothing half-made was kept; start the step again.")
