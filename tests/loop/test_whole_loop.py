"""The main job, end to end: real daemon, real sensors, real rules, a real (tiny) model."""

from __future__ import annotations

import dagster as dg
import pytest
import tiny

pytestmark = pytest.mark.loop


def shown_in_dagster(installation):
    """Metadata of the report asset, as its page in Dagster's UI has it."""
    with dg.DagsterInstance.from_config(str(installation.home / "dagster")) as instance:
        event = instance.get_latest_materialization_event(dg.AssetKey("report"))
    return event.asset_materialization.metadata


def test_a_file_of_conversations_becomes_a_live_version(installation, tiny_model, conversations):
    loop = installation.loop
    made = loop(
        *("pipelines", "create", "--name", "Facts", "--model", str(tiny_model)),
        # Enough passes for every seed: a pipeline draws its own.
        *("--epochs", "8", "--learning-rate", "0.005", "--json"),
    )
    assert made.data["tag"] == "facts"

    imported = loop("import", str(conversations), "--pipeline", "facts", "--default-feedback", "good", "--json").data
    assert (imported["imported"], imported["reviewed"], imported["refused"]) == (1100, 1100, 0)

    loop("run", "--until-idle", "--json")

    attempts = loop("attempts", "list", "--json").data
    assert attempts["total"] == 1
    attempt = attempts["attempts"][0]
    assert attempt["outcome"] == "became_version", attempt["reason"]
    assert (attempt["attempt"], attempt["version"], attempt["state"]) == (1, 1, "promoted")
    assert (attempt["train_rows"], attempt["holdout_rows"]) == (1000, 100)
    assert (attempt["trigger"], attempt["verdict"], attempt["decision"]) == ("data", "better", "auto_promoted")
    assert attempt["compared_with"] == "original"
    assert attempt["candidate_pass_rate"] > attempt["incumbent_pass_rate"]

    shown = loop("attempts", "show", attempt["run_id"], "--json").data
    assert [bar["key"] for bar in shown["bars"]] == [
        *("rows_scored", "failures", "rubric", "mean_change", "win_rate", "beyond_chance"),
    ]
    assert all(bar["met"] for bar in shown["bars"])
    assert shown["timeline"][0]["state"] == "built"
    assert shown["timeline"][-1]["state"] == "promoted"

    report = loop("report", "1", "--json").data
    assert (report["evaluation"]["verdict"], report["evaluation"]["rows_scored"], report["total"]) == (
        "better",
        100,
        100,
    )
    assert {item["trace_id"] is None for item in report["items"]} == {False}
    page = loop("report", attempt["run_id"], "--html", "--out", "-").text
    assert "<h1>Better than the base model</h1>" in page
    assert shown_in_dagster(installation)["page"].value == (
        f"http://127.0.0.1:{installation.port}/reports/{attempt['pipeline_id']}/0001"
    )

    fact = tiny.facts(220, seed=1)[7]
    question, _ = tiny.conversation(fact, 0)
    said = loop("ask", "facts", question[0]["content"], "--json").data
    assert said["version"] == 1
    assert said["answer"].startswith("The ")  # a tiny model keeps the form more surely than the fact

    states = loop("samples", "counts", "facts", "--json").data["states"]
    assert states == {"held_back": 100, "learned": 1000}

    # Doing everything again changes nothing.
    again = loop("import", str(conversations), "--pipeline", "facts", "--default-feedback", "good", "--json").data
    assert (again["imported"], again["already_present"], again["reviewed"]) == (0, 1100, 0)
    assert loop("run", "--until-idle", "--json").data["total"] == 0
    assert loop("attempts", "list", "--json").data["total"] == 1
