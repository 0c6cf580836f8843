"""Every failure that a person or a script can meet, one class each.

Belongs here: classes built from data whose message says what went wrong, where, what was needed, what was found
and what to do next. Does not belong here: control flow, logging, anything that formats a secret or a sample's text.

`code` is stable and is what scripts branch on; `exit_code` is what the command line returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_REFUSED = 3
EXIT_NOT_FOUND = 4
EXIT_UNAVAILABLE = 5


class LoopError(Exception):
    """Base of all errors of this project. `details` ride along in JSON answers."""

    code: ClassVar[str] = "INTERNAL_ERROR"
    exit_code: ClassVar[int] = EXIT_FAILED
    #: Whether the same thing done again may well succeed: then a step of an attempt is tried again, not failed.
    passes: ClassVar[bool] = False

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details = details

    def as_dict(self) -> dict[str, Any]:
        """The error envelope of http-api.md: `{"error": {"code", "message"}, ...details}`."""
        return {"error": {"code": self.code, "message": self.message}, **self.details}


class BadRequest(LoopError):
    """A value that no state of the installation could accept."""

    code = "BAD_REQUEST"
    exit_code = EXIT_USAGE


class NotFound(LoopError):
    """Something named does not exist in this workspace."""

    code = "NOT_FOUND"
    exit_code = EXIT_NOT_FOUND

    def __init__(self, kind: str, name: str, near: list[str] | None = None) -> None:
        hint = f" Did you mean {', '.join(near)}?" if near else ""
        super().__init__(f"No {kind} called {name!r} in this workspace.{hint}", kind=kind, name=name)


class NoReport(LoopError):
    """An attempt that was not compared yet, or that ended before it was: there is no report to show."""

    code = "NOT_FOUND"
    exit_code = EXIT_NOT_FOUND

    def __init__(self, attempt: str, state: str, reason: str | None, *, ended: bool) -> None:
        if ended:
            said = f"Attempt {attempt} has no report: it ended as {state} before it was compared. {reason or ''}"
        else:
            said = (
                f"Attempt {attempt} has no report yet: it is {state}. The report is written when both models have "
                "answered and the judge has rated; `loop run --until-idle` goes on until then."
            )
        super().__init__(said.strip(), kind="report", name=attempt, state=state)


class Conflict(LoopError):
    """The request is fine and the present state forbids it."""

    code = "CONFLICT"
    exit_code = EXIT_REFUSED


class MoveNotAllowed(Conflict):
    """An attempt cannot go from its state to another one (rules/states.py)."""

    def __init__(self, old: str, new: str, allowed: Sequence[str]) -> None:
        way = f"only {', '.join(allowed)} may follow" if allowed else "it has ended and nothing follows"
        super().__init__(
            f"An attempt in state {old} cannot become {new}: {way}. Read its state again before moving it.",
            state=old,
            wanted=new,
            allowed=list(allowed),
        )


class Refused(LoopError):
    """A rule of the loop says no; the subclass or `code` says which one (rules.md)."""

    exit_code = EXIT_REFUSED

    def __init__(self, code: str, message: str, **details: Any) -> None:
        super().__init__(message, **details)
        self.code = code  # type: ignore[misc]  # one class, the rule's own code per instance


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


class RevisionMismatch(Conflict):
    """An edit was based on an older revision of the pipeline."""

    code = "REVISION_MISMATCH"

    def __init__(self, pipeline: str, expected: int, found: int) -> None:
        super().__init__(
            f"Pipeline {pipeline} is at revision {found}, the edit expected {expected}. Nothing was saved: "
            "read the pipeline again and resend the edit.",
            expected=expected,
            found=found,
        )


class LeaseLost(LoopError):
    """Another process took the lease, or it was revoked: this one must stop writing at once."""

    code = "LEASE_LOST"

    def __init__(self, name: str, why: Literal["taken", "expired", "revoked"]) -> None:
        super().__init__(
            f"The lease {name!r} was {why}: this process stops and writes nothing more.", lease=name, why=why
        )


class LeaseBusy(LoopError):
    """Somebody else holds the lease and it has not expired."""

    passes = True
    code = "LEASE_BUSY"
    exit_code = EXIT_UNAVAILABLE

    def __init__(self, name: str, holder: str, seconds_left: float) -> None:
        super().__init__(
            f"The lease {name!r} is held by {holder} for at most {seconds_left:.0f} s more. "
            "Wait for it; if that process is gone, the lease ends by itself.",
            lease=name,
            holder=holder,
        )


class LakeUnreadable(LoopError):
    """A Delta table is there and its log cannot be read; never answered as an empty table."""

    code = "LAKE_UNREADABLE"
    exit_code = EXIT_UNAVAILABLE

    def __init__(self, table: str, path: str, why: str) -> None:
        super().__init__(
            f"The lake's table {table!r} at {path!r} (relative to the lake) cannot be read: {why} Nothing was written. "
            "`loop doctor` names the damaged file and the command that mends it.",
            table=table,
            path=path,
        )


class LakeNotWritable(LoopError):
    """A commit to a Delta table failed for another reason than a racing writer: a full disk, a refused request."""

    code = "LAKE_NOT_WRITABLE"
    exit_code = EXIT_UNAVAILABLE

    def __init__(self, table: str, path: str, action: str, why: str) -> None:
        super().__init__(
            f"{action} on the lake's table {table!r} at {path!r} (relative to the lake) failed: {why} Nothing was "
            "committed. See to the space and the rights of the lake's place, then run it again.",
            table=table,
            path=path,
        )


class LakeOfAnother(LoopError):
    """The lake belongs to another registry; nothing of ours may be written to it."""

    code = "LAKE_OF_ANOTHER"
    exit_code = EXIT_REFUSED

    def __init__(self, lake: str, owner: str, mine: str, mark: str) -> None:
        super().__init__(
            f"The lake {lake} is written by {owner}, and this is {mine}. Nothing was written: two registries on one "
            "lake would take each other's samples for theirs. Give this installation a lake of its own "
            "(LOOP_LAKE_URL, or another LOOP_WORKSPACE), or name that registry with LOOP_REGISTRY_URL. If the other "
            f"one is gone for good, delete {mark} and run this again.",
            owner=owner,
            lake=lake,
        )


class LakeSchemaMismatch(LoopError):
    """A frame, or a stored table, does not have the columns that its declaration asks for."""

    code = "LAKE_SCHEMA_MISMATCH"

    def __init__(self, table: str, problems: list[str]) -> None:
        super().__init__(
            f"Not the columns of table {table!r}: {'; '.join(problems)}. Nothing was written. "
            f"loop_dagster/tables declares what is needed.",
            table=table,
            problems=problems,
        )


class LakeConflict(LoopError):
    """Another writer changed the same rows each time that this one tried to commit."""

    passes = True
    code = "LAKE_CONFLICT"
    exit_code = EXIT_UNAVAILABLE

    def __init__(self, table: str, action: str, tries: int) -> None:
        super().__init__(
            f"{action} on the lake's table {table!r} met another writer {tries} times and was given up; nothing was "
            "written. Writers that touch the same rows hold the lake's lease: run it again.",
            table=table,
            tries=tries,
        )


class JudgeUnreadable(LoopError):
    """The judge answered in a form that holds no rating or preference; it is asked once more."""

    code = "JUDGE_UNREADABLE"

    def __init__(self, judge: str, asked: Literal["ratings", "preference"], found: str) -> None:
        super().__init__(
            f"The judge {judge} was asked for {'ratings' if asked == 'ratings' else 'a preference'} and {found}. "
            "It is asked once more; then the sample counts as failed.",
            judge=judge,
            asked=asked,
        )


class JudgeRejected(LoopError):
    """The judge's server takes no such request (mostly: too long for it); this one sample cannot be judged."""

    code = "JUDGE_REJECTED"

    def __init__(self, judge: str, where: str, status: int) -> None:
        super().__init__(
            f"The judge {judge} at {where} rejected a request with status {status}; the sample counts as failed. "
            "If all are rejected, check LOOP_JUDGE_MODEL and whether its context is long enough for two answers.",
            judge=judge,
            status=status,
        )


