"""What parts of a rank's decode step take on the GPU of this machine, with PyTorch and Triton alone: attention at
three contexts, projections and experts at three sizes, experts of prompts too. It prints a line of JSON for each, and ends within ten minutes.

Each time is that of one layer in a CUDA graph, between events, in the median of 20 replays, times the layers of the
model. A graph goes through copies of weights and KV that are together larger than the L2 cache. Attention is checked
against a float32 reference first. `least` is what the bytes that must be read and the arithmetic that must be done
take at the rates that this GPU reached when it read 4 GiB, and in one large matrix product.
"""

import json
import math
import statistics
import sys

import torch
import triton
import triton.language as tl

# Shapes are those of the models' config.json. Ranks are those of the law that the page compares with.
MODELS = [
    {"name": "Qwen/Qwen3-30B-A3B-FP8", "ranks": 8, "layers": 48, "moe": 48, "hidden": 2048, "heads": 32, "kv": 4, "head": 128, "inter": 768, "experts": 128, "top": 8},
    {"name": "Qwen/Qwen3-235B-A22B-FP8", "ranks": 8, "layers": 94, "moe": 94, "hidden": 4096, "heads": 64, "kv": 4, "head": 128, "inter": 1536, "experts": 128, "top": 8},
    {"name": "deepseek-ai/DeepSeek-V3", "ranks": 16, "layers": 61, "moe": 58, "hidden": 7168, "heads": 128, "kv": 0, "latent": 512, "rope": 64, "nope": 128, "q_lora": 1536,
     "inter": 2048, "experts": 256, "top": 8},
]
ATTENTION_ROWS, CONTEXTS, ROWS = 16, (1000, 4000, 16000), (16, 64, 256)
PROMPTS = (1024, 4096, 8192)
BEYOND_L2 = 400 << 20
FP8 = torch.float8_e4m3fn


def took(run):
    """The milliseconds of one call of run, which is given the number of the call."""
    calls = 8
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(calls):
            run(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            run(i)
    times = []
    for _ in range(23):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / calls)
    return statistics.median(times[3:])


