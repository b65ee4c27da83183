"""Reads and writes Hugging Face models tensor by tensor, in bounded memory and without GPUs.

Reading gives a `WeightSource`, from which every rank of any layout reads the rectangles of tensors that it holds.
Writing accepts any `WeightSource`, for example a training checkpoint of any layout.
"""

from frontier_llm.interop.huggingface.export import (
    Companions,
    HubRepository,
    check_export,
    export_huggingface,
    family_for,
)
from frontier_llm.interop.huggingface.families import LLAMA_KEYS, Family, register_family
from frontier_llm.interop.huggingface.llama import read_llama_like, read_windowed, write_llama_like
from frontier_llm.interop.huggingface.names import LLAMA, Names
from frontier_llm.interop.huggingface.read import CONFIG, HuggingFaceModel, read_model_config
from frontier_llm.interop.huggingface.tokenizer import tokenizer_files

__all__ = [
    "CONFIG",
    "LLAMA",
    "LLAMA_KEYS",
    "Companions",
    "Family",
    "HubRepository",
    "HuggingFaceModel",
    "Names",
    "check_export",
    "export_huggingface",
    "family_for",
    "read_llama_like",
    "read_model_config",
    "read_windowed",
    "register_family",
    "tokenizer_files",
    "write_llama_like",
]
