"""Prints what an interpreter's torch sees of a node's GPUs, as one JSON object. Run by its path, in any environment with torch: it imports nothing
of ours."""

import json
import re

DRIVER = "/proc/driver/nvidia/version"


def look() -> dict:
    """`torch`, the CUDA it is built for ('': none), its `nccl` and the node's `driver` ('': none), and the `gpus`: name, compute capability, and
    place on the bus, '0000:3b:00.0'. Starts CUDA's driver, but no context on any GPU."""
    import torch

    built = torch.version.cuda or torch.version.hip or ""
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if built and torch.distributed.is_nccl_available() else ""
    gpus = []
    for number in range(torch.cuda.device_count()):
        seen = torch.cuda.get_device_properties(number)
        pci = f"{seen.pci_domain_id:04x}:{seen.pci_bus_id:02x}:{seen.pci_device_id:02x}.0"  # type: ignore[attr-defined]
        gpus.append({"name": seen.name, "capability": [seen.major, seen.minor], "pci": pci})
    return {"torch": torch.__version__, "cuda": built, "nccl": nccl, "driver": driver_version(), "gpus": gpus}


def driver_version(path: str = DRIVER) -> str:
    """Of NVIDIA's kernel module, '' where there is none."""
    try:
        with open(path) as file:
            found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)", file.read())
    except OSError:
        return ""
    return found[1] if found else ""


if __name__ == "__main__":
    print(json.dumps(look()))
