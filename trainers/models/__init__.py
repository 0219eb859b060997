"""Policies and tokenizers: the quickstart model that agentkit builds itself, and loading of any other."""

from agentkit.model_files import model_directory
from agentkit.trainers.models.load import load_policy, load_tokenizer
from agentkit.trainers.models.quickstart import build_quickstart

__all__ = ["build_quickstart", "load_policy", "load_tokenizer", "model_directory"]
