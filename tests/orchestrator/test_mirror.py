"""Copies of checkpoints elsewhere: complete or not there, and enough to go on from on another machine."""

import asyncio

import fsspec
import pytest

from configs.rules import ConfigError
from orchestrator.checkpoint import fault_of, folder_of
from orchestrator.mirror import Mirror
from orchestrator.ports import WriteFailed
from tests.orchestrator.test_loop import make, run
from tests.orchestrator.test_resume import go_on, names, save


@pytest.fixture(params=["memory", "file"])
def url(request, tmp_path):
    yield f"{request.param}://{tmp_path}/mirror"
    fsspec.filesystem("memory").store.clear()


def test_a_run_goes_on_from_the_copies_on_another_machine(tmp_path, url):
    options = [f"checkpoint.mirror={url}", "checkpoint.every=1", "checkpoint.keep_last=2", "train.resume=auto"]
    here, there, whole = (tmp_path / name for name in ("here", "there", "whole"))
    for folder in (here, there, whole):
        folder.mkdir()
    asyncio.run(run(make(here, *options, "train.num_steps=3"), here))
    assert Mirror(url).steps() == [2, 3]
    Mirror(url).pull(there)
    assert names(there) == ["step-000003"] and not fault_of(folder_of(there, 3))
    _, resumed = asyncio.run(run(make(there, *options, "train.num_steps=5"), there))
    _, undisturbed = asyncio.run(run(make(whole, "train.num_steps=5"), whole))
    assert (resumed.logits == undisturbed.logits).all()
    assert Mirror(url).steps() == [4, 5]
    Mirror(url).pull(there)  # nothing newer
    assert names(there) == ["step-000004", "step-000005"]


def test_half_a_copy_is_none_and_a_damaged_one_is_passed_over(tmp_path, url):
    save(tmp_path / "here", 1, 2)
    mirror = Mirror(url)
    for step in (1, 2):
        mirror.push(folder_of(tmp_path / "here", step))
    filesystem, root = fsspec.core.url_to_fs(url)
    filesystem.rm_file(f"{root}/step-000002/COMPLETE")
    assert mirror.steps() == [1]
    mirror.push(folder_of(tmp_path / "here", 2))
    with filesystem.open(f"{root}/step-000002/learner/bandit.pt", "wb") as file:
        file.write(b"damaged")
    mirror.pull(tmp_path / "there")
    start = go_on(tmp_path / "there")
    assert start.state.step == 1 and "learner/bandit.pt has 7 bytes" in start.notes[0]


def test_a_copy_that_fails_is_told_and_the_checkpoint_stays(tmp_path):
    (tmp_path / "mirror").touch()  # a file where a folder is wanted
    config = make(tmp_path, f"checkpoint.mirror=file://{tmp_path}/mirror", "checkpoint.every=2", "train.num_steps=2")
    with pytest.raises(WriteFailed, match="newest whole one is .*step-000002"):
        asyncio.run(run(config, tmp_path))
    assert not fault_of(folder_of(tmp_path, 2))


def test_an_unknown_place_is_refused():
    with pytest.raises(ConfigError, match="checkpoint.mirror must be a URL that fsspec reaches, got nowhere://x"):
        Mirror("nowhere://x")
