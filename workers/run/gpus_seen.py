"""Prints what an interpreter's torch sees of a node's GPUs, as one JSON object. Run by its path, in any environment with torch: it imports nothing
of ours."""

import contextlib
import ctypes
import json
import re

DRIVER = "/proc/driver/nvidia/version"


def look() -> dict:
    """`torch`, the CUDA it is built for ('': none), its `nccl` and the node's `driver` ('': none), and the `gpus`: name, compute capability, and
    place on the bus, '0000:3b:00.0'; `error`: what CUDA said where it does not start. Makes no context on any GPU."""
    import torch

    built = torch.version.cuda or torch.version.hip or ""
    gpus, error = [], ""
    try:
        for number in range(torch.cuda.device_count()):  # by the driver's own library, which may be older than torch needs
            seen = torch.cuda.get_device_properties(number)
            pci = f"{seen.pci_domain_id:04x}:{seen.pci_bus_id:02x}:{seen.pci_device_id:02x}.0"  # type: ignore[attr-defined]
            gpus.append({"name": seen.name, "capability": [seen.major, seen.minor], "pci": pci})
    except RuntimeError as failed:
        gpus, error = [], str(failed).splitlines()[0]
    return {"torch": torch.__version__, "cuda": built, "nccl": nccl_version(), "driver": driver_version(), "gpus": gpus, "error": error}


def nccl_version() -> str:
    """Of the NCCL that this process has loaded with torch, which may be another than torch was built with; '' where there is none."""
    import torch

    if not (torch.version.cuda or torch.version.hip) or not torch.distributed.is_nccl_available():
        return ""
    number = ctypes.c_int()
    with contextlib.suppress(OSError, AttributeError):  # it is linked into torch
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    if number.value >= 10000:  # as NCCL counts from 2.9 on
        return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"
    return ".".join(map(str, torch.cuda.nccl.version()))


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
