"""A server of SGLang without a model. What is SGLang's own: http_server, TokenizerManager,
DetokenizerManager, Req, SchedulerOutputStreamer, and how a scheduler takes requests.
Tokens follow from the adapter and all tokens before them, and a file is what a pair hands over."""

import os
import pathlib
import sys
import threading
import time
import traceback
import zlib

import zmq
from sglang.srt.disaggregation.utils import DisaggregationMode, TransferBackend, prepare_abort
from sglang.srt.entrypoints import http_server
from sglang.srt.entrypoints.engine import init_tokenizer_manager
from sglang.srt.managers import detokenizer_manager
from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenizedGenerateReqInput,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    GetInternalStateReq,
    GetInternalStateReqOutput,
    TokenizedGenerateReqInput,
    sock_recv,
)
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH
from sglang.srt.managers.scheduler import Scheduler, _make_abort_req
from sglang.srt.managers.scheduler_components.output_sender import SenderWrapper
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import PortArgs, prepare_server_args
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.utils.network import get_zmq_socket

STEP = float(os.environ.get("EVENKEEL_STEP", "0.02"))  # seconds of a decode step
ROOMS = pathlib.Path(os.environ.get("EVENKEEL_ROOMS", "/tmp/evenkeel-rooms"))
PATIENCE = 30  # seconds that one half of a pair waits for the other


class Nothing:
    """Has no attribute that is true."""

    def __getattr__(self, name):
        return None


