"""What Headway asks of an inference server, as tests that every server passes: the embedded engine always, SGLang by `make test-sglang`."""
