"""python3 -m unittest in this folder; vLLM is not needed."""

import json
import os
import tempfile
import unittest
from types import SimpleNamespace
from unittest import mock

import evenkeel_step_trace as trace


def config(blocks=1000, block_size=16):
    return SimpleNamespace(cache_config=SimpleNamespace(num_gpu_blocks=blocks, block_size=block_size))


def stats(running=3, usage=0.25):
    return SimpleNamespace(num_running_reqs=running, kv_cache_usage=usage)


class StepTraceTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = os.path.join(folder.name, "steps.jsonl")
        self.addCleanup(self.close)
        self.environ({trace.FILE: self.path})

    def close(self):
        for f in trace.TraceFile._opened.values():
            os.close(f._fd)
        trace.TraceFile._opened.clear()

    def environ(self, variables):
        patch = mock.patch.dict(os.environ, variables, clear=True)
        patch.start()
        self.addCleanup(patch.stop)

    def lines(self):
        with open(self.path, encoding="utf-8") as f:
            return [json.loads(line) for line in f]

    def test_a_line_a_step(self):
        t = trace.StepTrace(config(), 2)
        t.log_engine_initialized()
        with mock.patch("time.time", side_effect=[1700000000.5, 1700000000.5625]):
            t.record(stats(), None)
            t.record(stats(running=4, usage=0.5), None, mm_cache_stats=None, engine_idx=2)
        t.log()
        self.assertEqual(
            self.lines(),
            [
                {"t_ms": 1700000000500.0, "group": "main", "rank": 2, "step": 1, "running": 3, "kv_tokens": 4000},
                {"t_ms": 1700000000562.5, "group": "main", "rank": 2, "step": 2, "running": 4, "kv_tokens": 8000},
            ],
        )

    def test_a_call_without_scheduler_stats_is_no_step(self):
        t = trace.StepTrace(config())
        t.record(None, None)
        t.record(stats(), None)
        self.assertEqual([line["step"] for line in self.lines()], [1])

    def test_engines_of_one_process_share_its_blocks_and_the_file(self):
        both = config(blocks=2000)
        a, b = trace.StepTrace(both, 0), trace.StepTrace(both, 1)
        a.record(stats(usage=0.5), None)
        b.record(stats(usage=0.25), None)
        self.assertEqual([(line["rank"], line["kv_tokens"]) for line in self.lines()], [(0, 8000), (1, 4000)])

    def test_blocks_may_be_known_only_after_the_start(self):
        late = config(blocks=None)
        t = trace.StepTrace(late)
        late.cache_config.num_gpu_blocks = 100
        t.record(stats(usage=1), None)
        self.assertEqual(self.lines()[0]["kv_tokens"], 1600)

    def test_variables_name_group_rank_and_capacity(self):
        self.environ({trace.FILE: self.path, trace.GROUP: "east", trace.RANK: "7", trace.KV_TOKENS: "400"})
        trace.StepTrace(config(blocks=None)).record(stats(), None)
        line = self.lines()[0]
        self.assertEqual((line["group"], line["rank"], line["kv_tokens"]), ("east", 7, 100))

    def test_without_a_file_nothing_is_written(self):
        self.environ({})
        t = trace.StepTrace(config())
        t.record(stats(), None)
        t.log_engine_initialized()
        self.assertFalse(os.path.exists(self.path))

    def test_the_file_is_bounded(self):
        self.environ({trace.FILE: self.path, trace.MAX_BYTES: "250"})
        t = trace.StepTrace(config())
        with self.assertLogs(trace.log, "WARNING") as said:
            for _ in range(100):
                t.record(stats(), None)
        self.assertLessEqual(os.path.getsize(self.path), 250)
        self.assertEqual(len(self.lines()), 2)
        self.assertEqual(len(said.records), 1)

    def test_what_cannot_be_written_never_reaches_the_engine(self):
        for name, variables, cfg, recorded in [
            ("a folder that is not there", {trace.FILE: self.path + "/none/steps"}, config(), stats()),
            ("a number that is none", {trace.FILE: self.path, trace.KV_TOKENS: "many"}, config(), stats()),
            ("a size nobody tells", {trace.FILE: self.path}, config(blocks=0), stats()),
            ("stats of another version", {trace.FILE: self.path}, config(), SimpleNamespace(num_running_reqs=1)),
        ]:
            with self.subTest(name), mock.patch.dict(os.environ, variables, clear=True), self.assertLogs(trace.log, "WARNING") as said:
                t = trace.StepTrace(cfg)
                t.record(recorded, None)
                t.record(recorded, None)
                self.assertEqual(len(said.records), 1)


if __name__ == "__main__":
    unittest.main()
