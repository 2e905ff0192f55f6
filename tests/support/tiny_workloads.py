"""Networks and settings small enough to be timed in milliseconds."""

import torch

from llqr.lab.bench.workload import Network, Workload
from llqr.lab.passes import Precision

CNN = "cnn:image_size=4,width=2,classes=3"
MLP = "mlp:image_size=2,hidden=[4],classes=3"
VIT = "vit-ti:image_size=8,patch=4,depth=1,dim=6,classes=3"
FP32 = Precision("fp32", torch.device("cpu"))


def workload(network: str = CNN, batch: int = 4) -> Workload:
    return Workload(Network.parse(network), batch, FP32)
