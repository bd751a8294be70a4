"""Lets torchvision's wheel, which is built for CUDA, be imported beside a CPU build of torch: declares the operators that it looks for.

Imported at the start of every process of the environment (cpu_torchvision.pth); costs nothing until torchvision is imported.
"""

import importlib.abc
import sys


class _Declare(importlib.abc.MetaPathFinder):
    library = None

    def find_spec(self, name, path, target=None):
        if name == "torchvision" and self.library is None:
            import torch

            self.library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                self.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, _Declare())
