"""Every failure that a person or a script can meet, one class each.

Belongs here: classes built from data whose message says what went wrong, where, what was needed, what was found
and what to do next. Does not belong here: control flow, logging, anything that formats a secret or a sample's text.

`code` is stable and is what scripts branch on; `exit_code` is what the command line returns.
"""

from __future__ import annotations

from loop_dagster.errors.attempts import LiveMoved, LiveUnavailable, MoveNotAllowed, NoReport, NotEnoughSamples
from loop_dagster.errors.base import (
    EXIT_FAILED,
    EXIT_NOT_FOUND,
    EXIT_OK,
    EXIT_REFUSED,
    EXIT_UNAVAILABLE,
    EXIT_USAGE,
    BadRequest,
    Conflict,
    LoopError,
    NotFound,
    Refused,
)
from loop_dagster.errors.calls import CallUnderWay, LabelsMoved, RevisionMismatch
from loop_dagster.errors.judging import (
    AgentCouldNotStart,
    JudgeRefused,
    JudgeRejected,
    JudgeUnavailable,
    JudgeUnreadable,
)
from loop_dagster.errors.stores import (
    ArtifactTorn,
    DiskFull,
    LakeConflict,
    LakeNotWritable,
    LakeOfAnother,
    LakeSchemaMismatch,
    LakeUnreadable,
    LeaseBusy,
    LeaseLost,
    RegistryDamaged,
    RegistryNotReady,
    RegistryNotWritable,
    RegistryTooNew,
    RegistryUnavailable,
)
from loop_dagster.errors.training import (
    AdapterLeaks,
    AdapterRefused,
    BaseChanged,
    ChildFailed,
    ConversationRefused,
    ModelNotTrainable,
    ModelRevisionUnavailable,
    NoLabels,
    NothingToTrain,
    Stopped,
    TrainingDiverged,
    TrainingSettingOutOfRange,
)

__all__ = [
    "EXIT_FAILED",
    "EXIT_NOT_FOUND",
    "EXIT_OK",
    "EXIT_REFUSED",
    "EXIT_UNAVAILABLE",
    "EXIT_USAGE",
    "AdapterLeaks",
    "AdapterRefused",
    "AgentCouldNotStart",
    "ArtifactTorn",
    "BadRequest",
    "BaseChanged",
    "CallUnderWay",
    "ChildFailed",
    "Conflict",
    "ConversationRefused",
    "DiskFull",
    "JudgeRefused",
    "JudgeRejected",
    "JudgeUnavailable",
    "JudgeUnreadable",
    "LabelsMoved",
    "LakeConflict",
    "LakeNotWritable",
    "LakeOfAnother",
    "LakeSchemaMismatch",
    "LakeUnreadable",
    "LeaseBusy",
    "LeaseLost",
    "LiveMoved",
    "LiveUnavailable",
    "LoopError",
    "ModelNotTrainable",
    "ModelRevisionUnavailable",
    "MoveNotAllowed",
    "NoLabels",
    "NoReport",
    "NotEnoughSamples",
    "NotFound",
    "NothingToTrain",
    "Refused",
    "RegistryDamaged",
    "RegistryNotReady",
    "RegistryNotWritable",
    "RegistryTooNew",
    "RegistryUnavailable",
    "RevisionMismatch",
    "Stopped",
    "TrainingDiverged",
    "TrainingSettingOutOfRange",
]
