"""SGLang as the inference server of a rollout worker: how it is started (start.py, in SGLang's own interpreter) and with what (options.py)."""
