"""Models without training, small enough to be made in a test."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig


def save_model(folder: Path, config: PretrainedConfig) -> None:
    """Save a model with large random weights, the same for the same configuration."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    model.save_pretrained(folder)
