"""The embedded engine: a CPU inference server, run as a child process, with the subset of SGLang's HTTP API that Headway needs."""
