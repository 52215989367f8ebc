"""A plugin of vLLM (group vllm.general_plugins) for machines with fewer cores than engines. It changes when threads run, and nothing that they compute.

NIXL's progress thread polls with a timeout of `pthrDelay`, which NIXL's Python API sets to 0: the thread of each engine keeps a core busy for ever.
Here it is 1000 microseconds. The thread still wakes at once when something arrives.

On a CPU the NIXL connector binds an engine's main thread to the last core of the machine. Here it is bound to none, or all engines would share one core.
"""

import sys

PROGRESS_DELAY = 1000  # microseconds


def register():
    from nixl._api import nixl_agent
    from vllm.platforms.cpu import CpuPlatform

    bindings = sys.modules[nixl_agent.__module__].nixlBind
    stock = bindings.nixlAgentConfig
    if stock.__name__ == "PatientConfig":
        return

    class PatientConfig(stock):
        @property
        def pthrDelay(self):
            return stock.pthrDelay.__get__(self)

        @pthrDelay.setter
        def pthrDelay(self, delay):
            stock.pthrDelay.__set__(self, max(delay, PROGRESS_DELAY))

    bindings.nixlAgentConfig = PatientConfig
    CpuPlatform.discover_numa_topology = classmethod(lambda cls: [])
