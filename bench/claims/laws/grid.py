"""Prints what the steps of one kind of GPU take by aiconfigurator, a JSON object per line.

The only argument is a JSON object: gpu, engines, models, ranks, rows and contexts of decode steps, and the lengths of prompts.
All ranks are alike. A step is split into its parts, and each part has its time in ms and how much of that was measured.
"""

import json
import logging
import os
import re
import sys
import tempfile
import warnings
from importlib import resources

warnings.filterwarnings("ignore")
logging.disable(logging.CRITICAL)

from aiconfigurator.cli import api  # noqa: E402
from aiconfigurator.sdk import models  # noqa: E402
from aiconfigurator.sdk.config import RuntimeConfig  # noqa: E402
from aiconfigurator.sdk.inference_session import InferenceSession  # noqa: E402
from aiconfigurator_core.sdk import common  # noqa: E402
from aiconfigurator_core.sdk.operations.overlap import OverlapOp  # noqa: E402

KV = re.compile("attention|mla|gdn_(recurrence|scan|conv1d)|mamba_(ssm|conv1d)|kda")
SENDING = re.compile("dispatch|combine|_ar$|allreduce|p2p")
EXPERTS = re.compile("_moe$")
ROOM = 0.9  # of a GPU's memory is given to weights, KV and activations


def part(name):
    """The part of a step that an operation belongs to."""
    for of, names in (("sending", SENDING), ("experts", EXPERTS), ("attention", KV)):
        if names.search(name):
            return of
    return "dense"


class Steps:
    """The steps of one deployment. What runs beside something else is taken apart, so that each operation is seen."""

    def __init__(self, gpu, engine, model, ranks, phase):
        self.phase, self.beside = phase, set()
        get_model, run_static = models.get_model, InferenceSession.run_static

        def split(*args, **kwargs):
            self.model = get_model(*args, **kwargs)
            for name in ("generation_ops", "context_ops"):
                setattr(self.model, name, self.apart(getattr(self.model, name)))
            return self.model

        def keep(session, **kwargs):
            self.session = session
            return run_static(session, **kwargs)

        models.get_model, InferenceSession.run_static = split, keep
        try:
            self.version = api.cli_estimate(
                model, gpu, mode=self.mode(), backend_name=engine, isl=1000, osl=2, batch_size=1 if phase == "prompt" else 8,
                tp_size=1, attention_dp_size=ranks, moe_tp_size=1, moe_ep_size=ranks,
            ).backend_version
        finally:
            models.get_model, InferenceSession.run_static = get_model, run_static
        sends = self.model.config.moe_comm_backend or {}
        self.sends = sends.get("context" if phase == "prompt" else "generation", "")

    def mode(self):
        return "static_ctx" if self.phase == "prompt" else "static_gen"

    def apart(self, ops):
        out = []
        for op in ops:
            if isinstance(op, OverlapOp):  # shared experts run beside the others, and take no time of their own
                self.beside |= {o._name for o in op._group_b}
                out += [*op._group_a, *op._group_b]
            else:
                out.append(op)
        return out

    def step(self, rows, tokens):
        """The parts of a step of so many rows; None where they do not fit into the memory."""
        runtime = RuntimeConfig(batch_size=rows, isl=tokens, osl=2)
        summary = self.session.run_static(runtime_config=runtime, mode=self.mode(), stride=32)
        if summary.get_memory()["total"] * 2**30 > ROOM * summary.get_mem_capacity_bytes():
            return None
        if self.phase == "prompt":
            took, source = summary.get_context_latency_dict(), summary.get_context_source_dict()
        else:
            took, source = summary.get_generation_latency_dict(), summary.get_generation_source_dict()
        parts = {"kv_bytes": summary.get_kv_per_seq()[0], **{of: [0.0, 0.0] for of in ("attention", "dense", "sending", "experts")}}
        for name, ms in took.items():
            if name not in self.beside:
                at = parts[part(name)]
                at[0] += ms
                at[1] += ms if source.get(name) == "silicon" else 0
        return parts


def path(model, folder):
    """What aiconfigurator is told: it has the configurations of more models than it knows by name."""
    if model in common.DefaultHFModels:
        return model
    at = os.path.join(folder, os.path.basename(model))
    os.makedirs(at, exist_ok=True)
    with open(os.path.join(at, "config.json"), "w") as file:
        name = model.replace("/", "--") + "_config.json"
        file.write((resources.files("aiconfigurator_core") / "model_configs" / name).read_text())
    return at


def main():
    told = json.loads(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        for engine in told["engines"]:
            for model in told["models"]:
                for ranks in told["ranks"]:
                    for phase in ("decode", "prompt"):
                        one(told, engine, model, path(model, folder), ranks, phase)


def one(told, engine, model, at, ranks, phase):
    of = {"gpu": told["gpu"], "engine": engine, "model": model, "ranks": ranks, "phase": phase}
    grid = [(1, n) for n in told["prompts"]] if phase == "prompt" else [(n, c) for n in told["rows"] for c in told["contexts"]]
    try:
        steps = Steps(told["gpu"], engine, at, ranks, phase)
        for rows, tokens in grid:
            parts = steps.step(rows, tokens)
            if parts is not None:
                print(json.dumps({**of, "version": steps.version, "sends": steps.sends, "rows": rows, "tokens": tokens, **parts}))
    except Exception as e:  # whatever it lacks, it says here
        print(json.dumps({**of, "why": type(e).__name__ + ": " + str(e)}))


main()
