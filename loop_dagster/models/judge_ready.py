"""Whether the judge of the settings would answer now: asked before a person's Train now opens an attempt.

Belongs here: one short real call, and what its failure means for Train now (rules.md, When an attempt starts). Does not
belong here: the doctor's findings (doctor/judge.py), the calls of a comparison.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Final

from loop_dagster.errors import (
    AgentCouldNotStart,
    BadRequest,
    JudgeRefused,
    JudgeRejected,
    JudgeUnavailable,
    JudgeUnreadable,
    Refused,
)
from loop_dagster.models.judge import Case, open_judge

if TYPE_CHECKING:
    from loop_dagster.settings import Settings

#: Seconds for the call: a person waits for it.
PATIENCE_S: Final = 10.0
_ANSWER: Final = {"role": "assistant", "content": "Four."}
_CASE: Final = Case(
    sample_id="ready", messages=[{"role": "user", "content": "What is two and two?"}], right_answer=_ANSWER
)


def check_judge(settings: Settings) -> None:
    """Raise Refused with AGENT_OFF or SCORING_CAPPED, or AgentCouldNotStart, when no comparison could be judged now.

    `openai` is asked once; another judge only has to open. SCORING_CAPPED: no credit is left for the key; the server
    does not say until when.
    """
    try:
        if settings.judge != "openai":
            open_judge(settings)
            return
        _ask(settings)
    except BadRequest as error:
        raise Refused("AGENT_OFF", f"No attempt was opened, since no judge can score it. {error.message}") from None
    except JudgeRefused as error:
        code = "SCORING_CAPPED" if error.details["reason"] == "credit" else "AGENT_OFF"
        said = error.message.partition(" Mend it;")[0]
        raise Refused(code, f"No attempt was opened, since nothing could score it. {said} Mend that first.") from None
    except JudgeUnavailable as error:
        raise AgentCouldNotStart(error.message) from None
    except (JudgeUnreadable, JudgeRejected):
        return  # it is there; what it makes of real samples the comparison shows


def _ask(settings: Settings) -> None:
    from loop_dagster.models.judge_openai import OpenAIJudge

    OpenAIJudge.from_settings(settings).close()  # says what is missing
    assert settings.judge_url and settings.judge_model
    key = settings.judge_api_key.get_secret_value() if settings.judge_api_key is not None else None
    judge = OpenAIJudge(
        url=settings.judge_url, model=settings.judge_model, key=key, timeout_s=PATIENCE_S, tries=1, concurrency=1
    )
    with closing(judge):
        judge.rate(_CASE, _ANSWER)
