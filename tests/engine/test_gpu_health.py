"""A step that failed, and a device that fails whatever it is told to do."""

from typing import Any

import pytest
import torch
from torch import Tensor

from loraplex.engine.gpu import pinned
from loraplex.engine.gpu.choices import Chosen
from loraplex.engine.gpu.health import DeviceLostError, watched
from loraplex.engine.gpu.load import _free_bytes

ILLEGAL = "CUDA error: an illegal memory access was encountered"


class Lost:
    """A device after a fault that stays."""

    def synchronize(self) -> None:
        raise RuntimeError(ILLEGAL)


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> Lost:
    device = Lost()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", device.synchronize)
    return device


def test_a_lost_device_ends_the_process(lost: Lost) -> None:
    """The engine's loop answers exceptions with failed requests, and goes on."""
    with pytest.raises(DeviceLostError, match="an illegal memory access") as found, watched():
        raise RuntimeError(ILLEGAL)
    assert not isinstance(found.value, Exception)


def test_the_engine_lets_it_pass(rig: Any, stand_in: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*_: Any) -> None:
        raise DeviceLostError

    subject = rig(late=True)
    monkeypatch.setattr(subject.executor, "launch", launch)
    subject.add(stand_in.request("a", 1))
    with pytest.raises(DeviceLostError):
        subject.step()


def test_it_is_heard_of_where_tokens_are_waited_for(lost: Lost) -> None:
    event: Any = lost
    with pytest.raises(DeviceLostError):
        Chosen(torch.zeros(1, dtype=torch.int32), event).result()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, ValueError])
def test_other_errors_pass(lost: Lost, error: type[Exception]) -> None:
    with pytest.raises(error), watched():
        raise error


def test_a_step_that_failed_on_a_device_that_works(
    lost: Lost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with pytest.raises(RuntimeError, match="shapes"), watched():
        raise RuntimeError("shapes")


def test_without_a_device() -> None:
    with pytest.raises(RuntimeError, match="shapes"), watched():
        raise RuntimeError("shapes")


class Cudart:
    """Takes down what is pinned."""

    def __init__(self) -> None:
        self.pinned: list[tuple[int, int, int]] = []

    def cudaHostRegister(self, *of: int) -> int:
        self.pinned.append(of)
        return 0


def test_no_more_is_pinned_than_blocks_take(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart, checked = Cudart(), []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "check_error", checked.append)
    host: Tensor = pinned.pinned_blocks(5, 96, torch.device("cuda"))
    assert cudart.pinned == [(host.data_ptr(), 5 * 96, 0)] and checked == [0]
    assert host.shape == (5, 96)
    for count, device in ((0, "cuda"), (5, "cpu")):
        assert pinned.pinned_blocks(count, 96, torch.device(device)).shape == (count, 96)
    assert len(cudart.pinned) == 1


def test_what_loading_took_for_a_while_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("emptied"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (done.append("measured") or 7, 9))
    assert _free_bytes("cuda") == 7 and done == ["emptied", "measured"]
