"""Artifacts: whole or not there, through kills at any moment; damage is named; nothing young is swept."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import threading
import time
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loop_dagster.errors import ArtifactTorn, BadRequest, LeaseLost, NotFound
from loop_dagster.store.artifacts import MANIFEST, Artifacts, scan_folder
from loop_dagster.store.leases import Leases
from loop_dagster.store.registry import Registry

CONTENT = {"adapter_model.safetensors": b"\x00weights" * 1_000, "adapter_config.json": b"{}", "sub/empty": b""}


@pytest.fixture
def artifacts(home: Path) -> Artifacts:
    return Artifacts(home / "artifacts")


def fill(folder: Path, content: dict[str, bytes] | None = None) -> Path:
    for name, data in (CONTENT if content is None else content).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def mine() -> None:
    """A lease that is still valid."""


def test_keep_and_open(artifacts: Artifacts) -> None:
    folder = fill(artifacts.private("t1"))
    digest = artifacts.keep(folder, still_mine=mine)
    assert not folder.exists()
    opened = artifacts.open(digest, verify=True)
    assert {name: (opened / name).read_bytes() for name in CONTENT} == CONTENT
    assert artifacts.list() == (digest,)
    assert artifacts.has(digest)
    assert artifacts.size(digest) == sum(map(len, CONTENT.values()))


def test_the_digest_is_what_the_words_say(artifacts: Artifacts) -> None:
    whole = hashlib.sha256()
    for name in sorted(CONTENT, key=str.encode):
        for part in (name.encode(), CONTENT[name]):
            whole.update(len(part).to_bytes(8, "big") + part)
    assert artifacts.keep(fill(artifacts.private("t")), still_mine=mine) == whole.hexdigest()


names = st.text("abc/", min_size=1, max_size=5).filter(lambda name: "//" not in name and name.strip("/") == name)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    one=st.dictionaries(names, st.binary(max_size=6), min_size=1, max_size=3),
    two=st.dictionaries(names, st.binary(max_size=6), min_size=1, max_size=3),
)
def test_digests_are_equal_only_for_equal_folders(
    tmp_path_factory: pytest.TempPathFactory, one: dict[str, bytes], two: dict[str, bytes]
) -> None:
    digests = []
    for content in (one, two):
        if any(other.startswith(f"{name}/") for name in content for other in content):
            return  # a file cannot be a folder as well
        digests.append(scan_folder(fill(tmp_path_factory.mktemp("folder"), content)).digest)
    assert (digests[0] == digests[1]) == (one == two)


def test_the_same_content_twice(artifacts: Artifacts) -> None:
    first = artifacts.keep(fill(artifacts.private("t1")), still_mine=mine)
    again = fill(artifacts.private("t2"))
    assert artifacts.keep(again, still_mine=mine) == first
    assert not again.exists()
    assert artifacts.list() == (first,)


def test_many_keep_the_same_at_once(artifacts: Artifacts) -> None:
    kept: list[str] = []
    barrier = threading.Barrier(6)

    def race(number: int) -> None:
        folder = fill(artifacts.private(f"t{number}"))
        barrier.wait()
        kept.append(artifacts.keep(folder, still_mine=mine))

    threads = [threading.Thread(target=race, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(kept) == 6
    assert artifacts.list() == (kept[0],)
    artifacts.open(kept[0], verify=True)


def test_nothing_is_kept_without_the_lease(artifacts: Artifacts, sqlite_registry: Registry) -> None:
    leases = Leases(sqlite_registry)
    folder = fill(artifacts.private("t1"))
    with pytest.raises(LeaseLost), leases.hold("attempt/r") as held:
        leases.revoke("attempt/r")
        artifacts.keep(folder, still_mine=held.verify)
    assert artifacts.list() == ()
    assert folder.exists()
    with leases.hold("attempt/r") as held:
        assert artifacts.list() == ()
        digest = artifacts.keep(folder, still_mine=held.verify)
    artifacts.open(digest, verify=True)


def test_folders_that_cannot_be_kept(artifacts: Artifacts, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="holds no file"):
        artifacts.keep(artifacts.private("empty"), still_mine=mine)
    linked = fill(artifacts.private("linked"))
    (linked / "link").symlink_to(tmp_path)
    with pytest.raises(BadRequest, match="link is neither"):
        artifacts.keep(linked, still_mine=mine)
    with pytest.raises(BadRequest, match="no folder"):
        artifacts.keep(tmp_path / "nothing", still_mine=mine)
    for token in ("../up", "", "a/b", "x" * 81):
        with pytest.raises(BadRequest):
            artifacts.private(token)
    for digest in ("..", "", "A" * 64, "a" * 63):
        with pytest.raises(BadRequest):
            artifacts.open(digest)
    with pytest.raises(NotFound):
        artifacts.open("0" * 64)
    assert not artifacts.has("0" * 64)
    assert artifacts.list() == ()


def test_a_folder_on_another_file_system(artifacts: Artifacts, tmp_path: Path) -> None:
    elsewhere = Path("/dev/shm")
    if not elsewhere.is_dir() or elsewhere.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("this machine has one file system only")
    folder = elsewhere / f"loop-test-{os.getpid()}"
    fill(folder)
    try:
        artifacts.open(artifacts.keep(folder, still_mine=mine), verify=True)
    finally:
        for name in CONTENT:
            (folder / name).unlink()
        (folder / "sub").rmdir()
        folder.rmdir()


@pytest.mark.parametrize(
    ("damage", "named", "cheap"),
    [
        (lambda folder: (folder / "adapter_config.json").unlink(), "adapter_config.json has no bytes, needed 2", True),
        (lambda folder: os.truncate(folder / "adapter_model.safetensors", 10), "safetensors has 10 bytes", True),
        (lambda folder: (folder / "more").write_bytes(b"x"), "more has 1 bytes, needed none", True),
        (lambda folder: (folder / MANIFEST).unlink(), "its list of files cannot be read", True),
        (lambda folder: (folder / MANIFEST).write_text("{"), "its list of files cannot be read", True),
        (lambda folder: (folder / MANIFEST).write_text('{"digest": "a", "files": {}}'), "belongs to a", True),
        (lambda folder: (folder / "adapter_config.json").write_bytes(b"[]"), "no longer make its digest", False),
    ],
)
def test_damage_is_named(artifacts: Artifacts, damage: object, named: str, cheap: bool) -> None:
    digest = artifacts.keep(fill(artifacts.private("t1")), still_mine=mine)
    assert callable(damage)
    damage(artifacts.root / digest)
    with pytest.raises(ArtifactTorn) as caught:
        artifacts.open(digest, verify=not cheap)
    assert digest in caught.value.message
    assert named in caught.value.message
    assert artifacts.has(digest) == (not cheap)
    if cheap:  # keeping the same content puts it right
        assert artifacts.keep(fill(artifacts.private("t2")), still_mine=mine) == digest
        artifacts.open(digest, verify=True)


def test_delete_and_sweep(artifacts: Artifacts) -> None:
    digests = [
        artifacts.keep(fill(artifacts.private(f"t{number}"), {"w": bytes([number])}), still_mine=mine)
        for number in range(4)
    ]
    fill(artifacts.private("running"))
    fill(artifacts.private("gone"))
    assert artifacts.delete(digests[0])
    assert not artifacts.delete(digests[0])
    assert artifacts.sweep({digests[1]}) == ()  # all are young
    assert set(artifacts.list()) == set(digests[1:])
    assert set(artifacts.sweep({digests[1]}, tokens={"running"}, grace_s=-1)) == set(digests[2:])
    assert artifacts.list() == (digests[1],)
    artifacts.open(digests[1], verify=True)
    assert [path.name for path in (artifacts.root / ".work").iterdir()] == ["running"]
    assert list((artifacts.root / ".trash").iterdir()) == []


def test_keeping_again_makes_it_young(artifacts: Artifacts) -> None:
    digest = artifacts.keep(fill(artifacts.private("t1")), still_mine=mine)
    os.utime(artifacts.root / digest, (0, 0))
    artifacts.keep(fill(artifacts.private("t2")), still_mine=mine)
    assert artifacts.sweep(set()) == ()
    os.utime(artifacts.root / digest, (0, 0))
    assert artifacts.sweep(set()) == (digest,)


def keep_until_killed(root: str, acknowledged: str, seed: int) -> None:
    artifacts = Artifacts(Path(root))
    out = os.open(acknowledged, os.O_WRONLY | os.O_APPEND)
    rng = random.Random(seed)
    for number in range(100_000):
        content = {f"part{part}": rng.randbytes(rng.randrange(200_000)) for part in range(4)}
        digest = artifacts.keep(fill(artifacts.private(f"t{seed}-{number}"), content), still_mine=mine)
        os.write(out, f"{digest}\n".encode())


def test_killed_in_the_middle_of_keep(artifacts: Artifacts, processes: ForkServerContext, tmp_path: Path) -> None:
    acknowledged = tmp_path / "acknowledged"
    acknowledged.touch()
    rng = random.Random(5)
    for seed in range(6):
        enough = acknowledged.stat().st_size + 65 * rng.randrange(1, 4)
        child = processes.Process(target=keep_until_killed, args=(str(artifacts.root), str(acknowledged), seed))
        child.start()
        give_up = time.monotonic() + 60
        while acknowledged.stat().st_size < enough:
            assert time.monotonic() < give_up
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.02))
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join()
    promised = set(acknowledged.read_text().split())
    stored = set(artifacts.list())
    assert len(promised) >= 6
    assert promised <= stored
    assert len(stored) <= len(promised) + 6
    for digest in stored:
        artifacts.open(digest, verify=True)
    artifacts.sweep(stored, grace_s=-1)
    assert list((artifacts.root / ".work").iterdir()) == []
    assert set(artifacts.list()) == stored


def keep_and_die(root: str, seed: int) -> None:
    artifacts = Artifacts(Path(root))
    folder = fill(artifacts.private("t"), {"weights": random.Random(seed).randbytes(10_000)})
    artifacts.keep(folder, still_mine=lambda: os.kill(os.getpid(), signal.SIGKILL))


def test_killed_just_before_the_rename_and_asked_again(artifacts: Artifacts, processes: ForkServerContext) -> None:
    child = processes.Process(target=keep_and_die, args=(str(artifacts.root), 1))
    child.start()
    child.join(30)
    assert child.exitcode == -signal.SIGKILL
    assert artifacts.list() == ()
    digest = artifacts.keep(artifacts.private("t"), still_mine=mine)  # the dead one's lock is free
    assert artifacts.open(digest, verify=True).joinpath("weights").stat().st_size == 10_000