class JudgeUnavailable(LoopError):
    """The judge could not be reached, or answered with server errors until the retries were used up."""

    code = "JUDGE_UNAVAILABLE"
    exit_code = EXIT_UNAVAILABLE

    def __init__(self, judge: str, where: str, found: str, tries: int) -> None:
        super().__init__(
            f"The judge {judge} at {where} gave no answer after {tries} tries (last: {found}). "
            "Check that the server runs and that LOOP_JUDGE_URL leads to it.",
            judge=judge,
        )


class JudgeRefused(LoopError):
    """The judge's key was refused or its model is gone: no further call can succeed, the comparison ends at once."""

    code = "JUDGE_REFUSED"
    exit_code = EXIT_UNAVAILABLE

    def __init__(self, judge: str, where: str, status: int, reason: Literal["key", "model", "credit"]) -> None:
        what = {
            "key": "refused the key (LOOP_JUDGE_API_KEY)",
            "model": "does not know the model or the address (LOOP_JUDGE_MODEL, LOOP_JUDGE_URL)",
            "credit": "has no credit left for the key",
        }[reason]
        super().__init__(
            f"The judge {judge} at {where} answered {status}: it {what}. Mend it; an attempt of which it scored "
            "nothing can then be tested again.",
            judge=judge,
            status=status,
            reason=reason,
        )


