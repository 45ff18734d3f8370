"""Exports the embedded model as a Hugging Face folder in fp32, for other servers than bros.

python benchmarks/peers/export_model.py FOLDER
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from bros.executor.model_store import default_cache_dir, resolve_model

sys.path.append(str(Path(__file__).resolve().parents[1]))

from transformers_reference import load_in_transformers

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def main(folder: Path) -> None:
    files = resolve_model(None, default_cache_dir())
    load_in_transformers(files).save_pretrained(folder)
    copy_tokenizer(files.folder, folder)


def copy_tokenizer(source: Path, folder: Path) -> None:
    for name in _TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copy(source / name, folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    main(parser.parse_args().folder)
