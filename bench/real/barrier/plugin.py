# vLLM 0.32's CpuCommunicator lacks all_gatherv and reduce_scatterv, which a MoE model calls in every layer when it runs data parallel. This plugin
# (vllm.general_plugins) supplies both by gloo. vLLM itself stays as it is.
import torch
import torch.distributed as dist


def register():
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
