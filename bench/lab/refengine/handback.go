package refengine

import (
	"encoding/json"
	"fmt"
	"time"

	"evenkeel/bench/lab/refengine/group"
)

// keepsAnswer says whether the KV of an answer stays for a next turn, as with bidirectional_kv_xfer
// (vLLM 0.32 and 0.33, request_finished in nixl/pull_scheduler.py): of each request that came with
// a hand-off and that the engine's core ends. At a stop string the front end aborts the request,
// unless it has ended.
func (c Config) keepsAnswer(r *request, p plan) bool {
	return c.KV.KeepsAnswers > 0 && r.leg == LegDecode && (p.stopReason[0] != '"' || p.core == "length")
}

// handBack is what such an answer tells of its KV.
func handBack(l *life, r *request, name string) func(made int) []byte {
	cfg := l.engine.cfg
	id, _ := json.Marshal(name) // a string always marshals
	return func(made int) []byte {
		tokens, registration := r.prompt.Tokens()+made-1, ""
		if !cfg.before(33) {
			registration = `"remote_registration_generation":1,`
		}
		return fmt.Appendf(nil, `{"do_remote_prefill":false,"do_remote_decode":true,"remote_block_ids":%s,"remote_engine_id":%q,"remote_request_id":%s,"remote_host":%q,"remote_port":%d,`+
			`"tp_size":1,"dcp_size":1,"pp_size":1,"remote_num_tokens":%d,"remote_blocks_expiry_time":%.3f,%s"transfer_mode":"pull"}`,
			blockList(l.newBlocks(tokens), false, r.troubles), l.engineID(r.rank), id, cfg.Server.Advertise, l.ports[l.portOf(r.rank)],
			tokens, float64(time.Now().Add(cfg.KV.KeepsAnswers).UnixMilli())/1000, registration)
	}
}

func (a *answer) appendHandBack(dst []byte, made int) []byte {
	if a.handBack == nil {
		return dst
	}
	return append(dst, a.handBack(made)...)
}

// giveUpLater gives a finished answer up after a while, and then its blocks are free.
func giveUpLater(l *life, j *group.Job) {
	time.AfterFunc(l.engine.cfg.KV.KeepsAnswers, func() {
		if j.End.Load() == group.Finished {
			l.group.Cancel(j)
		}
	})
}