class Stub(Scheduler):
    """Decides tokens by a checksum of all tokens before them."""

    def __init__(self, server_args, port_args, manager):
        context = zmq.Context(2)
        self.asked = get_zmq_socket(context, zmq.PULL, port_args.scheduler_input_ipc_name, False)
        self.to_tokenizer = SenderWrapper(get_zmq_socket(context, zmq.PUSH, port_args.tokenizer_ipc_name, False))
        detokenizer = SenderWrapper(get_zmq_socket(context, zmq.PUSH, port_args.detokenizer_ipc_name, False))
        self.server_args = server_args
        self.model_config = manager.model_config
        self.tokenizer = manager.tokenizer
        self.disaggregation_mode = DisaggregationMode(server_args.disaggregation_mode)
        self.transfer_backend = TransferBackend(server_args.disaggregation_transfer_backend)
        self.spec_algorithm = SpeculativeAlgorithm.NONE
        self.enable_session_radix_cache = self.enable_overlap = False
        self.session_controller = {}
        self.dllm_config = self.rust_server = None
        self.metrics_reporter = self.tree_cache = Nothing()
        self.tree_cache.supports_prefix_sharing = lambda: False
        self.kv_events_publisher = Nothing()
        self.disagg_metadata_buffers = Nothing()
        self.grammar_manager = Nothing()
        self.grammar_manager.process_req_with_grammar = lambda req: False
        self.beam_coordinator = Nothing()
        self.beam_coordinator.validate_and_init = lambda req, got: "this server has no beams"
        self.max_req_len = self.model_config.context_len - 1
        self.max_req_input_len = self.max_req_len - 5
        self.output_streamer = SchedulerOutputStreamer(
            send_to_detokenizer=detokenizer, tree_cache=self.tree_cache, server_args=server_args,
            is_generation=True, spec_algorithm=self.spec_algorithm,
            disaggregation_mode=self.disaggregation_mode, enable_hicache_storage=lambda: False)
        self.waiting, self.running, self.since = [], [], {}
        self.folder = ROOMS / str(server_args.disaggregation_bootstrap_port)

    def send_abort_output(self, abort, req):
        self.to_tokenizer.send_output(abort, req)

    def init_req_max_new_tokens(self, req):
        asked = req.sampling_params.max_new_tokens
        asked = 1 << 30 if asked is None else asked
        req.sampling_params.max_new_tokens = max(0, min(asked, self.max_req_len - len(req.origin_input_ids) - 1))

    def _add_request_to_queue(self, req, *args, **kwargs):
        self.since[req.rid] = time.monotonic()
        self.waiting.append(req)

    def take(self, got):
        if isinstance(got, TokenizedGenerateReqInput):
            got.unwrap_pickle_fields()
            self.handle_generate_request(got)
        elif isinstance(got, BatchTokenizedGenerateReqInput):
            for one in got:
                self.take(one)
        elif isinstance(got, AbortReq):
            self.end(got)
        elif isinstance(got, FlushCacheReqInput):
            self.to_tokenizer.send_output(FlushCacheReqOutput(success=True), got)
        elif isinstance(got, GetInternalStateReq):
            self.to_tokenizer.send_output(GetInternalStateReqOutput(internal_state={}), got)
        else:
            print("not understood:", type(got).__name__, file=sys.stderr, flush=True)

    def end(self, got):  # as Scheduler.abort_request, for requests that wait and that run
        matches = lambda req: got.abort_all or req.rid.startswith(got.rid)
        for req in [r for r in self.waiting if matches(r)]:
            if self.disaggregation_mode != DisaggregationMode.NULL:
                prepare_abort(req, "Aborted by AbortReq.")
                self.waiting.remove(req)
                self.output_streamer.stream_output([req], req.return_logprob)
                continue
            self.waiting.remove(req)
            self.send_abort_output(_make_abort_req(req, finished_reason=got.finished_reason), req)
        for req in self.running:
            if not req.finished() and matches(req):
                req.to_finish = FINISH_ABORT()

    def scores(self, ids, number):
        """The likeliest tokens after some, the first one of which is taken."""
        h = zlib.crc32(repr(list(ids)).encode())
        low, size = 3, self.model_config.vocab_size - 3
        taken = 2 if h % 97 == 0 else low + h % size
        return [(-(h % 64 + 1 + 64 * i) / 256, taken if i == 0 else low + (h + i) % size) for i in range(max(1, number))]

    def chance(self, ids, token):
        return -(zlib.crc32(repr((list(ids), token)).encode()) % 4096 + 1) / 256

    def prompt_scores(self, req):
        log, ids = req.logprob, list(req.origin_input_ids)
        start = max(0, req.logprob_start_len if req.logprob_start_len >= 0 else len(ids))
        log.input_token_logprobs_val, log.input_token_logprobs_idx = [], []
        log.input_top_logprobs_val, log.input_top_logprobs_idx = [], []
        log.input_token_ids_logprobs_val, log.input_token_ids_logprobs_idx = [], []
        for i in range(start, len(ids)):
            first = i == start  # the first has no tokens before it, or none that were computed
            log.input_token_logprobs_val.append(None if first else self.chance(ids[:i], ids[i]))
            log.input_token_logprobs_idx.append(ids[i])
            if log.top_logprobs_num > 0:
                top = self.scores(ids[:i], log.top_logprobs_num)
                log.input_top_logprobs_val.append(None if first else [v for v, _ in top])
                log.input_top_logprobs_idx.append(None if first else [t for _, t in top])
            if log.token_ids_logprob is not None:
                log.input_token_ids_logprobs_val.append(None if first else [self.chance(ids[:i], t) for t in log.token_ids_logprob])
                log.input_token_ids_logprobs_idx.append(None if first else log.token_ids_logprob)

    def prompt(self, req):
        """What a pair must agree on: the adapter, if there is one, and the prompt."""
        return ([req.lora_id] if req.lora_id else []) + list(req.origin_input_ids)

    def decode(self, req):
        ids = self.prompt(req) + list(req.output_ids)
        log = req.logprob
        top = self.scores(ids, log.top_logprobs_num)
        token = top[0][1]
        if token == 2 and (req.sampling_params.ignore_eos or len(req.output_ids) < req.sampling_params.min_new_tokens):
            token = 3
        req.output_ids.append(token)
        if req.return_logprob:
            log.output_token_logprobs_val.append(top[0][0])
            log.output_token_logprobs_idx.append(token)
            log.output_top_logprobs_val.append([v for v, _ in top] if log.top_logprobs_num else [])
            log.output_top_logprobs_idx.append([t for _, t in top] if log.top_logprobs_num else [])
            asked = log.token_ids_logprob
            log.output_token_ids_logprobs_val.append([self.chance(ids, t) for t in asked] if asked is not None else [])
            log.output_token_ids_logprobs_idx.append(asked if asked is not None else [])

    # A room is a file that the prefill engine writes and the decode engine removes.
    def prefilled(self, req):
        room = self.folder / str(req.bootstrap_room)
        if not getattr(req, "sent", False):
            if req.return_logprob:
                self.prompt_scores(req)
            self.decode(req)
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / ("." + room.name)).write_text(repr(self.prompt(req)))
            (self.folder / ("." + room.name)).rename(room)
            req.sent = True
            return False
        if room.exists():
            return self.late(req, room)
        req.finished_reason = FINISH_LENGTH(length=0)
        return True

    def fetched(self, req):
        room = ROOMS / str(req.bootstrap_port) / str(req.bootstrap_room)
        if not room.exists():
            return self.late(req, room)
        said = room.read_text()
        room.unlink()
        if said != repr(self.prompt(req)):
            prepare_abort(req, "the prompt or the adapter of the pair's other half is another one", status_code=500)
            return True
        return None

    def late(self, req, room):
        if time.monotonic() - self.since[req.rid] < PATIENCE:
            return False
        room.unlink(missing_ok=True)
        prepare_abort(req, f"nobody came to room {room}", status_code=500)
        return True

    def step(self):
        out = []
        for req in list(self.waiting):
            if self.disaggregation_mode == DisaggregationMode.PREFILL and req.to_finish is None:
                if self.prefilled(req):
                    self.waiting.remove(req)
                    out.append(req)
                continue
            if self.disaggregation_mode == DisaggregationMode.DECODE and req.to_finish is None:
                ended = self.fetched(req)
                if ended is not None:
                    if ended:
                        self.waiting.remove(req)
                        out.append(req)
                    continue
            elif req.return_logprob:
                self.prompt_scores(req)
            self.waiting.remove(req)
            self.running.append(req)
        for req in list(self.running):
            self.decode(req)
            req.update_finish_state()
            if req.finished():
                self.running.remove(req)
            out.append(req)
        if out:
            self.output_streamer.stream_output(out, any(r.return_logprob for r in out))
        for req in out:
            if req.finished():
                self.since.pop(req.rid, None)

    def loop(self):
        due = 0.0
        while True:
            busy = self.waiting or self.running
            wait = max(0.0, due - time.monotonic()) if busy else 1.0
            if self.asked.poll(int(wait * 1000)):
                self.take(sock_recv(self.asked))
                continue
            if busy and time.monotonic() >= due:
                due = time.monotonic() + STEP
                self.step()


def serve(args):
    server_args = prepare_server_args(args)
    server_args.resolve_once()
    server_args.check_server_args()
    publish(server_args, role="tokenizer", ranks=SpawnRanks(world_rank=0))
    port_args = PortArgs.init_new(server_args)
    manager, templates = init_tokenizer_manager(server_args, port_args)
    stub = Stub(server_args, port_args, manager)
    manager.max_req_input_len = stub.max_req_input_len
    detokenizer_manager.start_cpu_monitor_thread = lambda name: None  # this process has one
    detokenizer = detokenizer_manager.DetokenizerManager(server_args, port_args)

    def guarded(run):
        try:
            run()
        except BaseException:
            traceback.print_exc()
            os._exit(3)

    for run in (detokenizer.event_loop, stub.loop):
        threading.Thread(target=guarded, args=(run,), daemon=True).start()
    info = {"max_req_input_len": stub.max_req_input_len, "max_total_num_tokens": 100_000, "status": "ready"}
    http_server._setup_and_run_http_server(server_args, manager, templates, port_args, [info], None)
