"""Resumes from checkpoints and data that somebody has tampered with; writes what came of each."""

from __future__ import annotations

import io
import pickle
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import numpy

from tests.helpers.examples import with_values
from tests.helpers.jobs import TINY, run
from tests.helpers.text import tokens

STEPS = 2


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.target), "w")


def write_corpus(prefix: Path, num_documents: int, *, plus: int = 0) -> None:
    """An indexed data set of pieces of a text, and others of the same size."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.int32)
    for document in tokens()[: 200 * num_documents].split(200):
        builder.add_document((document + plus) % 128, [200])
    builder.finalize(f"{prefix}.idx")


class Cases:
    """One run that saved a checkpoint, and resumes from spoilt copies of it."""

    def __init__(self, output: Path) -> None:
        self.output, self.told = output, {}
        self.prefix = output / "data"
        self.touched = output / "touched"
        write_corpus(self.prefix, 60)
        base = with_values(TINY, {"--data-path": str(self.prefix)})
        self.base = " ".join([*base, "--split 1,0,0"])
        self.save = output / "save"
        self.train(STEPS, "--save", str(self.save))

    def train(self, steps: int, *flags: str, out: Any = None) -> list[dict[str, Any]]:
        more = [*flags, "--exit-interval", str(steps), "--train-iters", "4"]
        return run(more, self.output / "run", base=self.base, out=out)

    def resume(self, name: str, save: Path, *flags: str) -> None:
        """Writes down how a resume ends: an error, or the iterations done."""
        from megatron.trainer.common.errors import TrainingFailure, UsageError
        from megatron.trainer.distributed.process_groups import destroy_groups

        said, losses = io.StringIO(), []
        try:
            steps = self.train(4, "--load", str(save), *flags, out=said)
            result: Any = [step["iteration"] for step in steps]
            losses = [step["losses"] for step in steps[-2:]]
        except (TrainingFailure, UsageError) as error:
            result = f"{type(error).__name__}: {error}"
            destroy_groups()
        self.told[name] = {"result": result, "touched": self.touched.exists(), "losses": losses}
        self.told[name]["notes"] = [x for x in said.getvalue().splitlines() if "note:" in x]
        self.touched.unlink(missing_ok=True)

    def copy(self, name: str) -> tuple[Path, Path]:
        """A copy of the checkpoint: its root and its folder."""
        from megatron.trainer.checkpoint import files

        root = self.output / name
        shutil.copytree(self.save, root)
        return root, files.folder_of(root, STEPS)

    def seal(self, folder: Path) -> None:
        """Makes a manifest that lists what is there, as whoever tampers would."""
        from megatron.trainer.checkpoint import files

        (folder / files.MANIFEST).unlink()
        sums = files.checksums(folder, files.data_files(folder))
        files.write_manifest(folder, STEPS, sums)

    def control(self, name: str, unpickle: Any) -> None:
        """Proves that the harm would be done."""
        unpickle()
        self.told[name] = {"result": None, "touched": self.touched.exists()}
        self.touched.unlink(missing_ok=True)


def tamper_with_pickles(cases: Cases) -> None:
    """Index and common state that run code."""
    import torch

    from megatron.trainer.checkpoint.load import read_arguments
    from megatron.trainer.common.errors import TrainingFailure

    payload = pickle.dumps(Evil(cases.touched))
    cases.control("control index", lambda: pickle.loads(payload))
    root, folder = cases.copy("index")
    (folder / ".metadata").write_bytes(payload)
    cases.seal(folder)
    cases.resume("index", root)
    root, folder = cases.copy("common")
    torch.save({"args": Evil(cases.touched)}, folder / "common.pt")
    path = folder / "common.pt"
    cases.control("control common", lambda: torch.load(path, weights_only=False))
    cases.seal(folder)
    cases.resume("common", root)
    try:
        read_arguments(root, step=None)
    except TrainingFailure as error:
        cases.told["common arguments"] = {"result": str(error), "touched": cases.touched.exists()}


def tamper_with_objects(cases: Cases) -> None:
    """Stored objects that run code, in a checkpoint that is whole otherwise."""
    import torch
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    from megatron.trainer.checkpoint import files
    from megatron.trainer.checkpoint import save as checkpoint
    from megatron.trainer.checkpoint.safe_index import COMMON_KEY, read_index

    plain = checkpoint.model_state

    def with_evil(*args: Any, **kwargs: Any) -> Any:
        state = plain(*args, **kwargs)
        for value in state["model"].values():
            if isinstance(value, ShardedObject):
                value.data = Evil(cases.touched)
        return state

    root = cases.output / "objects"
    with mock.patch.object(checkpoint, "model_state", with_evil):
        cases.train(STEPS, "--save", str(root))
    folder = files.folder_of(root, STEPS)
    index = read_index(folder / ".metadata")
    entries, places = index.state_dict_metadata, index.storage_data or {}
    of_bytes = {key for key, entry in entries.items() if type(entry) is BytesStorageMetadata}
    where = next(w for k, w in places.items() if k.fqn in of_bytes and k != COMMON_KEY)
    data = (folder / where.relative_path).read_bytes()
    blob = io.BytesIO(data[where.offset : where.offset + where.length])
    cases.control("control objects", lambda: torch.load(blob, weights_only=False))
    cases.resume("objects", root)


def tamper_with_places(cases: Cases) -> None:
    """An index that sends to a file outside, and a link in place of a file."""
    root, folder = cases.copy("places")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for where in metadata.storage_data.values():
        where.relative_path = f"../../save/iter_{STEPS:07d}/{where.relative_path}"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    cases.seal(folder)
    cases.resume("places", root)
    root, folder = cases.copy("link")
    data = next(folder.glob("*.distcp"))
    shutil.move(data, cases.output / data.name)
    data.symlink_to(cases.output / data.name)
    cases.resume("link", root)


def change_data(cases: Cases) -> None:
    from tests.helpers.checkpoints import edit_common

    root, folder = cases.copy("old")

    def without_data(common: dict[str, Any]) -> dict[str, Any]:
        del common["copus"]["data"]
        return common

    edit_common(folder, without_data)
    cases.seal(folder)
    # Megatron-LM has no entry of ours, no manifest, and leaves open what it does not need.
    theirs, folder = cases.copy("theirs")

    def as_theirs(common: dict[str, Any]) -> dict[str, Any]:
        del common["copus"]
        vars(common["args"]).update(num_query_groups=1, kv_channels=None, ffn_hidden_size=None)
        return common

    edit_common(folder, as_theirs)
    (folder / "manifest.json").unlink()
    cases.resume("of Megatron-LM", theirs)
    cases.resume("same data", cases.save)
    _use_data_otherwise(cases)
    write_corpus(cases.prefix, 60, plus=1)
    cases.resume("same size", cases.save)
    cases.resume("same size allowed", cases.save, "--allow-changed-data")
    write_corpus(cases.prefix, 70)
    cases.resume("other data", cases.save)
    cases.resume("other data allowed", cases.save, "--allow-changed-data")
    cases.resume("other data, another run", cases.save, "--finetune")
    cases.resume("old checkpoint", root)


def _use_data_otherwise(cases: Cases) -> None:
    """The same data set at other places, and another use of it."""
    import os

    new = cases.output / "new"
    new.mkdir()
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{cases.prefix}{suffix}", new / f"renamed{suffix}")
        (new / f"link{suffix}").symlink_to(f"{cases.prefix}{suffix}")
    places = {
        "moved": str(new / "renamed"),
        "linked": str(new / "link"),
        "relative": os.path.relpath(cases.prefix),
    }
    for name, prefix in places.items():
        cases.resume(name, cases.save, "--data-path", prefix)
    cases.resume("weighted", cases.save, "--data-path", "3", str(cases.prefix))
    cases.resume("twice", cases.save, "--data-path", str(cases.prefix), str(cases.prefix))
    cases.resume("by split", cases.save, "--data-path", "--train-data-path", str(cases.prefix))
    cases.resume("other split", cases.save, "--split", "80,20,0")
    cases.resume("other split allowed", cases.save, "--split", "80,20,0", "--allow-changed-data")
    cases.resume("same split", cases.save, "--split", "100,0,0")


def main(output: Path) -> Any:
    cases = Cases(output)
    tamper_with_pickles(cases)
    tamper_with_objects(cases)
    tamper_with_places(cases)
    change_data(cases)
    leave_out_the_optimizer(cases)
    return cases.told


def leave_out_the_optimizer(cases: Cases) -> None:
    """Checkpoints without its state."""
    root = cases.output / "weights"
    cases.train(STEPS, "--save", str(root), "--no-save-optim")
    cases.resume("weights", root)
    cases.resume("weights, new moments", root, "--no-load-optim")
