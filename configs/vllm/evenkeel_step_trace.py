"""Step trace of a vLLM decode deployment, for `evenkeel fit step`.

A stat logger plugin of vLLM's v1 engine. For each step of each data-parallel
rank it appends one line of JSON to a file:

    {"t_ms":..,"group":..,"rank":..,"step":..,"running":..,"kv_tokens":..}

t_ms is Unix time at the end of the step. What the rank then holds, kv_tokens,
is what its next step computes on, so that a step's length is the difference
to the rank's next line. It is for measuring and off unless
EVENKEEL_STEP_TRACE names a file. A trace that fails says so once and stops;
it never disturbs the engine. README.md has the set-up and its limits.
"""

import json
import logging
import os
import threading
import time

try:
    from vllm.v1.metrics.loggers import StatLoggerBase
except ImportError:  # the tests, and whoever looks at the file, need no vLLM
    StatLoggerBase = object

FILE = "EVENKEEL_STEP_TRACE"  # path; unset or empty: no trace
GROUP = "EVENKEEL_STEP_TRACE_GROUP"  # name of the barrier group, "main"
RANK = "EVENKEEL_STEP_TRACE_RANK"  # instead of the engine's own index
KV_TOKENS = "EVENKEEL_STEP_TRACE_KV_TOKENS"  # KV capacity of a rank, instead of blocks * block size
MAX_BYTES = "EVENKEEL_STEP_TRACE_MAX_BYTES"  # the file ends before it is larger, 256 MiB

log = logging.getLogger("vllm.evenkeel_step_trace")


class TraceFile:
    """A file that several loggers, and several processes, append whole lines to."""

    _opened = {}
    _lock = threading.Lock()

    def __init__(self, path, max_bytes):
        self.path = path
        self.ranks = set()  # the engines this process has loggers of
        self._max_bytes = max_bytes
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    @classmethod
    def open(cls, path, max_bytes):
        """Return the one TraceFile this process has of a path."""
        path = os.path.abspath(path)
        with cls._lock:
            if path not in cls._opened:
                cls._opened[path] = cls(path, max_bytes)
            return cls._opened[path]

    def append(self, line):
        """Write a line; false once the file would grow beyond its bound."""
        if os.fstat(self._fd).st_size + len(line) > self._max_bytes:
            return False
        if os.write(self._fd, line) != len(line):  # one write a line, so lines do not mix
            raise OSError("disk full")
        return True


class StepTrace(StatLoggerBase):
    """One engine's part of the trace; vLLM makes one for each engine it drives."""

    def __init__(self, vllm_config, engine_index=0):
        self._cache = getattr(vllm_config, "cache_config", None)
        self._step = 0
        self._file = None
        path = os.environ.get(FILE)
        if not path:
            return
        try:
            self._group = os.environ.get(GROUP) or "main"
            self._engine = engine_index
            self._rank = int(os.environ.get(RANK) or engine_index)
            self._capacity = int(os.environ.get(KV_TOKENS) or 0)
            self._file = TraceFile.open(path, int(os.environ.get(MAX_BYTES) or 256 << 20))
            self._file.ranks.add(engine_index)
        except (OSError, ValueError) as err:
            self._stop("no trace", err)

    def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0):
        """Called by vLLM after every step of the engine."""
        if self._file is None or scheduler_stats is None:
            return
        try:
            self._write(scheduler_stats)
        except Exception as err:  # whatever vLLM's next version changes, serving goes on
            self._stop("the trace ends", err)

    def log(self):
        """Every few seconds; there is nothing to sum up."""

    def log_engine_initialized(self):
        """Once the KV cache has its size."""
        if self._file is not None:
            log.info("evenkeel: rank %d of group %s writes steps to %s", self._rank, self._group, self._file.path)

    def _write(self, stats):
        self._step += 1
        line = json.dumps(
            {
                "t_ms": round(time.time() * 1000, 3),
                "group": self._group,
                "rank": self._rank,
                "step": self._step,
                "running": stats.num_running_reqs,
                "kv_tokens": round(stats.kv_cache_usage * self._kv_capacity()),
            },
            separators=(",", ":"),
        )
        if not self._file.append(line.encode() + b"\n"):
            self._stop("the trace ends", "%s has reached %s" % (self._file.path, MAX_BYTES))

    def _kv_capacity(self):
        """KV tokens of this rank, known once its engine has measured its memory.

        vLLM adds up in num_gpu_blocks the blocks of all engines that a process
        drives; a process has one logger for each of them.
        """
        if self._capacity == 0:
            blocks = self._cache.num_gpu_blocks
            if not blocks:
                raise ValueError("vLLM does not tell num_gpu_blocks; set " + KV_TOKENS)
            self._capacity = blocks // len(self._file.ranks) * self._cache.block_size
        return self._capacity

    def _stop(self, what, why):
        self._file = None
        log.warning("evenkeel: %s: %s", what, why)