@triton.jit
def read(X, OUT, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE * 8
    sums = tl.zeros([SIZE], tl.int64)
    for i in range(8):
        sums += tl.load(X + at + i * SIZE + tl.arange(0, SIZE))
    tl.store(OUT + tl.program_id(0), tl.sum(sums, 0))


def rates():
    """The bytes per ms that are read, and the operations per ms of products in bf16 and fp8."""
    size = 1024
    x = torch.randint(0, 1 << 40, ((4 << 30) // 8,), device="cuda")
    blocks = x.numel() // (8 * size)
    out = torch.empty(blocks, dtype=torch.int64, device="cuda")
    moved = x.numel() * 8 / took(lambda i: read[(blocks,)](x, out, SIZE=size, num_warps=8))
    assert out.sum() == x.sum(), "not everything was read"
    del x
    n = 8192
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    bf16 = 2 * n**3 / took(lambda i: a @ b)
    one = torch.ones((), device="cuda")
    a, b = a.to(FP8), b.to(FP8).t()
    fp8 = 2 * n**3 / took(lambda i: torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True))
    return moved, bf16, fp8


@triton.jit
def span(Q, K, V, OUT, LSE, ctx, each, scale, heads, k_row, k_head, v_row, v_head, q_dim: tl.constexpr, groups,
         H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, N: tl.constexpr):
    """A span of a request's KV against a block of H query heads. D are the dimensions of a value, R those that only keys have."""
    request, block, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group = block // (tl.num_programs(1) // groups)
    h = block * H + tl.arange(0, H) if groups == 1 else group * (heads // groups) + tl.arange(0, H)
    known = h < heads if groups == 1 else tl.arange(0, H) < heads // groups
    d = tl.arange(0, D)
    q = tl.load(Q + (request * heads + h)[:, None] * q_dim + d[None, :], known[:, None], 0.0)
    if R > 0:
        r = D + tl.arange(0, R)
        q_only = tl.load(Q + (request * heads + h)[:, None] * q_dim + r[None, :], known[:, None], 0.0)
    most = tl.full([H], -float("inf"), tl.float32)
    total = tl.zeros([H], tl.float32)
    sums = tl.zeros([H, D], tl.float32)
    begin = part * each
    K += request.to(tl.int64) * ctx * k_row + group * k_head
    V += request.to(tl.int64) * ctx * v_row + group * v_head
    for at in range(begin, tl.minimum(begin + each, ctx), N):
        n = at + tl.arange(0, N)
        there = n < tl.minimum(begin + each, ctx)
        k = tl.load(K + n[:, None] * k_row + d[None, :], there[:, None], 0.0).to(tl.bfloat16)
        s = tl.dot(q, k.T)
        if R > 0:
            k_only = tl.load(K + n[:, None] * k_row + r[None, :], there[:, None], 0.0).to(tl.bfloat16)
            s += tl.dot(q_only, k_only.T)
        s = tl.where(there[None, :], s * scale, -float("inf"))
        larger = tl.maximum(most, tl.max(s, 1))
        p = tl.exp2(s - larger[:, None])
        less = tl.exp2(most - larger)
        total = total * less + tl.sum(p, 1)
        if R > 0:
            v = k  # a latent's value is the first part of its key
        else:
            v = tl.load(V + n[:, None] * v_row + d[None, :], there[:, None], 0.0).to(tl.bfloat16)
        sums = sums * less[:, None] + tl.dot(p.to(tl.bfloat16), v)
        most = larger
    to = (request * heads + h) * tl.num_programs(2) + part
    tl.store(OUT + to[:, None] * D + d[None, :], sums / total[:, None], known[:, None])
    tl.store(LSE + to, most + tl.log2(total), known)


@triton.jit
def merge(OUT, LSE, RESULT, parts, P: tl.constexpr, D: tl.constexpr):
    at, p, d = tl.program_id(0), tl.arange(0, P), tl.arange(0, D)
    lse = tl.load(LSE + at * parts + p, p < parts, -float("inf"))
    weight = tl.exp2(lse - tl.max(lse, 0))
    sums = tl.load(OUT + (at * parts + p)[:, None] * D + d[None, :], (p < parts)[:, None], 0.0)
    tl.store(RESULT + at * D + d, tl.sum(sums * weight[:, None], 0) / tl.sum(weight, 0))


class Attention:
    """Decode attention of rows requests of one layer, whose KV is in fp8 or bf16."""

    def __init__(self, m, rows, ctx, kind, copies=1):
        self.m, self.rows, self.ctx = m, rows, ctx
        self.latent = m["kv"] == 0
        self.d, self.r = (m["latent"], m["rope"]) if self.latent else (m["head"], 0)
        self.groups = 1 if self.latent else m["kv"]
        shape = (rows, ctx, 1, self.d + self.r) if self.latent else (rows, ctx, m["kv"], self.d)
        self.k = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(kind) for _ in range(copies)]
        self.v = self.k if self.latent else [torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(kind) for _ in range(copies)]
        self.q = torch.randn(rows, m["heads"], self.d + self.r, device="cuda", dtype=torch.bfloat16)
        self.scale = 1 / math.sqrt(m["nope"] + m["rope"] if self.latent else self.d)
        self.result = torch.empty(rows, m["heads"], self.d, device="cuda", dtype=torch.bfloat16)

    def split(self, parts):
        self.parts, self.each = parts, triton.cdiv(triton.cdiv(self.ctx, parts), 64) * 64
        self.parts = triton.cdiv(self.ctx, self.each)
        self.out = torch.empty(self.rows, self.m["heads"], self.parts, self.d, device="cuda", dtype=torch.float32)
        self.lse = torch.empty(self.rows, self.m["heads"], self.parts, device="cuda", dtype=torch.float32)

    def run(self, i, tile=64, warps=4, stages=2):
        k, v = self.k[i % len(self.k)], self.v[i % len(self.v)]
        block = 64 if self.latent else 16
        blocks = self.m["heads"] // block if self.latent else self.groups
        span[(self.rows, blocks, self.parts)](
            self.q, k, v, self.out, self.lse, self.ctx, self.each, self.scale / math.log(2), self.m["heads"], k.stride(1), k.stride(2), v.stride(1), v.stride(2),
            q_dim=self.d + self.r, groups=self.groups, H=block, D=self.d, R=self.r, N=tile, num_warps=warps, num_stages=stages)
        merge[(self.rows * self.m["heads"],)](self.out, self.lse, self.result, self.parts, P=triton.next_power_of_2(self.parts), D=self.d)

    def error(self):
        """How far the result is from that in float32, relative."""
        k, v = self.k[0].float(), self.v[0].float()[..., : self.d]
        heads = self.m["heads"] // self.groups
        q = self.q.float().view(self.rows, self.groups, heads, -1)
        s = torch.einsum("bghd,bngd->bghn", q, k) * self.scale
        want = torch.einsum("bghn,bngd->bghd", s.softmax(-1), v).reshape(self.rows, self.m["heads"], self.d)
        return ((self.result.float() - want).norm() / want.norm()).item()


def attention(m, ceilings):
    moved, bf16, fp8 = ceilings
    choices = [(64, 4, 2), (64, 8, 2), (128, 8, 2), (32, 4, 3)] if m["kv"] else [(64, 8, 1), (32, 8, 2), (32, 4, 2), (64, 8, 2), (32, 8, 1)]
    for ctx in CONTEXTS:
        size = ATTENTION_ROWS * ctx * ((m["latent"] + m["rope"]) if m["kv"] == 0 else 2 * m["kv"] * m["head"])
        best = None
        for kind, bytes_each in ((FP8, 1), (torch.bfloat16, 2)):
            a = Attention(m, ATTENTION_ROWS, ctx, kind, max(2, min(8, BEYOND_L2 // (size * bytes_each) + 1)))
            for parts in (4, 8, 16, 32):
                if ctx // parts < 64:
                    continue
                a.split(parts)
                for choice in choices:
                    try:
                        a.result.fill_(float("nan"))
                        a.run(0, *choice)
                        off = a.error() if ctx == CONTEXTS[0] else 0.0
                        ms = took(lambda i: a.run(i, *choice))
                    except Exception as e:  # a choice that needs more shared memory than there is
                        print("left out:", m["name"], kind, parts, choice, type(e).__name__, str(e)[:80].replace("\n", " "), file=sys.stderr)
                        continue
                    if not off < 0.02:
                        raise SystemExit(f"{m['name']}: attention is wrong by {off}")
                    if best is None or ms < best[0]:
                        best = (ms, off, f"Triton, KV in {'fp8' if kind == FP8 else 'bf16'}, {a.parts} spans, {choice}")
            del a
        work = 2 * ATTENTION_ROWS * ctx * m["heads"] * ((2 * m["latent"] + m["rope"]) if m["kv"] == 0 else 2 * m["head"])
        say(m, "attention", ATTENTION_ROWS, ctx, best[0], max(size / moved, work / fp8), m["layers"], best[2])


def eight(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).to(FP8)


def product(x, w, one):
    return torch._scaled_mm(x, w.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)


def dense(m, ceilings):
    """The products around attention, without norms, positions and the quantizing of activations."""
    moved, bf16, fp8 = ceilings
    one = torch.ones((), device="cuda")
    if m["kv"]:
        shapes = [(m["hidden"], (m["heads"] + 2 * m["kv"]) * m["head"]), (m["heads"] * m["head"], m["hidden"])]
    else:
        shapes = [(m["hidden"], m["q_lora"] + m["latent"] + m["rope"]), (m["q_lora"], m["heads"] * (m["nope"] + m["rope"])), (m["heads"] * m["nope"], m["hidden"])]
    size = sum(k * n for k, n in shapes)
    copies = min(16, BEYOND_L2 // size + 1)
    weights = [[eight(n, k) for k, n in shapes] for _ in range(copies)]
    up = None if m["kv"] else torch.randn(m["heads"], m["nope"], m["latent"], device="cuda", dtype=torch.bfloat16)
    for rows in ROWS:
        inputs = [eight(rows, k) for k, _ in shapes]
        if up is not None:
            nope, latent = (torch.randn(m["heads"], rows, n, device="cuda", dtype=torch.bfloat16) for n in (m["nope"], m["latent"]))

        def run(i):
            for x, w in zip(inputs, weights[i % copies]):
                product(x, w, one)
            if up is not None:  # queries go into the latent's space, and values come out of it
                torch.bmm(nope, up)
                torch.bmm(latent, up.transpose(1, 2))

        ms = took(run)
        extra = 0 if up is None else 2 * up.numel()
        floor = max((size + 2 * extra) / moved, 2 * rows * size / fp8 + 2 * rows * extra / bf16)
        say(m, "projections", rows, 1, ms, floor, m["layers"], "cuBLAS, fp8")


def fullest(m, tokens, draw):
    """The rows of each expert of the fullest rank, where experts are as unequally wanted as aiconfigurator assumes: each
    wants between 1 and 0.8 of all tokens, drawn evenly by the logarithm, and all of them together what is routed."""
    rows = torch.exp(torch.rand(m["experts"], generator=draw) * math.log(0.8 * tokens))
    for _ in range(20):  # no expert has a token twice
        rows = (rows * (tokens * m["top"] / rows.sum())).clamp(max=tokens)
    of = rows.view(m["ranks"], -1)
    return of[of.sum(1).argmax()].round().int().tolist()


def experts(m, ceilings):
    """The products of the experts of one rank, with as many rows of each expert, and as they are on the fullest rank
    where some experts are wanted more. Routing, sorting, activation and quantizing are not in it."""
    moved, bf16, fp8 = ceilings
    of = m["experts"] // m["ranks"]
    size = of * 3 * m["hidden"] * m["inter"]
    copies = max(2, BEYOND_L2 // size + 1)
    weights = [(eight(of, 2 * m["inter"], m["hidden"]), eight(of, m["hidden"], m["inter"])) for _ in range(copies)]
    scales = (torch.ones(of, 2 * m["inter"], device="cuda"), torch.ones(of, m["hidden"], device="cuda"))

    def measure(rows):
        offs = torch.tensor(rows, dtype=torch.int32).cumsum(0).int().cuda()
        x, y, ones = eight(sum(rows), m["hidden"]), eight(sum(rows), m["inter"]), torch.ones(sum(rows), device="cuda")

        def run(i):
            up, down = weights[i % copies]
            torch._scaled_grouped_mm(x, up.transpose(1, 2), ones, scales[0], offs=offs, out_dtype=torch.bfloat16, use_fast_accum=True)
            torch._scaled_grouped_mm(y, down.transpose(1, 2), ones, scales[1], offs=offs, out_dtype=torch.bfloat16, use_fast_accum=True)

        return took(run)

    for part, sizes in (("experts", ROWS), ("prompts", PROMPTS)):
        for n in sizes:
            floor = max(size / moved, 2 * n * m["top"] * 3 * m["hidden"] * m["inter"] / fp8)
            each, more = divmod(n * m["top"], of)
            draw = torch.Generator().manual_seed(n)
            drawn = [fullest(m, m["ranks"] * n, draw) for _ in range(5)]
            say(m, part, *((n, 1) if part == "experts" else (1, n)), measure([each + (i < more) for i in range(of)]), floor, m["moe"], "CUTLASS, fp8",
                unequal=statistics.mean(measure(rows) for rows in drawn) * m["moe"], fullest=statistics.mean(sum(rows) for rows in drawn) / (n * m["top"]))


def say(m, part, rows, tokens, ms, floor, layers, kernel, **more):
    of = {"model": m["name"], "ranks": m["ranks"], "part": part, "rows": rows, "tokens": tokens}
    times = {"ms": ms * layers, "least": floor * layers, **more}
    print(json.dumps({**of, **{k: round(v, 4) for k, v in times.items()}, "kernel": kernel}), flush=True)


def main():
    torch.manual_seed(1)
    with torch.inference_mode():
        ceilings = rates()
        print(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
                          "gb_s": round(ceilings[0] / 1e6, 1), "bf16_tflops": round(ceilings[1] / 1e9, 1), "fp8_tflops": round(ceilings[2] / 1e9, 1)}), flush=True)
        for m in MODELS:
            for part in (dense, experts, attention):
                part(m, ceilings)
                torch.cuda.empty_cache()


main()
