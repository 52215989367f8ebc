# A plugin of vLLM 0.32 (vllm.general_plugins) for a MoE model that runs data parallel on a CPU. vLLM itself stays as it is.
#
# vLLM's CpuCommunicator lacks all_gatherv and reduce_scatterv, which such a model calls in every layer. The plugin supplies both by gloo.
#
# If EVENKEEL_STEPS names a file, each rank writes a line for each step to that name with its number behind it: the wave and the step, which all
# ranks count alike; the time when it began and when it had ended, in ns; the tokens of prompts that the rank computed in it, the requests that
# got their next token, and the KV tokens of these.
import functools
import os
import time

import torch
import torch.distributed as dist


def register():
    collectives()
    if os.environ.get("EVENKEEL_STEPS"):
        steps(os.environ["EVENKEEL_STEPS"])


def collectives():
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    def gather(self, x, sizes):
        sizes = sizes or [x.shape[0]] * self.world_size
        y = x.new_zeros((max(sizes), *x.shape[1:]))  # gloo gathers tensors of one size only
        y[: x.shape[0]] = x
        out = [torch.empty_like(y) for _ in sizes]
        dist.all_gather(out, y, group=self.device_group)
        return torch.cat([o[:s] for o, s in zip(out, sizes)])

    def all_gatherv(self, input_, dim=0, sizes=None):
        assert dim == 0
        if isinstance(input_, (list, tuple)):
            return [gather(self, x, sizes) for x in input_]
        return gather(self, input_, sizes)

    def reduce_scatterv(self, input_, dim=-1, sizes=None):
        assert dim == 0
        sizes = sizes or [input_.shape[0] // self.world_size] * self.world_size
        x = input_.contiguous().clone()
        dist.all_reduce(x, group=self.device_group)
        at = sum(sizes[: self.rank_in_group])
        return x[at : at + sizes[self.rank_in_group]].contiguous()

    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv


def steps(path):
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import DPEngineCoreProc

    if hasattr(Scheduler.schedule, "__wrapped__"):
        return  # vLLM loads plugins more than once
    schedule, step, ended = Scheduler.schedule, DPEngineCoreProc._process_engine_step, DPEngineCoreProc._has_global_unfinished_reqs

    @functools.wraps(schedule)
    def counted(self, *args, **kwargs):
        out = schedule(self, *args, **kwargs)
        prompt = decodes = kv = 0
        for name, tokens in out.num_scheduled_tokens.items():
            request = self.requests[name]
            if request.num_computed_tokens - tokens < request.num_prompt_tokens:  # num_computed_tokens has those of this step already
                prompt += tokens
            else:
                decodes += 1
                kv += request.num_computed_tokens
        self.counted = (prompt, decodes, kv)
        return out

    def begun(self):
        self.began, self.scheduler.counted = time.time_ns(), (0, 0, 0)
        return step(self)

    def told(self, *args, **kwargs):
        if not hasattr(self, "steps"):
            self.steps = open(f"{path}.{self.dp_rank}", "a", buffering=1)
        print(self.current_wave, self.step_counter, self.began, time.time_ns(), *self.scheduler.counted, file=self.steps)
        return ended(self, *args, **kwargs)

    Scheduler.schedule, DPEngineCoreProc._process_engine_step, DPEngineCoreProc._has_global_unfinished_reqs = counted, begun, told
