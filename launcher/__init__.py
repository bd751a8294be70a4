"""The login node's part: compose the config, split the devices, submit the jobs, watch. No torch, no zmq."""