class RegistryUnavailable(LoopError):
    """The registry's database does not answer. `where` is its URL without any password."""

    passes = True
    code = "REGISTRY_UNAVAILABLE"
    exit_code = EXIT_UNAVAILABLE

    def __init__(self, where: str, found: str) -> None:
        super().__init__(
            f"The registry at {where} does not answer: {found}. Check that the server runs or the folder can be "
            "written, and that LOOP_REGISTRY_URL names it; then try again, nothing half-written was kept.",
            registry=where,
        )


class RegistryNotWritable(RegistryUnavailable):
    """The registry's database answers and cannot write: a full disk, a folder that may only be read."""

    code = "REGISTRY_NOT_WRITABLE"

    def __init__(self, where: str, found: str) -> None:
        LoopError.__init__(
            self,
            f"The registry at {where} cannot be written to: {found}. What was acknowledged before is kept, and nothing "
            "of this. Free space on its disk (`df -h`), or give its folder the right to write, then run it again.",
            registry=where,
        )


class RegistryDamaged(RegistryUnavailable):
    """The registry's file is not a whole database any more."""

    code = "REGISTRY_DAMAGED"

    def __init__(self, where: str, found: str) -> None:
        LoopError.__init__(
            self,
            f"The registry at {where} is damaged: {found}. Nothing was changed. End every process of the installation, "
            "then put back a copy of the file, or save what can be read with `sqlite3 registry.db .recover`.",
            registry=where,
        )


class RegistryNotReady(LoopError):
    """The registry's tables are missing or older than this program."""

    code = "REGISTRY_NOT_READY"
    exit_code = EXIT_UNAVAILABLE

    def __init__(self, where: str, found: str, needed: str) -> None:
        super().__init__(
            f"The registry at {where} is {found}, and this version needs revision {needed}. Run `loop init`: it "
            "creates or upgrades the tables and keeps what is there.",
            registry=where,
            needed=needed,
        )


