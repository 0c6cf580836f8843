"""The doctor in front of real installations: each planted mistake is named alone, with what mends it."""

from __future__ import annotations

import json

import pytest
from doctor_patient import Patient
from doctor_plants import (
    PLANTS,
    Plant,
    empty_commit,
    home_is_elsewhere,
    lake_of_another_home,
    no_model,
    other_dagster_home,
    stale_lease,
    stray_file,
    torn_artifact,
)

from loop_dagster.doctor import CHECKS


def test_a_healthy_installation_is_fine_and_every_look_says_something(patient: Patient) -> None:
    found = patient.doctor()
    assert (found.status, found.but_fine()) == (0, {})
    assert len(found.findings) >= len(CHECKS) - 4  # names, rights and Dagster's own storage have nothing to say
    status, text, _ = patient.loop("doctor")
    assert status == 0
    assert f"{len(found.findings)} looked at: {len(found.findings)} fine. Nothing was changed." in text


@pytest.mark.parametrize("planted", PLANTS, ids=lambda planted: planted.plant.__name__)
def test_a_planted_mistake_is_named_alone_with_what_mends_it(patient: Patient, planted: Plant) -> None:
    planted.plant(patient)
    before = patient.tree()
    found = patient.doctor()
    assert patient.tree() == before, "the doctor changed something"
    named = found.but_fine()
    assert set(named) == {planted.code, *planted.also}
    one = named[planted.code]
    assert one["level"] == planted.level
    assert found.status == (1 if planted.level == "mistake" else 0)
    assert planted.where in one["where"]
    assert planted.mend in one["mend"]
    if planted.cured:
        patient.follow(one["mend"])
        again = patient.doctor()
        assert (again.status, again.but_fine()) == (0, {})


def test_two_homes_are_both_named(patient: Patient) -> None:
    lake_of_another_home(patient)
    [one] = patient.doctor().but_fine().values()
    assert str(patient.home / "registry.db") in one["found"]
    assert str(patient.home.parent / "other" / "registry.db") in one["found"]


def test_many_mistakes_at_once_are_all_named(patient: Patient) -> None:
    for plant in (empty_commit, no_model, torn_artifact, stale_lease, other_dagster_home, stray_file):
        plant(patient)
    named = patient.doctor().but_fine()
    status, text, _ = patient.loop("doctor")
    assert status == 1
    for one in named.values():
        assert f"mend:  {one['mend']}\n" in text  # to be copied: never broken by the width of a table
        assert one["what"] in text
    assert set(named) == {
        "lake_torn",
        "model_missing",
        "artifact_damaged",
        "stale_lease",
        "dagster_home",
        "intake_stray",
    }


def test_a_pad_token_that_is_the_end_token_is_no_mistake(patient: Patient) -> None:
    tokens = json.loads((patient.model / "tokenizer_config.json").read_text())
    assert tokens["pad_token"] == tokens["eos_token"]
    assert patient.doctor().of("model of loop-support, support")["level"] == "fine"


def test_nothing_is_changed_while_others_write(patient: Patient) -> None:
    store = patient.open()
    store.leases.take("lake/default")
    assert (patient.home / "registry.db-wal").exists()
    before = patient.tree()
    assert patient.doctor().status == 0
    assert patient.tree() == before


def test_a_home_that_was_never_made_stays_so(patient: Patient) -> None:
    home_is_elsewhere(patient)
    patient.doctor()
    assert not (patient.home.parent / "hoem").exists()
