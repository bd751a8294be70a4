"""Lets SGLang keep routed experts on a CPU: it would pin their memory for a GPU, by CUDA, which a CPU build of torch has not.

Imported at the start of every process of the environment (cpu_pinned_memory.pth); costs nothing until SGLang's module is imported.
"""

import importlib.abc
import importlib.util
import sys

MODULE = "sglang.srt.mem_cache.pool_host.common"


class _Unpinned(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            module._cuda_host_register = lambda *arguments, **keywords: None

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Unpinned())