class RegistryTooNew(LoopError):
    """A newer version of this program has upgraded the registry."""

    code = "REGISTRY_TOO_NEW"
    exit_code = EXIT_REFUSED

    def __init__(self, where: str, found: str, known: str) -> None:
        super().__init__(
            f"The registry at {where} is at revision {found}, and this version knows revisions up to {known} only. "
            "Nothing was changed: install the version that upgraded it, or restore a copy from before.",
            registry=where,
            found=found,
            known=known,
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


class AdapterRefused(LoopError):
    """An adapter, or the wish for one, that the engine could not serve (rules.md, cases)."""

    code = "ADAPTER_REFUSED"

    def __init__(self, found: str, needed: str) -> None:
        super().__init__(f"The adapter has {found}; needed is {needed}. Nothing was trained or loaded with it.")


class NotEnoughSamples(LoopError):
    """Fewer samples than the next attempt needs (rules.md, When an attempt starts)."""

    code = "NOT_ENOUGH_SAMPLES"
    exit_code = EXIT_REFUSED

    def __init__(self, pipeline: str, have: int, need: int, sentence: str) -> None:
        super().__init__(f"Pipeline {pipeline} cannot train yet. {sentence}", have=have, need=need)


class LiveMoved(Conflict):
    """What is live is not what the attempt was compared with."""

    code = "LIVE_MOVED"

    def __init__(self, tag: str, expected: int | None, found: int | None) -> None:
        said = {number: "nothing" if number is None else f"v{number}" for number in (expected, found)}
        super().__init__(
            f"loop-{tag} answers with {said[found]} by now, and the attempt was compared with {said[expected]}. "
            "Nothing went live: compare it again with what is live now.",
            tag=tag,
            expected=expected,
            found=found,
        )


class ConversationRefused(LoopError):
    """A conversation that the model's chat template does not take; the sentence holds nothing of its text."""

    exit_code = EXIT_REFUSED

    def __init__(self, code: str, sentence: str) -> None:
        super().__init__(f"{sentence} Nothing was asked; change the conversation or choose another model.")
        self.code = code  # type: ignore[misc]  # a RefusalCode of models/template.py


class DiskFull(LoopError):
    """Too little free space for what is about to be written."""

    code = "DISK_FULL"

    def __init__(self, where: str, free_bytes: int, needed_bytes: int) -> None:
        super().__init__(
            f"The disk under {where} has {free_bytes / 1e9:.1f} GB free, needed {needed_bytes / 1e9:.1f} GB. "
            "Free some space, or put LOOP_HOME on another disk; nothing was written.",
            free_bytes=free_bytes,
            needed_bytes=needed_bytes,
        )


class ArtifactTorn(LoopError):
    """Kept weights are not what they were when they were kept."""

    code = "ARTIFACT_TORN"

    def __init__(self, digest: str, where: str, found: str) -> None:
        super().__init__(
            f"The artifact {digest} at {where} is damaged: {found}. It is not used. Restore the folder, or "
            "delete it and train again.",
            artifact=digest,
        )


class AdapterLeaks(LoopError):
    """With its adapters off, the engine no longer answers as the base does; nothing it says could be trusted."""

    code = "ADAPTER_LEAKS"

    def __init__(self, model: str, difference: float) -> None:
        super().__init__(
            f"With all adapters off, the engine's logits differ from the base {model!r}'s by up to {difference:.3g}; "
            "needed are the same ones. Nothing was answered. Check the versions of peft and transformers.",
            difference=difference,
        )


class LiveUnavailable(LoopError):
    """Something is live under the name and cannot answer at the moment: 503, never 404 (http-api.md, The gateway)."""

    code = "LIVE_UNAVAILABLE"
    exit_code = EXIT_UNAVAILABLE

    def __init__(self, why: str, next_step: str) -> None:
        super().__init__(f"The live version cannot answer: {why.rstrip('.')}. {next_step}.")


class TrainingDiverged(LoopError):
    """The loss became not a number before any checked weights could be kept."""

    code = "TRAINING_DIVERGED"

    def __init__(self, step: int, learning_rate: float) -> None:
        super().__init__(
            f"The loss was not a number any more at step {step}, and no weights were good before it. Nothing was kept. "
            f"Set a learning rate below {learning_rate:g}, or leave it out for the automatic one.",
            step=step,
        )


class CallUnderWay(Conflict):
    """The first call with this Idempotency-Key is not answered yet."""

    passes = True

    def __init__(self) -> None:
        super().__init__("The first call with this Idempotency-Key is still under way. Send it again in a moment.")
