"""Prints the payload of /update_weights_from_tensor with a folder's tensors: a pickle with handles of shared memory. Run by SGLang's interpreter.

    python tensor_payload.py FOLDER named|flattened_bucket      lives until stdin ends, as the memory does
"""

import sys
from pathlib import Path

import torch.multiprocessing
from safetensors.torch import load_file
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

torch.multiprocessing.set_sharing_strategy("file_system")
tensors = list(load_file(Path(sys.argv[1]) / "model.safetensors").items())
if sys.argv[2] == "flattened_bucket":
    bucket = FlattenedTensorBucket(named_tensors=tensors)
    payload = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
else:
    payload = tensors
print(MultiprocessingSerializer.serialize(payload, output_str=True), flush=True)
sys.stdin.read()
