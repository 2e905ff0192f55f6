"""The arithmetic of a run: full float32, float32 with TF32 products, or bf16 autocast."""

from contextlib import AbstractContextManager

import torch


class Precision:
    """``fp32``, ``tf32`` (products in TF32 where the device has it) or ``bf16`` (autocast; weights stay in float32).

    With ``bf16`` what autocast leaves in float32, such as the factors of the metric, uses TF32 products.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self.device = device

    def set_up(self) -> None:
        """Set the switches of the process that this precision means, for the run that begins."""
        allowed = self.name != "fp32"
        torch.backends.cuda.matmul.allow_tf32 = allowed
        torch.backends.cudnn.allow_tf32 = allowed
        torch.backends.cudnn.benchmark = self.device.type == "cuda"

    def autocast(self) -> AbstractContextManager[None]:
        """The context of a forward pass."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.name == "bf16")
