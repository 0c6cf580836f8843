"""Before Train now opens an attempt the judge is asked once; what its silence means is said by code."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import SecretStr
from stub_judge import KEY, Reply, StubJudge, completion, rating

from loop_dagster.errors import AgentCouldNotStart, Refused
from loop_dagster.models import judge_ready
from loop_dagster.models.judge_ready import check_judge
from loop_dagster.settings import Settings


def settings_of(home: Path, url: str | None) -> Settings:
    return Settings(home=home, judge="openai", judge_url=url, judge_model="judge-1", judge_api_key=SecretStr(KEY))


def test_a_judge_that_answers_is_asked_once(home: Path) -> None:
    with StubJudge(lambda _: completion(rating(10))) as stub:
        check_judge(settings_of(home, stub.url))
        assert len(stub.seen) == 1
    check_judge(Settings(home=home))  # the embedded one needs nobody


@pytest.mark.parametrize(
    ("status", "code"), [(401, "AGENT_OFF"), (403, "AGENT_OFF"), (404, "AGENT_OFF"), (402, "SCORING_CAPPED")]
)
def test_what_it_refuses_is_said(home: Path, status: int, code: str) -> None:
    with StubJudge(lambda _: Reply(status=status)) as stub, pytest.raises(Refused) as refused:
        check_judge(settings_of(home, stub.url))
    assert refused.value.code == code
    assert "No attempt was opened" in refused.value.message
    assert KEY not in refused.value.message


@pytest.mark.parametrize("reply", [Reply(status=500), Reply(status=None), Reply(status=503)])
def test_one_that_is_away_can_be_asked_again(home: Path, reply: Reply) -> None:
    with StubJudge(lambda _: reply) as stub, pytest.raises(AgentCouldNotStart) as away:
        check_judge(settings_of(home, stub.url))
    assert away.value.code == "AGENT_COULD_NOT_START"


def test_one_that_hangs_is_given_up(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_ready, "PATIENCE_S", 0.2)
    slow = completion(rating(10))
    slow.delay_s = 1.0
    with StubJudge(lambda _: slow) as stub, pytest.raises(AgentCouldNotStart):
        check_judge(settings_of(home, stub.url))


@pytest.mark.parametrize("said", ["I cannot say.", ""])
def test_one_that_is_there_and_babbles_is_left_to_the_comparison(home: Path, said: str) -> None:
    with StubJudge(lambda _: completion(said)) as stub:
        check_judge(settings_of(home, stub.url))


def test_settings_that_name_no_judge_are_said(home: Path) -> None:
    with pytest.raises(Refused) as refused:
        check_judge(settings_of(home, None))
    assert (refused.value.code, "LOOP_JUDGE_URL" in refused.value.message) == ("AGENT_OFF", True)
    with pytest.raises(Refused, match="cannot be imported"):
        check_judge(Settings(home=home, judge="no_such_module:make"))
