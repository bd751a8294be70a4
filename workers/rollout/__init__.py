"""The rollout worker: generates samples through an inference server it owns, and follows weight updates."""
