from __future__ import annotations

from typing import get_args

from hypothesis import given
from hypothesis import strategies as st

from loop_dagster.rules.explain import explain
from loop_dagster.rules.states import STATES, Decision, TrainingRunState, Verdict, outcome_of


@given(
    st.sampled_from(STATES),
    st.sampled_from([None, *get_args(Verdict)]),
    st.sampled_from([None, *get_args(Decision)]),
    st.booleans(),
    st.booleans(),
    st.none() | st.just("The engine ran out of memory."),
)
def test_every_attempt_can_be_explained(
    state: TrainingRunState,
    verdict: Verdict | None,
    decision: Decision | None,
    trained: bool,
    tested: bool,
    reason: str | None,
) -> None:
    outcome = outcome_of(state, verdict=verdict, decision=decision, trained=trained, tested=tested)
    said = explain(
        state=state,
        outcome=outcome,
        verdict=verdict,
        decision=decision,
        version_no=3 if outcome == "became_version" else None,
        error_code="OUT_OF_MEMORY" if reason else None,
        reason=reason,
    ).as_dict()
    assert said["headline"] and said["detail"]
    assert said["detail"].endswith((".", ")"))
    assert said["next"] is None or said["next"].endswith(".")
    assert "None" not in "".join(text or "" for text in said.values())


def test_what_the_words_say() -> None:
    failed = explain(
        state="failed", outcome="failed", error_code="OUT_OF_MEMORY", reason="The machine ran out of memory."
    )
    assert failed.headline == "Failed"
    assert "The machine ran out of memory. (OUT_OF_MEMORY)" in failed.detail
    assert failed.next is not None
    live = explain(state="promoted", outcome="became_version", verdict="better", decision="auto_promoted", version_no=4)
    assert (live.headline, live.next) == ("Became v4", None)
    approved = explain(state="promoted", outcome="became_version", decision="promoted", version_no=4)
    assert approved.detail.startswith("Somebody approved it")
    back = explain(state="rolled_back", outcome="became_version", decision="rolled_back", version_no=4)
    assert back.headline == "Rolled back v4"
    waits = explain(state="awaiting_review", outcome="waiting_for_review", verdict="inconclusive")
    assert "force" in (waits.next or "")
    late = explain(state="expired", outcome="stopped", verdict="better", decision="expired")
    assert "nobody approved" in late.detail
    running = explain(state="training", outcome="running", reason="Training on 1,000 samples.")
    assert (running.headline, running.detail) == ("Training", "Training on 1,000 samples.")
