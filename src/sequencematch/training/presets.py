"""The paper's settings, by name (§6, App. E)."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

#: The paper's recipes for one process; for n, divide the batch size by n. Comments mark values not in the paper. Choices of method
#: (`model_value_from`, `noise_excludes_right`) keep their defaults, since they would be refused with some objectives and datasets.
PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "text": MappingProxyType(
            {
                "alpha": 0.01,
                "gamma": 0.998,
                "noise_rate": 0.001,
                "bc_steps": 1000,
                "bc_anneal_steps": 2000,
                "max_steps": 5000,
                "max_length": 1024,
                "max_prompt_length": 256,
                "max_completion_length": 512,
                "per_device_train_batch_size": 32,
                "learning_rate": 2e-4,  # not given; QLoRA's
                "lr_scheduler_type": "cosine",
                "warmup_steps": 2000,
            }
        ),
        "arithmetic": MappingProxyType(
            {
                "alpha": 0.01,  # given for text only
                "gamma": 0.998,  # given for text only
                "noise_rate": 0.1,  # several levels are compared
                "noise_source": "tokens",
                "bc_steps": 10000,
                "bc_anneal_steps": 2000,
                "max_steps": 15000,  # not given; past the anneal of 2,000
                "max_length": 128,  # not given
                "max_completion_length": 32,  # not given
                "completion_only_loss": True,
                "per_device_train_batch_size": 32,
                "learning_rate": 2e-4,  # not given; QLoRA's
                "lr_scheduler_type": "cosine",
                "warmup_steps": 2000,
            }
        ),
    }
)
