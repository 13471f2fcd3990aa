"""Packaging. `megatron` is a namespace shared with megatron-core: it gets no `__init__.py`."""

import re
from pathlib import Path

from setuptools import find_namespace_packages, setup

SOURCE = (Path(__file__).parent / "copus_ext" / "__init__.py").read_text()
VERSION = re.findall(r'__version__ = "(.+)"', SOURCE)[0]

TRACK = ["tensorboard>=2.17"]
WANDB = ["wandb>=0.18"]
PROMETHEUS = ["prometheus-client>=0.20"]
HF = [
    "transformers>=5",
    "tokenizers>=0.20",
    "sentencepiece>=0.2",
    "tiktoken>=0.8",
    "safetensors>=0.4",
]
# Each release may change the interface that megatron-core uses.
MUON = ["emerging-optimizers==0.3.0; python_version >= '3.12'"]
FIT = ["scipy>=1.13"]
BENCH = ["matplotlib>=3.9", *FIT]
DOCS = ["mkdocs>=1.6,<2", "mkdocs-material>=9.6", "mkdocstrings[python]>=0.30"]

setup(
    name="copus",
    version=VERSION,
    description="Pre-training on megatron-core that adapts batch and parallel layout as it runs",
    long_description=(Path(__file__).parent / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    python_requires=">=3.10",
    packages=find_namespace_packages(include=["megatron.trainer*", "copus_ext*"]),
    package_data={
        "": ["README.md", "data/*.json"],  # of extras, and of the cost model
        "copus_ext.commands": ["data/*.yaml"],
        "megatron.trainer.config": ["*.yaml"],
        "copus_ext.monitor": ["templates/*"],
    },
    entry_points={"console_scripts": ["copus = copus_ext.commands.main:main"]},
    install_requires=[
        # Its releases from 0.17 on need Python 3.12.
        "megatron-core>=0.16.1,<0.20",
        # It imports Triton from 0.18 on, and does not declare it; torch for CPUs has none.
        "triton; python_version >= '3.12' and sys_platform == 'linux'",
        "torch>=2.6",
        "numpy",
        # megatron-core does not declare it, and its checkpoint save hangs without it.
        "psutil",
        "rich>=13",
        "tqdm",
        "packaging>=24.2",
        "pyyaml>=6",
        "jinja2>=3.1",
    ],
    extras_require={
        # Releases of megatron-core from 0.17 on need Python 3.12.
        "gpu": [
            "transformer-engine[pytorch]>=2.9,<2.12; python_version < '3.12'",
            "transformer-engine[pytorch]>=2.11; python_version >= '3.12'",
        ],
        "track": TRACK,
        "wandb": WANDB,
        "prometheus": PROMETHEUS,
        "hf": HF,
        "muon": MUON,
        "fit": FIT,
        "bench": BENCH,
        "docs": DOCS,
        "dev": [
            "pytest>=8",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "hypothesis>=6.100",
            "ruff>=0.12",
            "pyright>=1.1.400",
            "import-linter>=2.3",
            "pydantic>=2.9",
            "jsonschema>=4.20",
            "kubeflow-trainer-api>=2.1",
            "safetensors>=0.4",
            # Tests alone compare with it.
            "transformers>=5",
            "selenium>=4.40",
            *BENCH,
            *DOCS,
            *TRACK,
            *PROMETHEUS,
        ],
    },
)
