"""One rank of Megatron-LM's own program: alone, or under `copus_ext.megatron_lm`. Without a GPU, or
the stub of one, a stand-in for CUDA lets it run on the CPU.

rank.py [SCRIPT OF A CHECKOUT] plain|copus|alternating|moving=CHANGES|per_sample=FILE FLAGS...
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import runpy
import sys
import sysconfig
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from multiprocessing import spawn
from pathlib import Path
from typing import Any

_NEED_TRITON = (
    "megatron.core.transformer.moe.ops.paged_stash",
    "megatron.core.transformer.custom_layers.batch_invariant_kernels",
)
"""Modules of a core that import it without a guard: of 0.19, and of 0.16."""


def use_checkout(root: Path) -> None:
    """Gives the core of a checkout what is compiled or missing here, and writes nothing into it:
    the module of the installed core, and a stand-in where Triton is imported without a guard."""
    datasets = Path(sysconfig.get_paths()["purelib"]) / "megatron" / "core" / "datasets"
    _load("megatron.core.datasets.helpers_cpp", next(datasets.glob("helpers_cpp*.so")))
    files = {root / f"{name.replace('.', '/')}.py": name for name in _NEED_TRITON}
    stand_in = {"triton": "triton_stand_in", "triton.language": "triton_stand_in.language"}
    for file, name in files.items() if not find_spec("triton") else ():
        if file.exists():
            sys.modules |= {key: importlib.import_module(x) for key, x in stand_in.items()}
            _load(name, file)
            for triton in stand_in:  # else torch would take it for Triton
                del sys.modules[triton]
    utils: Any = importlib.import_module("megatron.core.datasets.utils")
    utils.compile_helpers = lambda: None
    with contextlib.suppress(ImportError):  # of 0.16 and before; a compiler of CUDA builds them
        kernels: Any = importlib.import_module("megatron.legacy.fused_kernels")
        kernels.load = lambda args: None
    experts: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(experts, "te_general_gemm"):  # 0.16 asks for it without Transformer Engine, too
        experts.te_general_gemm = None
    # Helpers of a save would import the script anew, without the stand-in.
    spawn.get_preparation_data = functools.partial(_without_script, spawn.get_preparation_data)


def _without_script(plain: Any, name: str) -> dict[str, Any]:
    return {key: value for key, value in plain(name).items() if key != "init_main_from_path"}


def _load(name: str, file: Path) -> None:
    spec = spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = module_from_spec(spec)
    spec.loader.exec_module(module)


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from tests.guest import cuda_on_cpu

    script, words = str(Path(__file__).with_name("pretrain_script.py")), sys.argv[1:]
    if words[0].endswith(".py"):
        script = words.pop(0)
        use_checkout(Path(script).parent)
    if not importlib.import_module("torch").cuda.is_available():
        cuda_on_cpu.install()
    kind, *flags = words
    if kind == "plain" or kind.startswith("per_sample="):
        sys.argv = [script, *flags]
        sys.path.insert(0, str(Path(script).parent))
        if kind != "plain":
            from tests.guest import per_sample

            file = Path(kind.removeprefix("per_sample="))
            per_sample.write(file, importlib.import_module("megatron.training.training"))
        runpy.run_path(script, run_name="__main__")
    else:
        from copus_ext.controller import link_timing
        from copus_ext.megatron_lm.__main__ import main

        # What a GPU is timed with would keep a core busy for half a minute.
        sizes: Any
        for sizes in (link_timing._PRODUCT, link_timing._BYTES):
            sizes["cuda"] = sizes["cpu"]
        if kind == "alternating":
            from tests.guest.alternating import alternate

            alternate()
        elif kind != "copus":
            from tests.guest.moving import follow

            follow(kind.removeprefix("moving="))
        sys.exit(main([script, *flags]))
