"""Stands in for SGLang's kernels, of which PyPI has no CPU build. SGLang imports names of it at its start; on a CPU it calls none of them."""


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **kwargs: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name}: there is no build for CPUs")

    return missing
