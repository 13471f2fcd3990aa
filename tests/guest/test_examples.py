"""The program of Megatron-LM's examples says what it needs, in one line."""

from __future__ import annotations

import pytest
import torch

from tests.guest import examples


def test_a_torch_for_cuda_without_a_driver_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["examples", "."])
    with pytest.raises(SystemExit) as left:
        examples.main()
    said = capsys.readouterr().err
    assert left.value.code == 2 and said.count("\n") == 1 and "torch's CPU build" in said
